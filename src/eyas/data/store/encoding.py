"""Encodings of stored data: states in float32, bf16 or fp8 with one scale a vector, masks in one bit a token.

fp8 is e4m3 (4 exponent bits, 3 mantissa bits) times a power of two that brings the vector's largest value into
[224, 448), the upper half of e4m3's range. A power of two costs one byte and adds no rounding error: values within a
factor of 2^-14 of the largest have a relative error of at most 2^-4, smaller ones an absolute error of 2^-10 scales.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from eyas.errors import StoreError

StateEncoding = Literal["float32", "bf16", "fp8"]

STATE_TYPES: dict[StateEncoding, torch.dtype] = {
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
}
_LARGEST = 448.0  # the largest e4m3 value


class EncodedStates(NamedTuple):
    """States [..., Ht] in the form in which they are stored."""

    values: Tensor  # [..., Ht]
    exponents: Tensor | None  # [...] int8, fp8 only: states are values x 2^exponents


def encode_states(states: Tensor, encoding: StateEncoding) -> EncodedStates:
    """Encode states [..., Ht] for storage. Raises StoreError if any value is not finite."""
    if not bool(torch.isfinite(states).all()):
        raise StoreError(
            f"the target's states overflow in {states.dtype}: a drafter can't learn from them; "
            "load it with --dtype bfloat16 or float32"
        )
    if encoding != "fp8":
        return EncodedStates(states.to(STATE_TYPES[encoding]), None)
    wide = states.float()
    exponents = torch.frexp(wide.abs().amax(-1) / _LARGEST).exponent.clamp(-126, 126)
    values = (wide * _power_of_two(-exponents).unsqueeze(-1)).to(torch.float8_e4m3fn)
    return EncodedStates(values, exponents.to(torch.int8))


def decode_states(encoded: EncodedStates, dtype: torch.dtype) -> Tensor:
    """Decode stored states to [..., Ht] in `dtype`; decoding adds no error of its own."""
    states = encoded.values.to(dtype)
    if encoded.exponents is None:
        return states
    return states.mul_(_power_of_two(encoded.exponents).to(dtype).unsqueeze(-1))


def _power_of_two(exponents: Tensor) -> Tensor:
    """2^e in float32 for -127 < e < 128, built from its bits: exact on every device, unlike `exp2`."""
    return ((exponents.to(torch.int32) + 127) << 23).view(torch.float32)


def pack_mask(mask: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Pack a mask [T] of bools into [ceil(T / 8)] bytes, the first token in the lowest bit."""
    return np.packbits(mask, bitorder="little")


def unpack_mask(bits: NDArray[np.uint8], count: int) -> NDArray[np.bool_]:
    """Unpack the first `count` bits of a mask to [count] bools."""
    return np.unpackbits(bits, count=count, bitorder="little").astype(np.bool_)
