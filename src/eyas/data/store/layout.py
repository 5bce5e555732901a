"""The layout of a shard: the type, shape and encoding of its tensors, and so its size in bytes.

The writer, the capture's disk check and `eyas plan` all compute sizes here. Legend: N rows, T tokens, F positions with
a final state, A taps stored, Ht hidden, k candidates.

States are stored in float32, in bf16, or in fp8 with one scale per vector; masks take one bit per token.

fp8 is e4m3 (4 exponent bits, 3 mantissa bits) times a power of two that brings the vector's largest value into
[224, 448), the upper half of e4m3's range. A power of two costs one byte and adds no rounding error: values within a
factor of 2^-14 of the largest have a relative error of at most 2^-4, smaller ones an absolute error of 2^-10 x scale.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import prod
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field, model_validator
from torch import Tensor

from eyas.config import StrictModel
from eyas.data.tokens.tokenize import TokenRow
from eyas.errors import StoreError

StateEncoding = Literal["float32", "bf16", "fp8"]

STATE_TYPES: dict[StateEncoding, torch.dtype] = {
    "float32": torch.float32,
    "bf16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
}
_E4M3_MAX = 448.0  # the largest e4m3 value


class EncodedStates(NamedTuple):
    """States [..., Ht] in the form in which they are stored."""

    values: Tensor  # [..., Ht]
    exponents: Tensor | None  # [...] int8, fp8 only: states are values x 2^exponents

    def part(self, at: slice) -> EncodedStates:
        """The states at these positions, as views."""
        return EncodedStates(self.values[at], None if self.exponents is None else self.exponents[at])


def capture_parameters(taps: Sequence[int], layers: int) -> dict[str, str]:
    """The parameters of a capture that stores these boundaries of a target with so many layers."""
    inner = ",".join(str(k) for k in taps if k <= layers)
    return ({"taps": inner} if inner else {}) | ({"final": "all"} if layers + 1 in taps else {})


def encode_states(states: Tensor, encoding: StateEncoding) -> EncodedStates:
    """Encode states [..., Ht] for storage. Raises StoreError if any value is not finite."""
    if not bool(torch.isfinite(states).all()):
        raise StoreError(
            f"the target's states overflow in {states.dtype}: a drafter can't learn from them; "
            "load it with `dtype=` bfloat16 or float32"
        )
    if encoding != "fp8":
        return EncodedStates(states.to(STATE_TYPES[encoding]), None)
    wide = states.float()
    exponents = torch.frexp(wide.abs().amax(-1) / _E4M3_MAX).exponent.clamp(-126, 126)
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


FinalKind = Literal["answers", "all", "top"]
ItemType = Literal["I32", "I8", "U8", "U16", "U32", "F16", "F32", "BF16", "F8_E4M3"]

ITEM_BYTES: dict[ItemType, int] = {
    "I32": 4, "I8": 1, "U8": 1, "U16": 2, "U32": 4, "F16": 2, "F32": 4, "BF16": 2, "F8_E4M3": 1,
}  # fmt: skip
_STATE_ITEMS: dict[StateEncoding, ItemType] = {"float32": "F32", "bf16": "BF16", "fp8": "F8_E4M3"}
METADATA_KEY = "eyas"
METADATA_LENGTH = 16 + 1 + 64
"""Characters of the metadata: the capture's identity (16), a colon, and the SHA-256 of the data (64)."""


class RowTotals(NamedTuple):
    """Totals over rows, from which a layout computes bytes."""

    rows: int
    tokens: int
    taught: int
    """Positions whose next token is an answer token."""


class TensorSpec(NamedTuple):
    """The type and shape of one tensor in a shard."""

    item: ItemType
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.item]


