"""Sources take turns in proportion."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from eyas.data.chats.prepare import interleave, rank


def turns(counts: list[int], weights: list[float], total: int | None, strict: bool) -> list[int]:
    return [source for source, _ in interleave([iter(range(n)) for n in counts], weights, total, strict)]


@given(st.lists(st.floats(0.05, 20), min_size=1, max_size=5), st.integers(1, 200))
def test_at_any_moment_each_has_had_its_share_to_within_one(weights: list[float], total: int) -> None:
    drawn = turns([total] * len(weights), weights, total, strict=True)
    assert len(drawn) == total
    for n in range(1, total + 1):
        had = Counter(drawn[:n])
        for i, weight in enumerate(weights):
            assert abs(had[i] - n * weight / sum(weights)) <= len(weights) / 2 + 1e-6


def test_weights_without_a_total_end_with_the_source_that_runs_dry() -> None:
    assert Counter(turns([100, 10], [3, 1], None, strict=True)) == {0: 32, 1: 10}
    assert Counter(turns([6, 100], [3, 1], None, strict=True)) == {0: 6, 1: 2}


def test_with_a_total_the_others_keep_to_their_shares() -> None:
    assert Counter(turns([100, 5], [1, 1], 40, strict=True)) == {0: 20, 1: 5}
    assert turns([0, 0], [1, 1], 40, strict=True) == []


def test_without_weights_everything_is_taken() -> None:
    assert Counter(turns([100, 5], [100, 5], None, strict=False)) == {0: 100, 1: 5}
    assert Counter(turns([100, 5], [1, 1], 40, strict=False)) == {0: 35, 1: 5}


def test_ranks_depend_on_seed_and_id() -> None:
    assert rank(0, "a") == rank(0, "a")
    assert len({rank(seed, name) for seed in range(3) for name in "abc"}) == 9
