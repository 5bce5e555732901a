"""Whether anybody trained these weights, told from the matrices alone.

The rows of a matrix of independent draws are nearly equally long: with n columns and fourth moment k (3 for normal,
1.8 for uniform draws) their lengths spread by sqrt((k - 1) / (4 n)) of the mean, and so do columns. Training makes some
rows and columns matter more than others. Spread * sqrt(2 n) is 1 for normal draws, 0.6 for uniform ones, 0 for
orthogonal rows; in trained drafters it lies above 2 in rows or columns of nearly every matrix.
"""

from __future__ import annotations

from math import sqrt

from torch import Tensor

from eyas.doctor.reading import Reading

DRAWN = 1.4
"""Up to here a matrix may just have been drawn."""
_BORROWED = ("embed_tokens.weight", "lm_head.weight")
"""Often copied from the target, so they say nothing of training."""


def unevenness(reading: Reading) -> float:
    """Of the most uneven matrix of the drafter's own layers: 1 or less where nobody trained them."""
    return max(
        (
            max(_spread(weight, 1), _spread(weight, 0))
            for name, weight in reading.tensors.items()
            if weight.ndim == 2 and name not in _BORROWED
        ),
        default=0.0,
    )


def _spread(weight: Tensor, dim: int) -> float:
    """Of the lengths along `dim`, in units of what independent normal draws have."""
    lengths = weight.float().norm(dim=dim)
    return float(lengths.std() / lengths.mean().clamp(min=1e-12)) * sqrt(2 * weight.shape[dim])
