"""Weights in 4 or 8 bits: the blocks of GGUF files, and those that `--quantize` makes, as the kernels multiply them.

32 inputs of an output are a block: codes with a scale, and with a least weight or a zero in the middle of the codes.
What a file holds is never rounded again: `Q5_0`, for instance, lies in bytes, and means the same numbers. Inputs become
codes of 8 bits, block by block, so products are sums of integers (`kernels/integer.h`); `product` is the same
arithmetic in PyTorch.

Shapes: T tokens, B blocks of a row, P panels of 16 outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.runtime import mapped_zeros
from eyas.targets.native.library import PANEL

GROUP = 32
"""Inputs of a block."""
LEAST_INPUT = 2.0**-60
"""Blocks of inputs that are all smaller count as 0."""


class Kind(IntEnum):
    """How a packed weight lies in panels, by its number in the kernels."""

    SIGNED8 = 2
    LEAST8 = 3
    SIGNED4 = 4
    LEAST4 = 5

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 8 if self in (Kind.SIGNED8, Kind.LEAST8) else 4

    @property
    def zero(self) -> int:
        """The code that stands for 0, where there is no least weight."""
        return 0 if self in (Kind.LEAST8, Kind.LEAST4) else 1 << (self.bits - 1)


@dataclass(frozen=True)
class Blocks:
    """A weight [out, in] in blocks; inputs that the last one has too many have the weight 0."""

    kind: Kind
    codes: Tensor  # [out, B, 32] uint8
    scales: Tensor  # [out, B] float16
    least: Tensor | None = None  # [out, B] float16

    def rows(self, ids: Tensor) -> Blocks:
        """The outputs `ids` alone, in their order."""
        least = None if self.least is None else self.least[ids]
        return replace(self, codes=self.codes[ids], scales=self.scales[ids], least=least)

    def floats(self, inputs: int) -> Tensor:
        """[out, in] the weights in float32, rounded once at most."""
        values = (self.codes.float() - self.kind.zero) * self.scales.float().unsqueeze(2)
        if self.least is not None:
            values += self.least.float().unsqueeze(2)
        return values.flatten(1)[:, :inputs].contiguous()

    def panels(self) -> Tensor:
        """[P, B, bytes of 16 x 32 weights] uint8, as the kernels read them."""
        out, blocks, _ = self.codes.shape
        more = -out % PANEL
        fours = F.pad(self.codes, (0, 0, 0, 0, 0, more)).contiguous().view(torch.int32)  # [out, B, 8], four inputs each
        fours = fours.view(-1, PANEL, blocks, 8).permute(0, 2, 3, 1).contiguous()  # [P, B, 8, 16]
        codes = fours.view(torch.uint8)
        if self.kind.bits == 4:
            low, high = codes.tensor_split(2, dim=2)
            codes = low | high << 4
        parts = [self.scales] if self.least is None else [self.scales, self.least]
        heads = [F.pad(part, (0, 0, 0, more)).view(-1, PANEL, blocks).transpose(1, 2) for part in parts]  # [P, B, 16]
        header = torch.cat(heads, dim=2).contiguous().view(torch.uint8)
        codes = codes.flatten(2)
        made = mapped_zeros((*header.shape[:2], header.shape[2] + codes.shape[2]), torch.uint8, codes.device)
        made[..., : header.shape[2]], made[..., header.shape[2] :] = header, codes
        return made

    @classmethod
    def of_panels(cls, kind: Kind, panels: Tensor, out: int) -> Blocks:
        """The blocks of a weight with `out` outputs that `panels` were made of."""
        count, blocks, _ = panels.shape
        halves = [2 * PANEL] * (1 if kind.zero else 2)
        *heads, codes = panels.split([*halves, panels.shape[2] - sum(halves)], dim=2)
        if kind.bits == 4:
            codes = torch.cat((codes & 15, codes >> 4), dim=2)
        fours = codes.contiguous().view(torch.int32).view(count, blocks, 8, PANEL).permute(0, 3, 1, 2).contiguous()
        parts = [head.contiguous().view(torch.float16).transpose(1, 2).reshape(-1, blocks)[:out] for head in heads]
        return cls(kind, fours.view(torch.uint8).view(-1, blocks, GROUP)[:out], *parts)


def product(blocks: Blocks, x: Tensor) -> Tensor:
    """The product [T, out] of inputs x [T, in] in float32 and packed weights, by the arithmetic of the kernels.

    Sums of codes are exact. Sums of blocks are rounded to float32 as they are there, but for one in millions that is
    rounded twice.
    """
    count = blocks.codes.shape[1]
    x = F.pad(x, (0, count * GROUP - x.shape[1])).view(len(x), count, GROUP)
    most = x.abs().amax(2)
    most = torch.where(most >= LEAST_INPUT, most, torch.zeros_like(most))
    factors = torch.where(most > 0, 127.0 / most, most)
    codes = (x * factors.unsqueeze(2)).round()  # [T, B, 32], ties to even
    scales = most * torch.tensor(1 / 127, dtype=torch.float32)  # [T, B]
    totals = codes.sum(2)
    sums = torch.einsum("tbi,obi->bto", codes.double(), blocks.codes.double() - blocks.kind.zero)  # exact
    out = torch.zeros(len(x), len(blocks.codes), dtype=torch.float64)
    for block in range(count):
        scaled = (sums[block].float() * scales[:, block : block + 1]).double()
        out = (out + scaled * blocks.scales[:, block].double()).float().double()
        if blocks.least is not None:
            offset = (scales[:, block] * totals[:, block]).unsqueeze(1).double()
            out = (out + offset * blocks.least[:, block].double()).float().double()
    return out.float()


def _halves(raw: Tensor, at: int) -> Tensor:
    """The float16 numbers [out, B] at a byte of blocks [out, B, bytes]."""
    return raw[..., at : at + 2].contiguous().view(torch.float16).squeeze(2)


def _nibbles(raw: Tensor) -> Tensor:
    """[out, B, 32] of 16 bytes each: the lower halves are those of the first 16 inputs."""
    return torch.cat((raw & 15, raw >> 4), dim=2)


def _fifth_bits(raw: Tensor) -> Tensor:
    """[out, B, 32] the bits of four bytes each, as codes of 0 or 16."""
    return (raw.unsqueeze(3) >> torch.arange(8, dtype=torch.uint8) & 1).flatten(2) << 4


def _q8_0(raw: Tensor) -> Blocks:
    return Blocks(Kind.SIGNED8, raw[..., 2:] ^ 128, _halves(raw, 0))


def _q4_0(raw: Tensor) -> Blocks:
    return Blocks(Kind.SIGNED4, _nibbles(raw[..., 2:]), _halves(raw, 0))


def _q4_1(raw: Tensor) -> Blocks:
    return Blocks(Kind.LEAST4, _nibbles(raw[..., 4:]), _halves(raw, 0), _halves(raw, 2))


def _q5_0(raw: Tensor) -> Blocks:
    codes = _nibbles(raw[..., 6:]) | _fifth_bits(raw[..., 2:6])
    return Blocks(Kind.SIGNED8, codes + (Kind.SIGNED8.zero - 16), _halves(raw, 0))


def _q5_1(raw: Tensor) -> Blocks:
    codes = _nibbles(raw[..., 8:]) | _fifth_bits(raw[..., 4:8])
    return Blocks(Kind.LEAST8, codes, _halves(raw, 0), _halves(raw, 2))


GGML: dict[str, Callable[[Tensor], Blocks]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0,
}  # fmt: skip
"""GGML's types that stay packed, and what their blocks [out, B, bytes] hold."""


