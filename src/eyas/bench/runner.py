"""The measurement: for each group of prompts every method in turn, in an order that rotates, several times.

Interleaving spreads the machine's moods over all methods alike; rotating keeps any from always running first.
The run with the median decoding time stands for its group, so that counts and times belong together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

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


def measure(
    task: Task,
    engines: Mapping[str, Engine],
    params: SamplingParams,
    plan: Plan,
    advance: Progress = lambda: None,
) -> dict[str, Measured]:
    """Run a task with every engine; the one named `none` is what the others' tokens are compared with."""
    results = {name: Measured() for name in engines}
    if not task.groups:
        return results
    for _ in range(plan.warmup):
        for engine in engines.values():
            run_group(engine, task.groups[0], params)
    for number, group in enumerate(task.groups):
        runs = _interleaved(group, engines, params, plan, number, advance)
        task.errors += runs[PLAIN][0].errors
        if not runs[PLAIN][0].token_ids:
            continue
        for name, result in results.items():
            _add(result, runs[name], runs[PLAIN][0])
    return results


def _interleaved(
    group: Group,
    engines: Mapping[str, Engine],
    params: SamplingParams,
    plan: Plan,
    number: int,
    advance: Progress,
) -> dict[str, list[GroupRun]]:
    runs: dict[str, list[GroupRun]] = {name: [] for name in engines}
    for repeat in range(plan.repeats):
        for name in rotated(list(engines), number + repeat):
            runs[name].append(run_group(engines[name], group, params))
            advance()
    return runs


def rotated(names: Sequence[str], by: int) -> Iterator[str]:
    """The names from the `by`-th on, round and round."""
    by %= len(names)
    yield from names[by:]
    yield from names[:by]


def _add(result: Measured, runs: Sequence[GroupRun], plain: GroupRun) -> None:
    ordered = sorted(runs, key=lambda run: run.stats.decode_seconds)
    median = ordered[(len(ordered) - 1) // 2].stats
    result.stats.merge(median)
    result.groups.append(median)
    result.answers += len(plain.token_ids)
    result.same += sum(
        all(index < len(run.token_ids) and run.token_ids[index] == tokens for run in runs)
        for index, tokens in enumerate(plain.token_ids)
    )