class ShardLayout(StrictModel):
    """How features are stored. The default is recommended: fp8, with final states only where they teach."""

    hidden: int = Field(gt=0)
    vocab: int = Field(gt=0)
    taps: tuple[int, ...]
    """Boundaries stored as taps. The one after the final norm is never among them, because `final` holds it."""
    states: StateEncoding = "fp8"
    final: FinalKind = "answers"
    """Where final states are kept. `answers`: only where the next token is an answer token, all that a teacher needs;
    `all`: everywhere, for drafters that read them; `top`: nowhere, the teacher's best tokens are kept instead."""
    top: int | None = Field(default=None, gt=0)
    """The number of best tokens kept per position if `final` is `top`; None otherwise."""

    @model_validator(mode="after")
    def _top_has_a_count(self) -> ShardLayout:
        if (self.final == "top") != (self.top is not None):
            raise ValueError("`top` is the number of tokens kept if `final` is `top`: give both or neither")
        return self

    def tensors(self, size: RowTotals) -> dict[str, TensorSpec]:
        """Name -> type and shape of every tensor in a shard of this size."""
        rows, tokens, taught = size
        finals = tokens if self.final == "all" else taught
        state = _STATE_ITEMS[self.states]
        found = {
            "lengths": TensorSpec("I32", (rows,)),
            "checksums": TensorSpec("U32", (rows,)),
            "tokens": TensorSpec("I32", (tokens,)),
            "loss_mask": TensorSpec("U8", (-(-tokens // 8),)),
        }
        if self.taps:
            found["taps"] = TensorSpec(state, (tokens, len(self.taps), self.hidden))
        if self.top is not None:
            count = min(self.top, self.vocab)
            found["top_ids"] = TensorSpec("U16" if self.vocab <= 2**16 else "I32", (finals, count))
            found["top_logprobs"] = TensorSpec("F16", (finals, count))
            found["tail"] = TensorSpec("F32", (finals,))
        else:
            found["final"] = TensorSpec(state, (finals, self.hidden))
        if self.states == "fp8":
            for name in ("taps", "final"):
                if name in found:
                    found[f"{name}_exponents"] = TensorSpec("I8", found[name].shape[:-1])
        return found

    def data_bytes(self, size: RowTotals) -> int:
        """The bytes of a shard's tensors, without the header."""
        return sum(tensor.bytes for tensor in self.tensors(size).values())

    def shard_bytes(self, size: RowTotals) -> int:
        """The bytes of a shard's file, header included."""
        return len(header(self.tensors(size), "0" * METADATA_LENGTH)) + self.data_bytes(size)


def header(tensors: dict[str, TensorSpec], metadata: str) -> bytes:
    """The header of a safetensors file: the length of a JSON object and the object, padded to a multiple of 8 bytes.

    Tensors with wider items come first, so that every tensor is aligned.
    """
    described: dict[str, object] = {"__metadata__": {METADATA_KEY: metadata}}
    start = 0
    for name in in_file_order(tensors):
        tensor = tensors[name]
        stop = start + tensor.bytes
        described[name] = {"dtype": tensor.item, "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def in_file_order(tensors: dict[str, TensorSpec]) -> list[str]:
    """The tensors' names in file order: by descending item size, then by name."""
    return sorted(tensors, key=lambda name: (-ITEM_BYTES[tensors[name].item], name))


def size_of(rows: list[TokenRow]) -> RowTotals:
    """The totals of these rows; the first token of a row is never taught."""
    taught = sum(int(np.count_nonzero(row.loss_mask[1:])) for row in rows)
    return RowTotals(len(rows), sum(len(row.tokens) for row in rows), taught)


def classic_bytes(tokens: int, hidden: int) -> int:
    """Bytes of SpecForge's layout: three taps and the final state in bf16, ids and mask in int64, at every token."""
    return tokens * (8 * hidden + 16)


VARIANTS: dict[str, dict[str, Any]] = {
    "`states=bf16` `final=all`": {"states": "bf16", "final": "all", "top": None},
    "`states=bf16` `final=answers`": {"states": "bf16", "final": "answers", "top": None},
    "`states=fp8` `final=all`": {"states": "fp8", "final": "all", "top": None},
    "`states=fp8` `final=answers`": {"states": "fp8", "final": "answers", "top": None},
    "`states=fp8` `final=top:64`": {"states": "fp8", "final": "top", "top": 64},
}
"""Parameters of a capture and what they change in a layout, most exact first."""


def variants(layout: ShardLayout) -> dict[str, ShardLayout]:
    """The layout with each option of `VARIANTS` applied: the same taps of the same target, stored differently."""
    return {option: ShardLayout(**{**layout.model_dump(), **change}) for option, change in VARIANTS.items()}
