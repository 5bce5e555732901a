"""Linear layers and norms in Triton: what the modules compute, and the same bits for a row among any others."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from eyas.targets.native.forms import NormForm
from eyas.targets.native.library import Activation
from eyas.targets.native.packed import WeightFormat, random_blocks, round_to_int4, round_to_int8
from eyas.targets.triton.linear import Norm, Weight, linear
from eyas.targets.triton.norm import normalize
from eyas.targets.triton.packed_linears import TritonInt4Linear, TritonInt8Linear

CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3}
DTYPES = [*CLOSE]
INPUTS, OUTPUTS = 96, 80
ACTIVATIONS = {
    Activation.SILU: F.silu, Activation.GELU: partial(F.gelu, approximate="tanh"), Activation.EXACT_GELU: F.gelu,
    Activation.SQUARED_RELU: lambda x: F.relu(x).square(),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def _close(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    gap = (found.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert gap <= CLOSE[expected.dtype]


def _linear(dtype: torch.dtype, bias: bool = True) -> nn.Linear:
    return nn.Linear(INPUTS, OUTPUTS, bias=bias).requires_grad_(False).to(dtype)


def _norms(dtype: torch.dtype) -> dict[str, Any]:
    made = {"llama": LlamaRMSNorm(INPUTS), "gemma": Gemma2RMSNorm(INPUTS), "layer norm": nn.LayerNorm(INPUTS)}
    for norm in made.values():
        for parameter in norm.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
    return {name: norm.requires_grad_(False).to(dtype) for name, norm in made.items()}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["llama", "gemma", "layer norm"])
def test_a_normed_gated_product_with_a_residual(name: str, dtype: torch.dtype) -> None:
    norm, gate, up = _norms(dtype)[name], _linear(dtype), _linear(dtype)
    x, residual = torch.randn(3, INPUTS).to(dtype), torch.randn(3, OUTPUTS).to(dtype)
    form = Norm.of(NormForm.of(norm, dtype), dtype)
    found = linear(x, Weight.of(gate), form, Weight.of(up), Activation.SILU, residual=residual, factor=0.5)
    _close(found, residual + (F.silu(gate(norm(x))) * up(norm(x))) * 0.5)
    _close(normalize(x, form), norm(x))
    _close(normalize(x, form, x, 2.0), x + norm(x) * 2.0)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation: Activation) -> None:
    layer, x, addend = _linear(torch.float32, False), torch.randn(2, INPUTS), torch.randn(2, OUTPUTS)
    _close(
        linear(x, Weight.of(layer), activation=activation, addend=addend), ACTIVATIONS[activation](layer(x)) + addend
    )


@pytest.mark.parametrize("kind", WeightFormat)
def test_packed_weights_in_every_format_of_the_cpu(kind: WeightFormat) -> None:
    blocks, x = random_blocks(kind, OUTPUTS, 128), torch.randn(3, 128)
    expected, weight = blocks.floats(128), Weight.of_blocks(blocks, 128)
    _close(weight.floats(), expected)
    _close(linear(x, weight), x @ expected.T)
    second = random_blocks(kind, OUTPUTS, 128, seed=1)
    x = x / expected.abs().max()
    found = linear(x, weight, second=Weight.of_blocks(second, 128), activation=Activation.SILU)
    _close(found, F.silu(x @ expected.T) * (x @ second.floats(128).T))
    assert weight.values.nbytes == OUTPUTS * 128 * (4 if kind.bits == 4 else 8) // 8


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [TritonInt8Linear, TritonInt4Linear])
def test_a_layer_that_quantizes_its_weight(kind: type[TritonInt8Linear], dtype: torch.dtype) -> None:
    """It multiplies by the codes' values, and is restored to them; parts of outputs and joint ones are the same."""
    plain = nn.Linear(128, OUTPUTS).requires_grad_(False).to(dtype)
    made, x = kind(plain, False), torch.randn(2, 3, 128).to(dtype)
    rounded = {"int8": round_to_int8, "int4": round_to_int4}[kind.name](plain.weight)
    _close(made.packed.floats(), rounded.floats(128))
    assert made.weight.equal(made.packed.floats().to(dtype))
    _close(made(x), F.linear(x, made.weight, plain.bias))
    flat = x.flatten(0, 1)
    parts = [made.packed.rows(0, 48), made.packed.rows(48, OUTPUTS - 48)]
    whole = linear(flat, made.packed)
    assert torch.cat([linear(flat, part) for part in parts], dim=1).equal(whole)
    assert linear(flat, Weight.joined(parts)).equal(whole)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packed", [False, True])
def test_a_row_has_the_same_bits_among_any_others(packed: bool, dtype: torch.dtype) -> None:
    """Alone, and at every place among 2 to 70 rows, of which 64 are in a tile."""
    blocks = random_blocks(WeightFormat.MINIMUM4, OUTPUTS, 128)
    weight = Weight.of_blocks(blocks, 128) if packed else Weight.of(nn.Linear(128, OUTPUTS).to(dtype))
    norm = Norm.of(NormForm(1 + torch.rand(128), 1e-5, True), dtype)
    rows = torch.randn(70, 128).to(dtype)
    run = partial(linear, weight=weight, norm=norm, second=weight, activation=Activation.SILU)
    expected = run(rows)
    for place in (0, 1, 31, 63, 64, 69):
        assert run(rows[place : place + 1]).equal(expected[place : place + 1])
    for count in (2, 17, 64):
        shift = int(torch.randint(70, ()))
        some = torch.arange(shift, shift + count) % 70
        assert run(rows[some]).equal(expected[some]), (count, shift)


def test_the_invariance_can_fail() -> None:
    """A sum in another order has other bits, so the test above compares something."""
    rows, layer = torch.randn(70, 128), nn.Linear(128, OUTPUTS)
    back = nn.Linear(128, OUTPUTS)
    back.weight.data, back.bias.data = layer.weight.data.flip(1).contiguous(), layer.bias.data
    found = linear(rows.flip(1).contiguous(), Weight.of(back))
    assert not found.equal(linear(rows, Weight.of(layer)))
