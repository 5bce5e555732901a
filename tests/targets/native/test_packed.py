"""Weights in 4 and 8 bits: blocks as GGUF files have them, and products of integers, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eyas.targets.native import packed_linears
from eyas.targets.native.library import PANEL, kernels
from eyas.targets.native.linears import as_linear
from eyas.targets.native.packed import (
    GGML,
    GROUP,
    PIECE,
    WeightBlocks,
    WeightFormat,
    panels_of_rows,
    product,
    random_blocks,
    round_to_int4,
    round_to_int8,
)
from eyas.targets.native.packed_linears import Int8Linear, PackedEmbedding, PackedLinear, sums_codes

from ... import gguf_models
from .test_linears import each_token_alone

pytestmark = pytest.mark.skipif(kernels() is None, reason="no compiler, or neither AVX2 nor AVX-512")


def layer(
    blocks: WeightBlocks, width: int, dtype: torch.dtype = torch.float32, bias: Tensor | None = None
) -> PackedLinear:
    return PackedLinear.of_blocks([blocks], blocks.kind.name, dtype, (len(blocks.codes), width), bias)


def rounded(value: Fraction) -> Fraction:
    """A fraction as the nearest float32, without a step through float64."""
    near = float(np.float32(float(value)))
    around = [np.nextafter(np.float32(near), np.float32(side)) for side in (-np.inf, np.inf)]
    return min((Fraction(float(each)) for each in (near, *around)), key=lambda each: abs(each - value))


def summed(blocks: WeightBlocks, x: Tensor) -> Tensor:
    """[T, out] by exact arithmetic: sums of codes, then one rounding after another, block by block."""
    count = blocks.codes.shape[1]
    found = torch.empty(len(x), len(blocks.codes))
    factors, minimum = blocks.factors()
    inner = torch.ones(1, dtype=torch.long).expand(*blocks.codes.shape[:2], 1)
    if blocks.kind.has_halves:
        inner = blocks.scales.long()
        factors = blocks.shared.float().repeat_interleave(8, 1)
    for t, row in enumerate(torch.nn.functional.pad(x, (0, count * GROUP - x.shape[1])).view(len(x), count, GROUP)):
        most = row.abs().amax(1)
        codes = (row * (127 / most).unsqueeze(1)).round().long()
        scales = (most * torch.tensor(1 / 127)).tolist()
        for o in range(len(blocks.codes)):
            total = Fraction(0)
            for b in range(count):
                weights = (blocks.codes[o, b].long() - blocks.kind.zero).view(inner.shape[2], -1) * inner[
                    o, b
                ].unsqueeze(1)
                scaled = rounded(Fraction(int((weights.flatten() * codes[b]).sum())) * Fraction(scales[b]))
                total = rounded(scaled * Fraction(float(factors[o, b, 0])) + total)
                if minimum is not None:
                    offset = rounded(Fraction(int(codes[b].sum())) * Fraction(scales[b]))
                    total = rounded(offset * Fraction(float(minimum[o, b, 0])) + total)
            found[t, o] = float(total)
    return found


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(WeightFormat), tokens=st.integers(1, 20) | st.integers(33, 40), out=st.integers(1, 50),
    width=st.integers(1, 200), seed=st.integers(0, 99),
)  # fmt: skip
def test_sums_of_codes_are_exact_and_blocks_are_added_in_their_order(
    kind: WeightFormat, tokens: int, out: int, width: int, seed: int
) -> None:
    blocks = random_blocks(kind, out, width, seed)
    x = torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed)) + 1e-3
    found = layer(blocks, width)(x)
    assert torch.equal(found, summed(blocks, x))
    torch.testing.assert_close(found, product(blocks, x), rtol=1e-5, atol=1e-5 * float(found.abs().max()))


@pytest.mark.parametrize("kind", WeightFormat)
def test_the_largest_codes_do_not_overflow(kind: WeightFormat) -> None:
    """Pairs of products in 16 bits are at their limit, and a block's sum near that of exact floats."""
    drawn = random_blocks(kind, 16, 64)
    codes = torch.full_like(drawn.codes, (1 << kind.bits) - 1)
    codes[8:] = 0
    scales = torch.full_like(drawn.scales, 1 if kind < WeightFormat.SUPER5 else -128 if kind.has_halves else 63)
    blocks = replace(drawn, codes=codes, scales=scales)
    x = torch.full((2, 2 * GROUP), 127.0)
    x[1] = -127.0
    expected = x.double() @ blocks.floats(64).double().T
    torch.testing.assert_close(layer(blocks, 64)(x).double(), expected, rtol=1e-6, atol=1e-3)


