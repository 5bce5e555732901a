"""Linear layers for any number of tokens, in which a row's bits don't depend on the other rows.

A program computes 64 tokens x some outputs and adds products over the inputs in order. Its tiles depend on the weight
and the dtype only, never on the number of tokens: one token takes a tile whose other rows are empty. So a row's sums
have one order, alone, in a tree and in a prompt. A norm of the inputs, the bias, the activation and the residual are
part of the same launch, and are rounded to the dtype wherever the modules round.

Shapes: T tokens, K inputs, N outputs, G inputs of a group of packed weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from eyas.errors import UnsupportedModelError
from eyas.targets.native.forms import NormForm
from eyas.targets.native.library import Activation
from eyas.targets.native.packed import GROUP, WeightBlocks

ROWS = 64
"""Tokens of a tile. The hardware multiplies this many at once; empty ones cost no memory traffic."""
SAME: dict[str, Any] = {"enable_fp_fusion": False}
"""Options of every launch: a product and a sum are rounded one after the other, as the modules' operations are.

Nor is a kernel compiled again for other numbers of tokens (`do_not_specialize`): other code could sum otherwise.
"""
_CHUNK = 64
"""Inputs of packed 4-bit weights that share 32 bytes: byte j holds the codes of inputs j and j + 32 of the chunk."""
_NARROW_TILE = 32
_WIDE_TILE = 64
"""Outputs of a tile: of a weight with few outputs, which needs enough programs to be read fast, and of others."""
_FEW_OUTPUTS = 8192
"""A weight with at most this many outputs has narrow tiles. Neither this nor the tiles were measured on a GPU yet."""


@triton.jit
def norm_statistics(x, row, present, inputs: tl.constexpr, centered: tl.constexpr, eps, block: tl.constexpr):  # type: ignore[no-untyped-def]
    """The mean (0 for an RMSNorm) and the reciprocal deviation of rows of x, whose offsets are `row` [M]."""
    mean = tl.zeros_like(row).to(tl.float32)
    if centered:
        for first in range(0, inputs, block):
            at = first + tl.arange(0, block)
            values = tl.load(x + row[:, None] + at[None, :], present[:, None] & (at < inputs)[None, :], 0.0)
            mean += tl.sum(values.to(tl.float32), axis=1)
        mean = mean / inputs
    squares = tl.zeros_like(mean)
    for first in range(0, inputs, block):
        at = first + tl.arange(0, block)
        inside = present[:, None] & (at < inputs)[None, :]
        values = tl.load(x + row[:, None] + at[None, :], inside, 0.0).to(tl.float32)
        values = tl.where(inside, values - mean[:, None], 0.0)
        squares += tl.sum(values * values, axis=1)
    return mean, 1.0 / tl.sqrt_rn(squares / inputs + eps)


@triton.jit
def normed(values, mean, deviation, factors, shifts, twice: tl.constexpr, centered: tl.constexpr):  # type: ignore[no-untyped-def]
    """Norm values [M, B], which are rounded before the factors too if the norm rounds `twice`."""
    wide = values.to(tl.float32)
    if centered:
        wide = wide - mean
    wide = wide * deviation
    if twice:
        wide = wide.to(values.dtype).to(tl.float32)
    wide = wide * factors
    if centered:
        wide = wide + shifts
    return wide.to(values.dtype)


@triton.jit
def activated(x, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    """An activation of float32 values, by its number in `Activation`."""
    if kind == 0:
        x = x * (1.0 / (1.0 + tl.exp(-x)))
    elif kind == 1:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x = x / (1.0 + tl.exp(-2.0 * inner))
    elif kind == 3:
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        x = tl.maximum(x, 0.0)
        x = x * x
    return x


@triton.jit
def _codes(weight, scales, offsets, byte, high: tl.constexpr, bits: tl.constexpr, group, inside, dtype):  # type: ignore[no-untyped-def]
    """Weights of packed codes, [B, outputs], rounded to `dtype`."""
    codes = tl.load(weight + byte, inside, 0)
    if bits == 4:
        codes = (codes >> 4) if high else (codes & 15)
    wide = codes.to(tl.float32) * tl.load(scales + group, inside, 0.0).to(tl.float32)
    return (wide + tl.load(offsets + group, inside, 0.0).to(tl.float32)).to(dtype)


@triton.jit
def product(  # type: ignore[no-untyped-def]
    x, row, present, weight, scales, offsets, second, second_scales, second_offsets, out, inside,
    norm, eps, inputs: tl.constexpr, block: tl.constexpr, width: tl.constexpr,
    norms: tl.constexpr, twice: tl.constexpr, centered: tl.constexpr, two: tl.constexpr,
    bits: tl.constexpr, grouped: tl.constexpr,
):  # fmt: skip
    """Products of rows of x with the outputs `out` [N] of a weight, and of a `second` one if there are `two`.

    Packed weights come in chunks, of which 4-bit codes are the halves: each step multiplies one half of a block.
    """
    rows: tl.constexpr = 64
    mean = tl.zeros([rows], tl.float32)
    deviation = mean
    if norms:
        mean, deviation = norm_statistics(x, row, present, inputs, centered, eps, block)
    sums = tl.zeros([rows, width], tl.float32)
    others = tl.zeros([rows, width], tl.float32)
    halves: tl.constexpr = 2 if bits == 4 else 1
    step: tl.constexpr = block // halves
    for first in range(0, inputs, block):
        for half in tl.static_range(halves):
            at = first + half * step + tl.arange(0, step)
            known = at < inputs
            values = tl.load(x + row[:, None] + at[None, :], present[:, None] & known[None, :], 0.0)
            if norms:
                factors = tl.load(norm + at, known, 0.0)
                shifts = factors
                if centered:
                    shifts = tl.load(norm + inputs + at, known, 0.0)
                values = normed(
                    values, mean[:, None], deviation[:, None], factors[None, :], shifts[None, :], twice, centered
                )
            both = known[:, None] & inside[None, :]
            if bits == 0:
                place = out[None, :].to(tl.int64) * inputs + at[:, None]
                sums = tl.dot(values, tl.load(weight + place, both, 0.0).to(values.dtype), sums, input_precision="ieee")
                if two:
                    tile = tl.load(second + place, both, 0.0).to(values.dtype)
                    others = tl.dot(values, tile, others, input_precision="ieee")
            else:
                byte = out[None, :].to(tl.int64) * (inputs // halves) + (first // halves + tl.arange(0, step))[:, None]
                group = out[None, :].to(tl.int64) * (inputs // grouped) + (at // grouped)[:, None]
                tile = _codes(weight, scales, offsets, byte, half, bits, group, both, values.dtype)
                sums = tl.dot(values, tile, sums, input_precision="ieee")
                if two:
                    tile = _codes(second, second_scales, second_offsets, byte, half, bits, group, both, values.dtype)
                    others = tl.dot(values, tile, others, input_precision="ieee")
    return sums, others


@triton.jit(do_not_specialize=["tokens", "eps", "factor"])
def _linear(  # type: ignore[no-untyped-def]
    x, weight, scales, offsets, second, second_scales, second_offsets, bias, second_bias, norm, eps, addend, residual,
    factor, made, tokens, inputs: tl.constexpr, outputs: tl.constexpr, block: tl.constexpr,
    width: tl.constexpr, norms: tl.constexpr, twice: tl.constexpr, centered: tl.constexpr, two: tl.constexpr,
    biased: tl.constexpr, activation: tl.constexpr, adds_beside: tl.constexpr, adds_residual: tl.constexpr,
    scaled: tl.constexpr, bits: tl.constexpr, grouped: tl.constexpr,
):  # fmt: skip
    dtype = made.dtype.element_ty
    token = tl.program_id(1) * 64 + tl.arange(0, 64)
    out = tl.program_id(0) * width + tl.arange(0, width)
    present = token < tokens
    inside = out < outputs
    row = token.to(tl.int64) * inputs
    sums, others = product(
        x, row, present, weight, scales, offsets, second, second_scales, second_offsets, out, inside, norm, eps,
        inputs, block, width, norms, twice, centered, two, bits, grouped,
    )  # fmt: skip
    if biased:
        sums += tl.load(bias + out, inside, 0.0).to(tl.float32)[None, :]
        if two:
            others += tl.load(second_bias + out, inside, 0.0).to(tl.float32)[None, :]
    value = sums.to(dtype).to(tl.float32)
    if activation >= 0:
        value = activated(value, activation).to(dtype).to(tl.float32)
    if two:
        value = (value * others.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    if scaled:
        value = (value * factor).to(dtype).to(tl.float32)
    place = token[:, None].to(tl.int64) * outputs + out[None, :]
    both = present[:, None] & inside[None, :]
    if adds_beside:
        value = (value + tl.load(addend + place, both, 0.0).to(tl.float32)).to(dtype).to(tl.float32)
    if adds_residual:
        value = value + tl.load(residual + place, both, 0.0).to(tl.float32)
    tl.store(made + place, value.to(dtype), both)


@triton.jit(do_not_specialize=["tokens"])
def _by_head(  # type: ignore[no-untyped-def]
    x, weight, made, tokens, heads: tl.constexpr, inputs: tl.constexpr, outputs: tl.constexpr, block: tl.constexpr,
    width: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1) * 64 + tl.arange(0, 64)
    out = tl.program_id(0) * width + tl.arange(0, width)
    head = tl.program_id(2)
    present = token < tokens
    inside = out < outputs
    x += head * inputs
    weight += head * outputs * inputs
    row = token.to(tl.int64) * heads
    sums, _ = product(
        x, row * inputs, present, weight, x, x, weight, x, x, out, inside, x, 0.0, inputs, block, width, False, False,
        False, False, 0, 1,
    )  # fmt: skip
    place = (row * outputs)[:, None] + head * outputs + out[None, :]
    tl.store(made + place, sums.to(made.dtype.element_ty), present[:, None] & inside[None, :])


class Norm(NamedTuple):
    """A norm as the kernels take it."""

    values: Tensor  # [n] float32 factors, or [2 n]: followed by what a LayerNorm adds
    eps: float
    twice: bool
    centered: bool

    @property
    def width(self) -> int:
        """n, the number of features that are normed together."""
        return len(self.values) // (1 + self.centered)

    @classmethod
    def of(cls, form: NormForm, dtype: torch.dtype) -> Norm:
        """A norm of states in `dtype`: one that rounds twice multiplies by rounded factors."""
        factors = form.factors.to(dtype).float() if form.rounds_twice else form.factors
        values = form._replace(factors=factors).values.contiguous()
        return cls(values, form.eps, form.rounds_twice, form.shift is not None)


@dataclass(frozen=True)
class Weight:
    """The weight of a linear layer: floats [N, K], or packed codes with a scale and an offset per group."""

    values: Tensor  # [N, K] floats or 8-bit codes; 4-bit codes [N, K / 2]
    outputs: int
    inputs: int
    scales: Tensor | None = None  # [N, K / G] a weight is its code * scale + offset
    offsets: Tensor | None = None
    bits: int = 0
    group: int = GROUP
    bias: Tensor | None = None  # [N]

    @classmethod
    def of(cls, module: nn.Module) -> Weight:
        """The weight of an unmodified linear, or of one packed for these kernels, not copied.

        Raises UnsupportedModelError for other modules.
        """
        packed = getattr(module, "packed", None)
        if isinstance(packed, Weight):
            return packed
        if type(module) is not nn.Linear or type(module.weight.data) is not Tensor:
            raise UnsupportedModelError(f"{type(module).__name__} isn't a plain linear")
        weight = module.weight.detach()
        if not weight.is_contiguous() or not weight.is_floating_point():
            raise UnsupportedModelError(f"the weight of a linear is {weight.dtype} with strides {weight.stride()}")
        bias = None if module.bias is None else module.bias.detach()
        return cls(weight, weight.shape[0], weight.shape[1], bias=bias)

    @classmethod
    def of_blocks(cls, blocks: WeightBlocks, inputs: int, bias: Tensor | None = None) -> Weight:
        """Packed weights in any of the CPU's formats. Raises UnsupportedModelError unless chunks are whole."""
        if inputs % _CHUNK:
            raise UnsupportedModelError(f"{inputs} inputs of a packed weight aren't a multiple of {_CHUNK}")
        codes, (scales, minimum) = blocks.codes.flatten(1), blocks.factors()
        group = GROUP // scales.shape[2]
        offsets = -blocks.kind.zero * scales if minimum is None else minimum.expand_as(scales)
        factors = [part.flatten(1) for part in (scales, offsets)]
        if all(part.half().float().equal(part) for part in factors):  # as files have them, but for super-blocks
            factors = [part.half() for part in factors]
        scales, offsets = (part.contiguous() for part in factors)
        bits = 4 if blocks.kind.bits == 4 else 8
        if bits == 4:
            low, high = codes.view(len(codes), -1, 2, _CHUNK // 2).unbind(2)
            codes = (low | high << 4).flatten(1)
        return cls(codes.contiguous(), len(codes), inputs, scales, offsets, bits, group, bias)

    @classmethod
    def joined(cls, parts: Sequence[Weight]) -> Weight:
        """The weights of linears of one form with the same inputs, their outputs one after another."""
        first = parts[0]
        rows = [(part.values, part.scales, part.offsets) for part in parts]
        values, scales, offsets = (
            None if column[0] is None else torch.cat(column) for column in zip(*rows, strict=True)
        )
        assert values is not None
        bias = None
        if any(part.bias is not None for part in parts):
            like = next(part.bias for part in parts if part.bias is not None)
            bias = torch.cat([like.new_zeros(part.outputs) if part.bias is None else part.bias for part in parts])
        return replace(first, values=values, outputs=len(values), scales=scales, offsets=offsets, bias=bias)

    def rows(self, first: int, outputs: int) -> Weight:
        """Some of the outputs, not copied."""
        values, scales, offsets, bias = (
            None if part is None else part[first : first + outputs]
            for part in (self.values, self.scales, self.offsets, self.bias)
        )
        assert values is not None
        return replace(self, values=values, outputs=outputs, scales=scales, offsets=offsets, bias=bias)

    def floats(self) -> Tensor:
        """The weights [N, K] by which inputs in float32 are multiplied."""
        if self.scales is None or self.offsets is None:
            return self.values.float()
        codes = self.values
        if self.bits == 4:
            chunks = codes.view(len(codes), -1, _CHUNK // 2)
            codes = torch.cat((chunks & 15, chunks >> 4), dim=2).flatten(1)
        scales, offsets = (part.float().repeat_interleave(self.group, 1) for part in (self.scales, self.offsets))
        return codes.float() * scales + offsets

    def to(self, device: torch.device) -> Weight:
        """The same weight on a device."""
        scales, offsets, bias = (
            None if part is None else part.to(device) for part in (self.scales, self.offsets, self.bias)
        )
        return replace(self, values=self.values.to(device), scales=scales, offsets=offsets, bias=bias)

    def tile(self, dtype: torch.dtype, two: bool = False) -> tuple[int, int]:
        """Inputs and outputs of a tile, for states in `dtype`, whatever the number of tokens.

        Those of `two` weights that are multiplied together are in shared memory at the same time.
        """
        block = _CHUNK if self.bits or dtype == torch.float32 else 2 * _CHUNK
        return block, _NARROW_TILE if two or self.outputs <= _FEW_OUTPUTS else _WIDE_TILE


def linear(
    x: Tensor, weight: Weight, norm: Norm | None = None, second: Weight | None = None,
    activation: Activation | None = None, addend: Tensor | None = None, residual: Tensor | None = None,
    factor: float = 1.0,
) -> Tensor:  # fmt: skip
    """Multiply contiguous x [T, K], normed first if there is a `norm`, by a weight -> [T, N] in x's dtype.

    The product goes through the `activation`, is multiplied by that with a `second` weight of the same form, and by
    `factor`; `addend` and `residual` [T, N] are added.
    """
    tokens = len(x)
    made = torch.empty(tokens, weight.outputs, dtype=x.dtype, device=x.device)
    block, width = weight.tile(x.dtype, second is not None)
    other = weight if second is None else second
    grid = (triton.cdiv(weight.outputs, width), triton.cdiv(tokens, ROWS))
    _linear[grid](
        x, weight.values, given(weight.scales, x), given(weight.offsets, x), other.values, given(other.scales, x),
        given(other.offsets, x), given(weight.bias, x), given(other.bias, x), given(norm and norm.values, x),
        0.0 if norm is None else norm.eps, given(addend, x), given(residual, x), factor, made, tokens,
        weight.inputs, weight.outputs, block, width, norm is not None, norm is not None and norm.twice,
        norm is not None and norm.centered, second is not None, weight.bias is not None,
        -1 if activation is None else int(activation), addend is not None, residual is not None, factor != 1.0,
        weight.bits, weight.group, num_stages=4 if second is None else 3, **SAME,
    )  # fmt: skip
    return made


def linear_by_head(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply each head's x [T, heads, K], contiguous, by its own weight [heads, N, K] -> [T, heads, N]."""
    tokens, heads, inputs = x.shape
    outputs = weight.shape[1]
    made = torch.empty(tokens, heads, outputs, dtype=x.dtype, device=x.device)
    block, width = Weight(weight, outputs, inputs).tile(x.dtype)
    grid = (triton.cdiv(outputs, width), triton.cdiv(tokens, ROWS), heads)
    _by_head[grid](x, weight, made, tokens, heads, inputs, outputs, block, width, **SAME)
    return made


def on_device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Launch kernels on a tensor's GPU in this context: triton launches them on the current one."""
    made: AbstractContextManager[Any] = torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]
    return made


def given(tensor: Tensor | None, instead: Tensor) -> Tensor:
    """A tensor, or another that the kernel won't read."""
    return instead if tensor is None else tensor
