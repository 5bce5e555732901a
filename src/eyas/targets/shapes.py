"""Recurring shapes: where passes are recorded, sizes are rounded up to a few, each of which is recorded once."""

from __future__ import annotations

USES = 2
"""A shape is recorded at this use: many shapes occur only once."""


def recurring(count: int) -> int:
    """Round `count` up to a recurring number: any number up to 4, then two per power of two."""
    step = max(1, 1 << max(0, (count - 1).bit_length() - 2))
    return count + -count % step
