"""Packed weights in 4 or 8 bits, from GGUF, AWQ and other files or made by `--quantize`, as the kernels multiply them.

32 inputs of an output are a block: codes with a scale, and with a minimum or the code that stands for 0.
Weights of a file are never rounded again: `Q5_0`, for instance, is stored in bytes and gives the same numbers. Inputs
are quantized to 8 bits, block by block, so products are sums of integers (`kernels/integer.h`); `product` is the same
arithmetic in PyTorch.

Shapes: T tokens, B blocks of a row, P panels of 16 outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.runtime import WEIGHTS
from eyas.targets.native.abi import constant
from eyas.targets.native.library import PANEL, kernels

GROUP = constant("GROUP")
SUPER = constant("SUPER")
"""Inputs of a block, and blocks of a super-block."""
MIN_INPUT = 2.0**-60
"""Blocks of inputs that are all smaller than this count as 0."""


class WeightFormat(IntEnum):
    """Layout of a packed weight in panels, by its number in the kernels."""

    SIGNED8 = 2
    SIGNED4 = 3
    MINIMUM4 = 4
    ZERO4 = 5
    SIGNED5 = 6
    MINIMUM5 = 7
    SUPER5 = 8
    SUPER4 = 9
    HALVES8 = 10
    HALVES6 = 11

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return int(self.name[-1])

    @property
    def upper(self) -> tuple[tuple[int, int], ...]:
        """Where the bits above the lowest four are, for each four of a block's inputs: in which vector, from which bit.

        Empty for codes of 4 and 8 bits (`kernels/weight.h`).
        """
        if self.bits == 5:
            return tuple((0, (four + 4) % 8) for four in range(GROUP // 4))
        if self.bits == 6:
            return tuple((four // 4, (four % 4 * 2 + 4) % 8) for four in range(GROUP // 4))
        return ()

    @property
    def has_halves(self) -> bool:
        """Whether a block has two scales, each for 16 inputs."""
        return self in (WeightFormat.HALVES8, WeightFormat.HALVES6)

    @property
    def has_minimum(self) -> bool:
        """Whether code 0 stands for a minimum."""
        return not self.has_halves and not self.name.startswith("SIGNED")

    @property
    def zero(self) -> int:
        """The code that stands for 0 if there is no minimum."""
        return 0 if self.has_minimum else 1 << (self.bits - 1)

    @property
    def numbers(self) -> tuple[torch.dtype, ...]:
        """Dtypes of a block's numbers: its one or two scales, and its minimum or the code of 0."""
        if self is WeightFormat.ZERO4:
            return (torch.float16, torch.uint8)
        own = torch.int8 if self.has_halves else torch.uint8
        return (own, own) if self >= WeightFormat.SUPER5 else (torch.float16,) * (1 + self.has_minimum)

    @property
    def factors(self) -> int:
        """The number of float16 factors that the blocks of a super-block share; 0 = there are no super-blocks."""
        return 0 if self < WeightFormat.SUPER5 else 1 + self.has_minimum

    def panel_bytes(self, blocks: int) -> int:
        """Bytes of a panel whose rows have `blocks` blocks."""
        block = PANEL * sum(dtype.itemsize for dtype in self.numbers) + GROUP * PANEL * self.bits // 8
        return -(-blocks // SUPER) * 2 * PANEL * self.factors + blocks * block


@dataclass(frozen=True)
class WeightBlocks:
    """A weight [out, in] in blocks; excess inputs of the last block have the weight 0."""

    kind: WeightFormat
    codes: Tensor  # [out, B, 32] uint8
    scales: Tensor  # [out, B] float16; in super-blocks uint8, or [out, B, 2] int8
    minimum: Tensor | None = None  # [out, B] in the scales' dtype; in ZERO4 the codes that stand for 0, uint8
    shared: Tensor | None = None  # [out, S, 1 or 2] float16: factors of scales and of minimums, per 8 blocks

    def rows(self, ids: Tensor) -> WeightBlocks:
        """Only the outputs `ids`, in their order."""
        minimum, shared = (None if part is None else part[ids] for part in (self.minimum, self.shared))
        return WeightBlocks(self.kind, self.codes[ids], self.scales[ids], minimum, shared)

    def factors(self) -> tuple[Tensor, Tensor | None]:
        """Factors of codes [out, B, 1 or 2] and minimums [out, B, 1], both exact in float32."""
        scales = self.scales.float().view(*self.codes.shape[:2], -1)
        minimum = self.minimum
        wide = None if minimum is None else minimum.float().unsqueeze(2)
        if self.kind is WeightFormat.ZERO4 and wide is not None:
            wide = -wide * scales
        if self.shared is not None:
            parts = (
                self.shared.float()
                .repeat_interleave(SUPER, 1)[:, : scales.shape[1]]
                .tensor_split(self.shared.shape[2], 2)
            )
            scales = scales * parts[0]
            wide = None if wide is None else wide * parts[1]
        return scales, wide

    def floats(self, inputs: int) -> Tensor:
        """Dequantize to [out, in] in float32, rounded at most once."""
        scales, minimum = self.factors()
        wide = _parted(self.codes.float() - self.kind.zero, 2, scales.shape[2], -1)
        values = (wide * scales.unsqueeze(3)).flatten(2)
        if minimum is not None:
            values += minimum
        return values.flatten(1)[:, :inputs].contiguous()

    def panels(self) -> Tensor:
        """[P, bytes of 16 outputs] uint8, as the kernels read them (`kernels/weight.h`)."""
        out, blocks, _ = self.codes.shape
        more = -out % PANEL
        fours = F.pad(self.codes, (0, 0, 0, 0, 0, more)).contiguous().view(torch.int32)  # [out, B, 8], of four inputs
        fours = fours.view(-1, PANEL, blocks, 8).permute(0, 2, 3, 1).contiguous()  # [P, B, 8, 16]
        codes = fours.view(torch.uint8)
        if self.kind.bits < 8:
            low, high = (codes & 15).tensor_split(2, dim=2)
            upper = torch.zeros_like(codes[:, :, : self.kind.bits - 4])
            for four, (vector, shift) in enumerate(self.kind.upper):
                upper[:, :, vector] |= codes[:, :, four] >> 4 << shift
            codes = torch.cat((low | high << 4, upper), dim=2)

        def header(part: Tensor) -> Tensor:  # [out, B or S, n] -> [P, B or S, bytes], 16 outputs side by side
            filled = F.pad(part, (0, 0, 0, 0, 0, more)).view(-1, PANEL, *part.shape[1:])
            return filled.permute(0, 2, 3, 1).contiguous().view(torch.uint8).flatten(2)

        parts = [self.scales.view(out, blocks, -1), *(() if self.minimum is None else (self.minimum.unsqueeze(2),))]
        block = torch.cat([*map(header, parts), codes.flatten(2)], dim=2).flatten(1)
        return block if self.shared is None else torch.cat((header(self.shared).flatten(1), block), dim=1)

    @classmethod
    def of_panels(cls, kind: WeightFormat, panels: Tensor, out: int, inputs: int) -> WeightBlocks:
        """The blocks from which `panels` of a weight with `out` outputs and `inputs` inputs were made."""
        blocks = -(-inputs // GROUP)

        def numbers(raw: Tensor, dtype: torch.dtype) -> Tensor:  # [P, n, bytes] -> [out, n, parts]
            wide = _parted(raw.contiguous().view(dtype), 2, -1, PANEL)
            return wide.permute(0, 3, 1, 2).flatten(0, 1)[:out].contiguous()

        shared = None
        if kind.factors:
            size = 2 * PANEL * kind.factors
            supers = -(-blocks // SUPER)
            shared = numbers(_parted(panels[:, : supers * size], 1, supers, size), torch.float16)
            panels = panels[:, supers * size :]
        sizes = [PANEL * dtype.itemsize for dtype in kind.numbers]
        whole = _parted(panels, 1, blocks, -1)
        *headers, codes = torch.split(whole, [*sizes, GROUP * PANEL * kind.bits // 8], dim=2)
        if kind.bits < 8:
            lower, upper = torch.split(codes, [GROUP * PANEL // 2, GROUP * PANEL * (kind.bits - 4) // 8], dim=2)
            codes = torch.cat((lower & 15, lower >> 4), dim=2)
            vectors, fours = _parted(upper, 2, -1, 4 * PANEL), _parted(codes, 2, -1, 4 * PANEL)
            for four, (vector, shift) in enumerate(kind.upper):
                fours[:, :, four] |= (vectors[:, :, vector] >> shift & (1 << kind.bits - 4) - 1) << 4
        fours = _parted(codes.contiguous().view(torch.int32), 2, 8, PANEL).permute(0, 3, 1, 2).contiguous()
        scales, *others = (numbers(raw, dtype) for raw, dtype in zip(headers, kind.numbers, strict=True))
        minimum = others[0][..., 0] if kind.has_minimum else None
        scales = torch.cat((scales, *others), dim=2) if kind.has_halves else scales[..., 0]
        return cls(kind, fours.view(torch.uint8).view(-1, blocks, GROUP)[:out], scales, minimum, shared)


class PackedWeight(NamedTuple):
    """A weight that stays in the blocks of its file."""

    format: str
    """Name of the format, such as `Q4_1` or `awq int4`."""
    panels: Callable[[], tuple[WeightFormat, Tensor]]
    """Reads it into panels [P, bytes of 16 outputs]."""


class Weights(NamedTuple):
    """The weights of a model: its state dict, and those that stay packed, with placeholders there without memory."""

    state: dict[str, Tensor]
    packed: dict[str, PackedWeight]


PIECE = 2048
"""Outputs, in whole panels, that are packed or compared at a time, so that intermediate tensors take little memory."""


def joint_panels(pieces: Iterable[WeightBlocks], out: int) -> tuple[WeightFormat, Tensor]:
    """The kind and panels of a weight with `out` outputs that comes in `pieces` of `PIECE` outputs."""
    made = torch.empty(0)
    first = 0
    for piece in pieces:
        panels = piece.panels()
        kind = piece.kind
        if not first:
            made = WEIGHTS.zeros((-(-out // PANEL), panels.shape[1]), torch.uint8, panels.device)
        made[first : first + len(panels)] = panels
        first += len(panels)
    return kind, made


def panels_of_rows(ggml_type: int, kind: WeightFormat, addresses: Tensor, blocks: int) -> Tensor:
    """The panels of a weight of the `kind` that holds a GGML type, read from where its rows lie in memory.

    `addresses` [out] int64: where each output's row of `blocks` blocks of 32 inputs begins.
    """
    library = kernels()
    assert library is not None  # without kernels nothing stays packed
    made = WEIGHTS.zeros((-(-len(addresses) // PANEL), kind.panel_bytes(blocks)), torch.uint8, addresses.device)
    library.pack_blocks(ggml_type, addresses, blocks, made)
    return made


def random_blocks(kind: WeightFormat, out: int, inputs: int, seed: int = 0) -> WeightBlocks:
    """Random blocks with all possible codes, for trials of products."""
    draw = torch.Generator().manual_seed(seed)
    count = -(-inputs // GROUP)
    codes = torch.randint(1 << kind.bits, (out, count, GROUP), dtype=torch.uint8, generator=draw)
    if kind >= WeightFormat.SUPER5:
        shared = torch.randn(out, -(-count // SUPER), 1 + kind.has_minimum, generator=draw).half() / 32
        if kind.has_halves:
            scales = torch.randint(-128, 128, (out, count, 2), dtype=torch.int8, generator=draw)
            return WeightBlocks(kind, codes, scales, None, shared)
        scales, minimum = (torch.randint(64, (out, count), dtype=torch.uint8, generator=draw) for _ in range(2))
        return WeightBlocks(kind, codes, scales, minimum, shared)
    scales, minimum = (torch.randn(out, count, generator=draw).half() for _ in range(2))
    if kind is WeightFormat.ZERO4:
        minimum = torch.randint(17, (out, count), dtype=torch.uint8, generator=draw)
    return WeightBlocks(kind, codes, scales, minimum if kind.has_minimum else None)


def product(blocks: WeightBlocks, x: Tensor) -> Tensor:
    """The product [T, out] of float32 inputs x [T, in] and packed weights, in the arithmetic of the kernels.

    Sums of codes are exact. Sums of blocks are rounded to float32 as in the kernels, except for one in millions that is
    rounded twice.
    """
    count = blocks.codes.shape[1]
    x = F.pad(x, (0, count * GROUP - x.shape[1])).view(len(x), count, GROUP)
    most = x.abs().amax(2)
    most = torch.where(most >= MIN_INPUT, most, torch.zeros_like(most))
    factors = torch.where(most > 0, 127.0 / most, most)
    codes = (x * factors.unsqueeze(2)).round()  # [T, B, 32], ties to even
    scales = most * torch.tensor(1 / 127, dtype=torch.float32)  # [T, B]
    totals = codes.sum(2)
    weights, (factors, minimum) = blocks.codes.double() - blocks.kind.zero, blocks.factors()
    if blocks.kind.has_halves:
        weights = weights * blocks.scales.repeat_interleave(GROUP // 2, 2)
        assert blocks.shared is not None
        factors = blocks.shared.float().repeat_interleave(SUPER, 1)[:, :count]
    sums = torch.einsum("tbi,obi->bto", codes.double(), weights)  # exact
    out = torch.zeros(len(x), len(blocks.codes), dtype=torch.float64)
    for block in range(count):
        scaled = (sums[block].float() * scales[:, block : block + 1]).double()
        out = (out + scaled * factors[:, block, 0].double()).float().double()
        if minimum is not None:
            offset = (scales[:, block] * totals[:, block]).unsqueeze(1).double()
            out = (out + offset * minimum[:, block, 0].double()).float().double()
    return out.float()


def _parted(x: Tensor, dimension: int, *sizes: int) -> Tensor:
    """Split one dimension of a tensor into several of these sizes."""
    return x.reshape(*x.shape[:dimension], *sizes, *x.shape[dimension + 1 :])


GGML: dict[str, WeightFormat] = {
    "Q4_0": WeightFormat.SIGNED4, "Q4_1": WeightFormat.MINIMUM4, "Q5_0": WeightFormat.SIGNED5,
    "Q5_1": WeightFormat.MINIMUM5, "Q8_0": WeightFormat.SIGNED8, "Q3_K": WeightFormat.HALVES6,
    "Q4_K": WeightFormat.SUPER4, "Q5_K": WeightFormat.SUPER5, "Q6_K": WeightFormat.HALVES6,
    "IQ4_NL": WeightFormat.SIGNED8, "IQ4_XS": WeightFormat.HALVES8, "MXFP4": WeightFormat.SIGNED8,
}  # fmt: skip
"""GGML type that stays packed -> the format that holds its numbers; `kernels/blocks.h` reads its blocks."""


def fit_float16(ggml_type: str, blocks: npt.NDArray[np.uint8]) -> bool:
    """Whether float16, in which scales are packed, has those of all `blocks` [n, bytes] of a type in `GGML`.

    MXFP4's are powers of two over a wider range; a block of zeros may have any.
    """
    if ggml_type != "MXFP4":
        return True
    beyond = (blocks[:, 0] < 128 - 24) | (blocks[:, 0] > 128 + 15)
    return not (blocks[beyond, 1:] & 0x77).any()


def round_to_int8(weight: Tensor) -> WeightBlocks:
    """Quantize a weight [out, in] to the nearest 8-bit codes, from -127 to 127, with a scale per block."""
    wide = _padded(weight)
    scales = _above(wide.abs().amax(2) / 127)
    steps = scales.float().clamp(min=torch.finfo(torch.float16).tiny).unsqueeze(2)
    codes = (wide / steps).round().clamp(-127, 127) + WeightFormat.SIGNED8.zero
    return WeightBlocks(WeightFormat.SIGNED8, codes.to(torch.uint8), scales)


def round_to_int4(weight: Tensor) -> WeightBlocks:
    """Quantize a weight [out, in] to 4-bit codes, with a scale and a minimum per block of small error.

    A block's range is divided into 15 steps. For the resulting codes, the best scale and minimum follow by least
    squares, for these the nearest codes, and so on. Errors of large weights count more, as in llama.cpp's `make_qkx2`:
    with the same squared error, rounding them costs more quality.
    """
    wide = _padded(weight)
    # [out, B]
    lowest = wide.amin(2)
    highest = wide.amax(2)
    counts = wide.square() + wide.square().mean(2, keepdim=True)  # [out, B, 32]
    scales = torch.zeros_like(lowest).half()
    minimum = lowest.half()
    codes = torch.zeros_like(wide)
    errors = torch.full_like(lowest, float("inf"))
    tried = (highest - lowest) / 15, lowest
    for _ in range(_FITS):
        scale, low = (part.half() for part in tried)
        step = scale.float().unsqueeze(2)
        above = low.float().unsqueeze(2)
        found = ((wide - above) / torch.where(step == 0, 1, step)).round_().clamp_(0, 15)
        missed = ((found * step + above - wide).square_() * counts).sum(2)
        better = missed < errors
        errors = torch.where(better, missed, errors)
        scales = torch.where(better, scale, scales)
        minimum = torch.where(better, low, minimum)
        codes = torch.where(better.unsqueeze(2), found, codes)
        tried = _least_squares(found, wide, counts)
    return WeightBlocks(WeightFormat.MINIMUM4, codes.to(torch.uint8), scales, minimum)


_FITS = 4
"""How many scales and minimums are tried."""


def _least_squares(codes: Tensor, wide: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and the minimum [out, B] with which `codes` are nearest to the weights `wide`, both [out, B, 32].

    `counts` [out, B, 32]: by how much each squared error counts.
    """
    total = counts.sum(2).clamp(min=torch.finfo(torch.float32).tiny)
    middle = (codes * counts).sum(2) / total
    mean = (wide * counts).sum(2) / total
    codes = codes - middle.unsqueeze(2)
    scale = (codes * wide * counts).sum(2) / (codes.square() * counts).sum(2).clamp(min=torch.finfo(torch.float32).tiny)
    return scale, mean - scale * middle


def _padded(weight: Tensor) -> Tensor:
    """A weight [out, in] as blocks [out, B, 32] in float32, with zeros at the end."""
    return F.pad(weight.float(), (0, -weight.shape[1] % GROUP)).view(len(weight), -1, GROUP)


def _above(values: Tensor) -> Tensor:
    """Round positive values up to float16."""
    near = values.half()
    return torch.where(near.float() < values, (near.view(torch.int16) + 1).view(torch.float16), near)
