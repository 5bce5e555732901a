"""Linear layers and embeddings with packed weights of 4 and 8 bits."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from eyas.runtime import WEIGHTS
from eyas.targets.linears import SAMPLED
from eyas.targets.native.library import PANEL, Microkernel, loaded_kernels
from eyas.targets.native.linears import NativeLinear
from eyas.targets.native.packed import (
    GROUP,
    PIECE,
    WeightBlocks,
    WeightFormat,
    joint_panels,
    product,
    random_blocks,
    round_to_int4,
    round_to_int8,
)
from eyas.targets.native.panel_files import cached_layout
from eyas.targets.threads import threads_for

_LOG = logging.getLogger("eyas")


class PackedLinear(NativeLinear):
    """A `NativeLinear` with 4-bit or 8-bit weights; it quantizes its inputs to 8 bits and multiplies in integers."""

    name: str
    """Name of the format of the weights, as users know it."""
    _kind: WeightFormat
    _tied = False
    as_floats = False
    """Whether inputs aren't quantized. Trials need that, because codes that rounding changes would hide other
    errors."""

    @classmethod
    def of_blocks(
        cls,
        pieces: Iterable[WeightBlocks],
        name: str,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        bias: Tensor | None = None,
    ) -> PackedLinear:
        """As `of_panels`, of a weight that comes in `pieces` (`joint_panels`)."""
        return cls.of_panels(*joint_panels(pieces, prod(shape[:-1])), name, dtype, shape, bias)

    @classmethod
    def of_panels(
        cls,
        kind: WeightFormat,
        panels: Tensor,
        name: str,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        bias: Tensor | None = None,
        tied: bool = False,
    ) -> PackedLinear:
        """Make a layer in `dtype` of a weight in panels [P, bytes of 16 outputs], in the format called `name`.

        Its `shape` is [out, in], or [E, out, in] for a stack of weights.
        """
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.stacked = shape if len(shape) == 3 else None
        made._shared = None
        made.transposed = False
        made.out_features = prod(shape[:-1])
        made.in_features = shape[-1]
        made._dtype = dtype
        made.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)
        made._widen_bias()
        made.name = name
        made._tied = tied
        made._kind = kind
        made._prepacked = panels
        first = made.blocks(-(-SAMPLED // made.in_features)).floats(made.in_features)
        made._first = first.to(dtype).flatten()[:SAMPLED]
        return made

    @property
    def kind(self) -> int:
        return self._kind

    @property
    def shape(self) -> torch.Size:
        """Shape of the weight, [out, in]."""
        return torch.Size((self.out_features, self.in_features))

    @property
    def tied(self) -> bool:
        return self._tied or super().tied

    def untie(self) -> None:
        """Drop the embedding's own weight: from now on, the embedding looks up this one."""
        self._shared = None
        self._tied = True

    def _microkernels_for(self, inputs: torch.dtype) -> int:  # noqa: ARG002  # any dtype is quantized
        return Microkernel.AS_FLOATS if self.as_floats else 0

    def blocks(self, outputs: int | None = None) -> WeightBlocks:
        """The weight in its original blocks, or only its first `outputs`."""
        count = self.out_features if outputs is None else min(outputs, self.out_features)
        return WeightBlocks.of_panels(self._kind, self._prepacked[: -(-count // PANEL)], count, self.in_features)

    def exact(self) -> Tensor:
        return self.blocks().floats(self.in_features)

    def chosen(self, ids: Tensor) -> PackedLinear:
        """A layer with only the outputs `ids`."""
        bias = None if self.bias is None else self.bias[ids]
        rows = self.blocks().rows(ids)
        shape = (len(ids), self.in_features)
        return self.of_blocks([rows], self.name, self._dtype, shape, bias)

    def narrowed(self) -> PackedLinear:
        """A layer with this weight in 4-bit codes, a scale per block: made faster than `int4`, with larger errors."""
        kind = WeightFormat.SIGNED4
        shape = (len(self._prepacked), kind.panel_bytes(-(-self.in_features // GROUP)))
        panels = WEIGHTS.zeros(shape, torch.uint8, self._prepacked.device)
        loaded_kernels().narrow(self.struct(0, self.out_features, 0), panels)
        return self.of_panels(kind, panels, "Q4_0", self._dtype, self.stacked or self.shape, self.bias)

    def lookup(self, ids: Tensor) -> Tensor:
        """The weight's rows `ids` [...] -> [..., in], in this layer's dtype."""
        flat = ids.reshape(-1).contiguous()
        if flat.numel() and not 0 <= int(flat.min()) <= int(flat.max()) < self.out_features:
            raise IndexError(f"a token has no embedding: ids must be from 0 to {self.out_features - 1}")
        out = torch.empty(len(flat), self.in_features)
        loaded_kernels().rows(
            self._prepacked.data_ptr(),
            self.kind,
            self.in_features,
            flat.data_ptr(),
            len(flat),
            out.data_ptr(),
            threads_for(out.numel()),
        )
        return out.to(self._dtype).view(*ids.shape, self.in_features)


class Int8Linear(PackedLinear):
    """A `PackedLinear` that quantizes its weight to 8 bits."""

    name = "int8"
    _nearest = staticmethod(round_to_int8)

    def _pack(self, weight: Tensor) -> Tensor:
        self._widen_bias()
        pieces = (self._nearest(weight[first : first + PIECE]) for first in range(0, len(weight), PIECE))
        self._kind, panels = cached_layout(partial(joint_panels, pieces, len(weight)), len(weight))
        return panels


class Int4Linear(Int8Linear):
    """A `PackedLinear` that quantizes its weight to 4 bits."""

    name = "int4"
    _nearest = staticmethod(round_to_int4)


@cache
def sums_codes() -> bool:
    """Whether this processor's products of packed weights equal `packed.product`; logs a warning if they don't."""
    x = torch.randn(5, 9 * GROUP, generator=torch.Generator().manual_seed(0))
    for kind in WeightFormat:
        blocks = random_blocks(kind, 40, x.shape[1])
        found = PackedLinear.of_blocks([blocks], kind.name, torch.float32, (40, x.shape[1]))(x)
        expected = product(blocks, x)
        if not torch.allclose(found, expected, rtol=0, atol=1e-6 * float(expected.abs().max())):
            _LOG.warning("this processor sums integer products incorrectly: weights in 4 and 8 bits are dequantized")
            return False
    return True


class PackedEmbedding(nn.Module):
    """A frozen replacement for `nn.Embedding` that looks up rows of a packed weight, which may be the head's."""

    def __init__(self, table: PackedLinear) -> None:
        super().__init__()
        self._kept = (table,)  # not a child module: the head may have it as one

    @property
    def table(self) -> PackedLinear:
        """The packed weight [tokens, H] whose rows are looked up."""
        return self._kept[0]

    @property
    def weight(self) -> Tensor:
        """The row-major weight [tokens, H], restored on demand."""
        return self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        """The embeddings [..., H] of tokens [...]."""
        return self.table.lookup(ids)


def matrix_of(module: Any) -> Tensor | PackedLinear:
    """The weight of an embedding or a head, row-major or packed."""
    if isinstance(module, PackedEmbedding):
        return module.table
    if isinstance(module, PackedLinear):
        return module
    weight: Tensor = module.weight.detach()
    return weight
