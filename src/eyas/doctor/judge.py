"""When one reading is better than another, and not by chance.

Both are measured on the same answer tokens, so what counts is the difference of their overlap, token by token. Blocks
of 16 neighbouring tokens are one observation each, as neighbours aren't independent. With the sum D_b of the
differences and the number n_b of the tokens of each of B blocks:

    gain = sum D_b / sum n_b,   error^2 = B / (B - 1) * sum (D_b - gain * n_b)^2 / (sum n_b)^2,   z = gain / error

Of m readings that are tried one wins if z exceeds the normal quantile of 1 - 0.001 / m (so that all of them together
win by chance once in a thousand drafters), its gain is at least 0.001, and its greedy acceptance isn't lower.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt
from statistics import NormalDist

import torch

from eyas.doctor.measure import Measured

CHANCE = 0.001
"""How often any reading of a sound drafter may win by chance."""
LEAST_GAIN = 0.001
"""Less overlap than this is of no use, however certain it is."""
LEAST_FROM_TAPS = 0.02
"""Less overlap than this from the target's states means that a drafter doesn't understand them."""


@dataclass(frozen=True)
class Gain:
    """Of one reading over another."""

    mean: float
    """In overlap: sampling at temperature 1 accepts so much more of a draft token."""
    error: float
    """Its standard error."""
    greedy: float
    """In the share of draft tokens that are right, fed with the true ones."""

    @property
    def z(self) -> float:
        """In standard errors."""
        if self.error:
            return self.mean / self.error
        return 0.0 if self.mean == 0 else inf if self.mean > 0 else -inf

    def convincing(self, tried: int, least: float = LEAST_GAIN) -> bool:
        """Is it there, with `tried` readings to choose from?"""
        return self.z > needed(tried) and self.mean >= least and self.greedy >= 0


def needed(tried: int) -> float:
    """The z that one of `tried` readings needs."""
    return NormalDist().inv_cdf(1 - CHANCE / max(1, tried))


def gain(other: Measured, base: Measured) -> Gain:
    """Of `other` over `base`, on the same tokens."""
    difference = (other.overlap - base.overlap).double()
    count = int(base.blocks.max()) + 1
    sums = torch.zeros(count, dtype=torch.float64, device=difference.device).index_add_(0, base.blocks, difference)
    sizes = torch.bincount(base.blocks, minlength=count).double()
    mean = float(difference.mean())
    real = int((sizes > 0).sum())
    spread = float((sums - mean * sizes).square().sum())
    error = sqrt(real / (real - 1) * spread) / len(difference) if real > 1 else inf
    return Gain(mean, error, float((other.right - base.right).double().mean()))