@pytest.mark.parametrize("kind", WeightFormat)
def test_a_token_s_product_does_not_depend_on_the_others(kind: WeightFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    native = layer(random_blocks(kind, 150, 96), 96, torch.bfloat16, torch.randn(150))
    x = torch.randn(40, 96).bfloat16()
    each_token_alone(native, x, monkeypatch)


@pytest.mark.parametrize("kind", WeightFormat)
@pytest.mark.parametrize(("out", "width"), [(1, 1), (16, 32), (37, 131)])
def test_weights_come_back_as_they_were(kind: WeightFormat, out: int, width: int) -> None:
    blocks = random_blocks(kind, out, width)
    native = layer(blocks, width, torch.float32)
    found = native.blocks()
    weight = blocks.floats(width)
    for part in ("codes", "scales", "minimum", "shared"):
        kept = getattr(found, part)
        given = getattr(blocks, part)
        assert (kept is None and given is None) or torch.equal(kept, given)
    assert torch.equal(native.weight, weight)
    assert torch.equal(native.first(7), weight.flatten()[:7])
    ids = torch.tensor([[0, out - 1], [out // 2, 0]])
    embedding = PackedEmbedding(native)
    assert torch.equal(embedding(ids), weight[ids])
    assert torch.equal(embedding.weight, weight)
    with pytest.raises(IndexError, match=f"ids must be from 0 to {out - 1}"):
        embedding(torch.tensor([out]))


@pytest.mark.parametrize("kind", WeightFormat)
def test_inputs_can_be_left_as_they_are(kind: WeightFormat) -> None:
    native = layer(random_blocks(kind, 40, 70), 70)
    native.as_floats = True
    x = torch.randn(20, 70)
    expected = x.double() @ native.weight.double().T
    torch.testing.assert_close(native(x).double(), expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))


def test_inputs_of_nothing_and_of_very_little_count_as_0() -> None:
    native = layer(random_blocks(WeightFormat.MINIMUM4, 16, 64), 64)
    x = torch.zeros(3, 64)
    x[1, :32] = 2.0**-61
    x[2, 32:] = 2.0**-59
    found = native(x)
    assert not found[:2].any()
    assert found[2].all()


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_stays_none(odd: float) -> None:
    """In whichever place of a block; the other tokens are as they were."""
    native = layer(random_blocks(WeightFormat.SIGNED4, 16, 96), 96)
    x = torch.randn(3, 96)
    expected = native(x)
    for place in (32, 40, 63, 95):
        wrong = x.clone()
        wrong[1, place] = odd
        found = native(wrong)
        assert not found[1].isfinite().any()
        assert torch.equal(found[::2], expected[::2])


@pytest.mark.parametrize("name", GGML)
def test_blocks_of_files_mean_what_gguf_says(name: str) -> None:
    type_ = gguf.GGMLQuantizationType[name]
    values = np.random.default_rng(0).normal(size=(20, 512)).astype(np.float32)
    raw = gguf_models.blocks_of(values, name)
    size = gguf.GGML_QUANT_SIZES[type_][1]
    expected = torch.from_numpy(gguf.dequantize(raw, type_))
    blocks = 512 // GROUP
    for order in (torch.arange(20), torch.randperm(20), torch.tensor([7])):
        addresses = raw.ctypes.data + order * (512 // gguf.GGML_QUANT_SIZES[type_][0] * size)
        panels = panels_of_rows(type_, GGML[name], addresses, blocks)
        assert panels.shape == (-(-len(order) // PANEL), GGML[name].panel_bytes(blocks))
        made = WeightBlocks.of_panels(GGML[name], panels, len(order), 512)
        assert torch.equal(made.floats(512), expected[order])
        assert torch.equal(made.panels(), panels)  # rows beyond the last one are zeros


def test_the_sums_of_this_processor_are_tried(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert sums_codes.__wrapped__()
    monkeypatch.setattr(packed_linears, "product", lambda blocks, x: 1.001 * product(blocks, x))
    assert not sums_codes.__wrapped__()
    assert "sums integer products incorrectly" in caplog.text


def test_eight_bits_are_the_nearest_of_255_steps() -> None:
    torch.manual_seed(0)
    plain = torch.nn.Linear(70, 20).requires_grad_(False)
    plain.weight[3, 32:64] = 0
    native = Int8Linear(plain, False)
    padded = torch.nn.functional.pad(plain.weight, (0, 26)).view(20, 3, GROUP)
    steps = native.blocks().scales.float()
    exact = padded.abs().amax(2) / 127
    assert (steps >= exact).all()
    assert (steps <= exact * (1 + 2**-10) + 2**-24).all()
    errors = (native.weight - plain.weight).abs()
    assert (errors <= steps.repeat_interleave(GROUP, 1)[:, :70] * 0.5001).all()
    x = torch.randn(5, 70)
    torch.testing.assert_close(native(x), x @ native.weight.T + plain.bias, rtol=2e-2, atol=2e-2)


def test_four_bits_have_less_error_than_ggml_s() -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 256) + torch.randn(64, 1)
    blocks = round_to_int4(weight)
    assert blocks.kind == WeightFormat.MINIMUM4
    counts = weight.square() + weight.square().unflatten(1, (-1, GROUP)).mean(2).repeat_interleave(GROUP, 1)
    error = ((blocks.floats(256) - weight).square() * counts).mean()
    for name, most in (("Q4_0", 0.5), ("Q4_1", 0.9)):
        form = gguf.GGMLQuantizationType[name]
        theirs = torch.from_numpy(gguf.dequantize(gguf.quantize(weight.numpy(), form), form))
        assert error < most * ((theirs - weight).square() * counts).mean(), name


def test_four_bits_recover_weights_that_have_four_bits() -> None:
    blocks = random_blocks(WeightFormat.MINIMUM4, 24, 96, seed=3)
    blocks.codes[:, :, :2] = torch.tensor([0, 15], dtype=torch.uint8)  # else fewer steps fit as well
    blocks = replace(blocks, scales=blocks.scales.abs())
    torch.testing.assert_close(round_to_int4(blocks.floats(96)).floats(96), blocks.floats(96), rtol=2e-3, atol=2e-3)
    assert not round_to_int4(torch.zeros(3, 64)).floats(64).any()
    same = torch.full((3, 40), 0.3)
    torch.testing.assert_close(round_to_int4(same).floats(40), same, rtol=1e-3, atol=0)


@pytest.mark.parametrize("kind", WeightFormat)
def test_any_format_can_be_narrowed_with_smaller_errors_than_by_ggml_s_q4_0(kind: WeightFormat) -> None:
    whole = layer(random_blocks(kind, 40, 96), 96)
    narrowed = whole.narrowed()
    assert narrowed.kind == WeightFormat.SIGNED4
    form = gguf.GGMLQuantizationType.Q4_0
    weight = whole.exact()
    theirs = torch.from_numpy(gguf.dequantize(gguf.quantize(weight.numpy(), form), form))

    def missed(by: torch.Tensor) -> torch.Tensor:
        return (by - weight).square().sum()

    ours = missed(narrowed.exact())
    assert ours <= missed(theirs)
    if kind != WeightFormat.SIGNED4:  # which Q4_0 has without any error
        assert ours < 0.95 * missed(theirs)
    assert narrowed._prepacked.shape == (3, WeightFormat.SIGNED4.panel_bytes(3))
    x = torch.randn(2, 96)
    expected = product(narrowed.blocks(), x)
    torch.testing.assert_close(narrowed(x), expected, rtol=0, atol=1e-6 * float(expected.abs().max()))


def test_large_weights_are_laid_out_in_pieces() -> None:
    weight = torch.randn(2 * PIECE + 5, 32)
    native = Int8Linear(as_linear(weight), False)
    assert torch.equal(native.exact(), round_to_int8(weight).floats(32))
    plain = random_blocks(WeightFormat.MINIMUM4, 2 * PIECE + 5, 32)
    pieces = (plain.rows(ids) for ids in torch.arange(2 * PIECE + 5).split(PIECE))
    joint = PackedLinear.of_blocks(pieces, "", torch.float32, (2 * PIECE + 5, 32))
    assert torch.equal(joint._prepacked, plain.panels())
