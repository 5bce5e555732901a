"""The measurement: for each group of prompts every method in turn, in an order that rotates, several times.

Interleaving spreads the machine's moods over all methods alike; rotating keeps any from always running first.
The run with the median decoding time stands for its group, so that counts and times belong together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from eyas.bench.tasks import Group, GroupRun, Task, run_group
from eyas.engine import Engine
from eyas.types import SamplingParams, Stats

PLAIN = "none"


@dataclass(frozen=True)
class Plan:
    """How often."""

    repeats: int = 3
    warmup: int = 1


@dataclass
class Measured:
    """A method on a task."""

    stats: Stats = field(default_factory=Stats)
    """Pooled over the groups' median runs."""
    same: int = 0
    """Answers whose tokens were plain decoding's, in every repeat."""
    answers: int = 0
    groups: list[Stats] = field(default_factory=list)
    """The median runs one by one, in the order of the task's groups."""

    @property
    def identical(self) -> bool:
        """Was every answer plain decoding's?"""
        return self.same == self.answers


Progress = Callable[[], None]
RunT = TypeVar("RunT")


def measure(
    task: Task,
    engines: Mapping[str, Engine],
    params: SamplingParams,
    plan: Plan,
    advance: Progress = lambda: None,
) -> dict[str, Measured]:
    """Run a task with every engine; the one named `none` is what the others' tokens are compared with."""

    def run(name: str, group: Group) -> GroupRun:
        return run_group(engines[name], group, params)

    results = {name: Measured() for name in engines}
    if not task.groups:
        return results
    for _ in range(plan.warmup):
        for name in engines:
            run(name, task.groups[0])
    for number, group in enumerate(task.groups):
        runs = interleaved(list(engines), run, group, plan.repeats, number, advance)
        task.errors += runs[PLAIN][0].errors
        if not runs[PLAIN][0].token_ids:
            continue
        for name, result in results.items():
            _add(result, runs[name], runs[PLAIN][0])
    return results


def interleaved(
    names: Sequence[str],
    run: Callable[[str, Group], RunT],
    group: Group,
    repeats: int,
    number: int,
    advance: Progress,
) -> dict[str, list[RunT]]:
    """Run every method so many times on a group, the task's `number`-th: name -> its runs."""
    runs: dict[str, list[RunT]] = {name: [] for name in names}
    for repeat in range(repeats):
        for name in rotated(names, number + repeat):
            runs[name].append(run(name, group))
            advance()
    return runs


def rotated(names: Sequence[str], by: int) -> Iterator[str]:
    """The names from the `by`-th on, round and round."""
    by %= len(names)
    yield from names[by:]
    yield from names[:by]


def median_run(runs: Sequence[RunT], seconds: Callable[[RunT], float]) -> RunT:
    """The run in the middle; the faster one of two."""
    return sorted(runs, key=seconds)[(len(runs) - 1) // 2]


def _add(result: Measured, runs: Sequence[GroupRun], plain: GroupRun) -> None:
    median = median_run(runs, lambda run: run.stats.decode_seconds).stats
    result.stats.merge(median)
    result.groups.append(median)
    result.answers += len(plain.token_ids)
    result.same += sum(
        all(index < len(run.token_ids) and run.token_ids[index] == tokens for run in runs)
        for index, tokens in enumerate(plain.token_ids)
    )
