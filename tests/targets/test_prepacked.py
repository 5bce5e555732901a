"""Prepacked linears have the numbers and the interface of plain ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from eyas.engine import Engine
from eyas.errors import UsageError
from eyas.targets import Target, load_target
from eyas.targets.fingerprint import fingerprint
from eyas.targets.linears import PrepackedLinear, can_prepack, prepack_linears
from eyas.types import Request, SamplingParams

from .. import tiny

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not can_prepack(CPU, torch.float32), reason="this CPU has no prepacked kernels")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5,), (1, 5), (3, 2, 5), (0, 5)])
def test_a_prepacked_layer_multiplies_alike(bias: bool, shape: tuple[int, ...]) -> None:
    parent = nn.Sequential(nn.Linear(5, 7, bias=bias))
    x = torch.randn(shape)
    weight = parent[0].weight.detach().clone()
    with torch.inference_mode():
        expected = parent(x)
        assert prepack_linears(parent) == 1
        torch.testing.assert_close(parent(x), expected)
    prepacked = parent[0]
    assert isinstance(prepacked, PrepackedLinear)
    assert torch.equal(prepacked.weight, weight)
    assert (prepacked.in_features, prepacked.out_features) == (5, 7)


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="oneDNN has no bfloat16 here")
def test_in_bfloat16_a_row_does_not_depend_on_its_neighbors() -> None:
    parent = nn.Sequential(nn.Linear(16, 24, dtype=torch.bfloat16))
    assert prepack_linears(parent) == 1
    rows = torch.randn(70, 16).bfloat16()
    with torch.inference_mode():
        for count in (1, 2, 5, 16, 33, 70):
            assert torch.equal(parent(rows[:count]), parent(rows)[:count])


def test_an_input_gets_its_gradient() -> None:
    parent = nn.Sequential(nn.Linear(5, 7).requires_grad_(False))
    x = torch.randn(3, 5, requires_grad=True)
    (expected,) = torch.autograd.grad(parent(x).square().sum(), x)
    prepack_linears(parent)
    (found,) = torch.autograd.grad(parent(x).square().sum(), x)
    torch.testing.assert_close(found, expected)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_a_loaded_target_of_any_architecture_says_the_same(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eyas.targets.loading.best_layout", lambda *_: PrepackedLinear)
    tiny.build_model(name).save_pretrained(tmp_path)
    plain, target = (load_target(tmp_path, device="cpu", prepacked=prepacked) for prepacked in (False, True))
    assert any(isinstance(module, PrepackedLinear) for module in target.model.modules())
    assert fingerprint(plain.model) == fingerprint(target.model)
    prompt = tiny.prompts(9)[0]
    read = [
        next(iter(made.prefill(made.allocate(1), range(1), [prompt], (1, tiny.LAYERS)))) for made in (plain, target)
    ]
    torch.testing.assert_close(read[0].taps, read[1].taps, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("tied", [True, False])
def test_a_prepacked_model_generates_alike(tied: bool) -> None:
    prompt = tiny.prompts(13)[0]
    expected = tiny.continuation(tiny.build_model("llama", tie_word_embeddings=tied), prompt, 12)
    model = tiny.build_model("llama", tie_word_embeddings=tied)
    assert prepack_linears(model) == 7 * tiny.LAYERS + 1
    target = Target(model)
    assert target.vocab_size == tiny.VOCAB
    done = Engine(target).generate([Request(tuple(prompt), SamplingParams(max_tokens=12))])
    assert done[0].token_ids == expected


@pytest.mark.filterwarnings("ignore:`torch.jit.*:DeprecationWarning")  # torch's own compiler uses it
def test_prepacking_is_the_default_but_not_for_a_compiled_model(tmp_path: Path) -> None:
    tiny.build_model("llama").save_pretrained(tmp_path)
    options: dict[str, bool]
    for options, prepacked in (({}, True), ({"prepacked": False}, False), ({"compiled": True}, False)):
        target = load_target(tmp_path, device="cpu", **options)
        assert isinstance(target.model.lm_head, PrepackedLinear) == prepacked
    with pytest.raises(UsageError, match="choose one"):
        load_target(tmp_path, device="cpu", compiled=True, prepacked=True)
