"""Made-up candidates for tests of choosing."""

from __future__ import annotations

from eyas.bench.offline.candidates import Candidate, Count, TaskScore


def task(*groups: tuple[int, int, int, float], plain_seconds: float = 10.0) -> TaskScore:
    """Groups of (tokens, passes, walked, seconds); plain decoding of the same tokens takes `plain_seconds` each."""
    method = tuple(Count(*group) for group in groups)
    plain = tuple(Count(group[0], group[0], 0, plain_seconds) for group in groups)
    return TaskScore(method, plain, len(groups), len(groups))


def candidate(name: str, *accept_lengths: float, seconds: float = 5.0) -> Candidate:
    """One task, one group an accept length, each of 100 passes and 100 tokens."""
    groups = [(100, 100, round(100 * (length - 1)), seconds) for length in accept_lengths]
    return Candidate(name, {"t": task(*groups)})
