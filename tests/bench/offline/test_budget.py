"""Measuring within a budget: repeats go first, then prompts, then checkpoints."""

from __future__ import annotations

from itertools import pairwise

import pytest

from eyas.bench.offline.budget import Size, largest, smaller


def runs(size: Size) -> int:
    return (size.candidates + 1) * size.groups * size.repeats


@pytest.mark.parametrize(
    ("most_runs", "expected"),
    [
        (1000, Size(3, 12, 6)),
        (200, Size(2, 12, 6)),
        (84, Size(1, 12, 6)),
        (50, Size(1, 7, 6)),
        (20, Size(1, 4, 4)),
        (1, Size(1, 4, 1)),
    ],
)
def test_the_largest_that_fits(most_runs: int, expected: Size) -> None:
    assert largest(Size(3, 12, 6), runs, most_runs) == expected


def test_sizes_only_shrink() -> None:
    found = list(smaller(Size(2, 6, 3)))
    assert found[0] == Size(2, 6, 3)
    assert all(runs(later) < runs(earlier) for earlier, later in pairwise(found))
    assert list(smaller(Size(1, 2))) == [Size(1, 2, 1)]