def nearest8(weight: Tensor) -> Blocks:
    """The nearest weights in 8 bits: codes from -127 to 127, a scale for each block of a weight [out, in]."""
    wide = _padded(weight)
    scales = _above(wide.abs().amax(2) / 127)
    steps = scales.float().clamp(min=torch.finfo(torch.float16).tiny).unsqueeze(2)
    codes = (wide / steps).round().clamp(-127, 127) + Kind.SIGNED8.zero
    return Blocks(Kind.SIGNED8, codes.to(torch.uint8), scales)


def nearest4(weight: Tensor) -> Blocks:
    """Weights [out, in] in 4 bits: codes from -8 to 7, and of many scales the one with the least squared error.

    The value farthest from 0 becomes -8, or nearly so: among scales up to a fifth smaller or larger, of either sign.
    Each is then the best one for its codes (least squares), if that is better.
    """
    wide = _padded(weight)
    farthest = wide.gather(2, wide.abs().argmax(2, keepdim=True)).squeeze(2)  # [out, B]
    best = torch.full_like(farthest, float("inf"))
    scales, codes = farthest.half(), torch.zeros_like(wide, dtype=torch.uint8)
    for steps in _TRIED:
        tried = (farthest / steps).half()
        for _ in range(2):
            divisors = torch.where(tried == 0, torch.ones_like(tried), tried).float().unsqueeze(2)
            found = (wide / divisors).round().clamp(-8, 7)
            errors = (found * tried.float().unsqueeze(2) - wide).square().sum(2)
            better = errors < best
            best = torch.where(better, errors, best)
            scales = torch.where(better, tried, scales)
            codes = torch.where(better.unsqueeze(2), (found + Kind.SIGNED4.zero).to(torch.uint8), codes)
            tried = ((found * wide).sum(2) / found.square().sum(2).clamp(min=1)).half()
    return Blocks(Kind.SIGNED4, codes, scales)


_TRIED = (-9.6, -8.8, -8.4, -8.0, -7.6, -7.2, -6.6, 6.6, 7.0, 7.4, 7.8)
"""Which code a block's farthest value is given, before it is rounded."""


def _padded(weight: Tensor) -> Tensor:
    """A weight [out, in] as blocks [out, B, 32] in float32, with zeros at the end."""
    return F.pad(weight.float(), (0, -weight.shape[1] % GROUP)).view(len(weight), -1, GROUP)


def _above(values: Tensor) -> Tensor:
    """The least float16 numbers that aren't below positive values."""
    near = values.half()
    return torch.where(near.float() < values, (near.view(torch.int16) + 1).view(torch.float16), near)
