"""Bounds on the sizes of trees, for tree names and tree shapes alike. Imports no torch."""

from __future__ import annotations

from eyas.errors import UsageError

_MIN_SIZES = {"ngram": 3}
"""Minimum of each size for which it isn't 1."""
_MAX_SIZES = {
    "length": 1024, "depth": 256, "top_k": 256, "nodes": 1024, "width": 256, "budget": 16384, "per_row": 1024,
    "window": 128, "ngram": 16, "guesses": 128,
}  # fmt: skip
"""Maximum sizes. They are needed because a tree of N nodes takes an N x N mask per row, and drafters can name trees."""


def check_sizes(kind: str, threshold: float = 0.0, **sizes: int | None) -> None:
    """Raise UsageError for sizes out of bounds (None = not limited) and for a threshold outside [0, 1)."""
    for name, size in sizes.items():
        least = _MIN_SIZES.get(name, 1)
        most = _MAX_SIZES[name]
        if size is not None and size < least:
            raise UsageError(f"{kind} tree: {name} must be at least {least}, got {size}")
        if size is not None and size > most:
            raise UsageError(f"{kind} tree: {name} must be at most {most}, got {size}; choose a smaller `tree=`")
    if not 0.0 <= threshold < 1.0:
        raise UsageError(f"{kind} tree: threshold must be in [0, 1), got {threshold}")
