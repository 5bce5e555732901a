"""Gumbel noise as a pure function of (seed, position, token id).

Adding it to the log-probabilities and taking the argmax draws an exact sample (the Gumbel-max trick), so
the same triple gives the same token whatever the batch, the slot or the speculation. A token's hash is the
`token + 1`-th output of the SplitMix64 generator (Steele, Lea, Flood 2014) whose state starts at
`mix(mix(seed) + position)`. It is integer arithmetic, hence the same on every device, and so are the
uniforms made of it (52 bits, exact in float64); two logarithms, rounded from float64 to float32, follow.

Shapes: B rows, P positions of each row, V token ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64))
_LAST_SHIFT = 31
_UNIFORM_BITS = 52


def gumbel(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """[B, P, V] float32 Gumbel noise of `seeds` [B], `positions` [B, P] and `token_ids` [V], all int64."""
    keys = _mix_(_mix_(seeds.clone()).unsqueeze(1) + positions)  # [B, P]
    bits = _mix_(keys.unsqueeze(2) + (token_ids + 1) * _GOLDEN)
    bits = _shift_right(bits, 64 - _UNIFORM_BITS)
    # (bits + 1/2) / 2^52: exact, and never 0 or 1, so the noise is finite
    uniform = bits.to(torch.float64).mul_(2.0**-_UNIFORM_BITS).add_(2.0 ** -(_UNIFORM_BITS + 1))
    return uniform.log_().neg_().log_().neg_().to(torch.float32)


def _mix_(x: Tensor) -> Tensor:
    """SplitMix64's finalizer on int64 that wraps around, in place."""
    for shift, factor in _ROUNDS:
        x ^= _shift_right(x, shift)
        x *= factor
    x ^= _shift_right(x, _LAST_SHIFT)
    return x


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """`x >> bits` with zeros shifted in: torch's own shift of a signed integer repeats the sign."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)
