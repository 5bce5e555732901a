"""Made-up candidates for tests of the choice among them."""

from __future__ import annotations

from eyas.bench.offline.candidates import Candidate, Count, TaskScore


def task(*groups: tuple[int, int, int, float], plain_seconds: float = 10.0) -> TaskScore:
    """A score from groups of (tokens, passes, walked, seconds); plain decoding takes `plain_seconds` per group."""
    method = tuple(Count(*group) for group in groups)
    plain = tuple(Count(group[0], group[0], 0, plain_seconds) for group in groups)
    return TaskScore(method, plain, len(groups), len(groups))


def candidate(name: str, *accept_lengths: float, seconds: float = 5.0) -> Candidate:
    """A candidate with one task: a group of 100 passes and 100 tokens per accept length."""
    groups = [(100, 100, round(100 * (length - 1)), seconds) for length in accept_lengths]
    return Candidate(name, {"t": task(*groups)})
