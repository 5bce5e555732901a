"""Linear layers whose weights a GPU keeps in 8 and 4 bits: a kernel dequantizes them to the dtype of its inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from eyas.targets.linears import PrepackedLinear, prepack_linears
from eyas.targets.native.packed import PIECE, round_to_int4, round_to_int8
from eyas.targets.triton.linear import Weight, linear, on_device_of


class TritonInt8Linear(PrepackedLinear):
    """A frozen replacement for `nn.Linear` that quantizes its weight to 8 bits; its inputs aren't rounded."""

    name = "int8"
    _round = staticmethod(round_to_int8)
    packed: Weight
    """The weight as kernels take it."""

    def _pack(self, weight: Tensor) -> Tensor:
        pieces = [
            Weight.of_blocks(self._round(weight[first : first + PIECE]), self.in_features)
            for first in range(0, len(weight), PIECE)
        ]
        self.hold(replace(Weight.joined(pieces), bias=self.bias))
        return self._prepacked

    def hold(self, packed: Weight) -> None:
        """Multiply by the same weight at another place in memory."""
        self.packed = packed
        self._prepacked = packed.values

    def restored(self) -> Tensor:
        return self.packed.floats().to(self._dtype)

    def multiply(self, x: Tensor) -> Tensor:
        with on_device_of(x):
            made = linear(x.reshape(-1, self.in_features).contiguous(), self.packed)
        return made.view(*x.shape[:-1], self.out_features)


class TritonInt4Linear(TritonInt8Linear):
    """A `TritonInt8Linear` that quantizes its weight to 4 bits."""

    name = "int4"
    _round = staticmethod(round_to_int4)


_LAYOUTS: dict[str, type[TritonInt8Linear]] = {"int8": TritonInt8Linear, "int4": TritonInt4Linear}


def quantize_linears(model: Any, quantize: str) -> None:
    """Quantize the weights of a model's linears to `int8` or `int4`, its head's to 8 bits.

    Raises UnsupportedModelError for a number of inputs that the kernels don't multiply.
    """
    head = model.get_output_embeddings()
    inner = _LAYOUTS[quantize]
    prepack_linears(
        model, lambda linear, **how: (TritonInt8Linear if linear is head else inner)(linear, **how), model.dtype
    )
