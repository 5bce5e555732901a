"""States as they are stored: as they are, or in 8 bits with one scale a vector; masks in one bit a token.

fp8 is e4m3 (4 exponent bits, 3 of mantissa) times a power of two that brings the vector's largest value into
[224, 448), the upper half of e4m3's range. A power of two costs one byte and no rounding of its own: what is
within 2^-14 of the largest value keeps a relative error of 2^-4 at most, what is smaller an absolute one of
2^-10 scales.
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
_LARGEST = 448.0  # of e4m3


class EncodedStates(NamedTuple):
    """Some states [..., Ht] as stored."""

    values: Tensor  # [..., Ht]
    exponents: Tensor | None  # [...] int8, fp8 only: states are values x 2^exponents


def encode_states(states: Tensor, encoding: StateEncoding) -> EncodedStates:
    """States [..., Ht] -> what is stored. Raises StoreError where one is not a number: no store may hold that."""
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
    """What `encode_states` stored, [..., Ht] in `dtype`; exact but for fp8's rounding on the way in."""
    states = encoded.values.to(dtype)
    if encoded.exponents is None:
        return states
    return states.mul_(_power_of_two(encoded.exponents).to(dtype).unsqueeze(-1))


def _power_of_two(exponents: Tensor) -> Tensor:
    """2^e in float32 for -127 < e < 128, made of its bits: exact on every device, which `exp2` need not be."""
    return ((exponents.to(torch.int32) + 127) << 23).view(torch.float32)


def pack_mask(mask: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """[T] bool -> [ceil(T / 8)] bytes, first token in the lowest bit."""
    return np.packbits(mask, bitorder="little")


def unpack_mask(bits: NDArray[np.uint8], count: int) -> NDArray[np.bool_]:
    """The first `count` bits as [count] bool."""
    return np.unpackbits(bits, count=count, bitorder="little").astype(np.bool_)
