"""Fit a measurement into a budget of time: fewer repeats, then fewer prompts, then fewer candidates."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from eyas.bench.offline.runner import Task, run_group
from eyas.engine import Engine
from eyas.types import SamplingParams

MIN_GROUPS = 4
"""Fewer groups of prompts don't represent others, so from here on candidates are left out instead."""


class Size(NamedTuple):
    """How much is measured."""

    repeats: int
    groups: int
    """Groups of prompts per file."""
    candidates: int = 1


def smaller(most: Size) -> Iterator[Size]:
    """`most`, then ever smaller sizes down to a single run of a few groups with one candidate."""
    for repeats in range(most.repeats, 0, -1):
        yield Size(repeats, most.groups, most.candidates)
    least = min(MIN_GROUPS, most.groups)
    for groups in range(most.groups - 1, least - 1, -1):
        yield Size(1, groups, most.candidates)
    for candidates in range(most.candidates - 1, 0, -1):
        yield Size(1, least, candidates)


def largest(most: Size, runs: Callable[[Size], int], most_runs: float) -> Size:
    """The largest size that takes at most `most_runs` runs of a group; the smallest if none does."""
    found = most
    for found in smaller(most):
        if runs(found) <= most_runs:
            break
    return found


def seconds_of_run(engine: Engine, tasks: Sequence[Task], params: SamplingParams) -> float:
    """The seconds that the first group of prompts takes, after a run that isn't timed."""
    group = next(task.groups[0] for task in tasks if task.groups)
    run_group(engine, group, params)
    began = time.perf_counter()
    run_group(engine, group, params)
    return max(1e-6, time.perf_counter() - began)
