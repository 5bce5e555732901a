"""The measurement: for each group of prompts every method in turn, in an order that rotates, several times.

Interleaving spreads the machine's moods over all methods alike; rotating keeps any from always running first.
The run with the median decoding time stands for its group, so that counts and times belong together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

from eyas.engine import Engine
from eyas.text.dialogue import Dialogue, converse
from eyas.text.prompts import BadRow, PromptRow, read_prompts
from eyas.types import Completion, SamplingParams, Stats

PLAIN = "none"


@dataclass(frozen=True)
class Plan:
    """How often."""

    repeats: int = 3
    warmup: int = 1


@dataclass
class MethodResult:
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


Advance = Callable[[], None]
RunT = TypeVar("RunT")


def measure(
    task: Task,
    engines: Mapping[str, Engine],
    params: SamplingParams,
    plan: Plan,
    advance: Advance = lambda: None,
) -> dict[str, MethodResult]:
    """Run a task with every engine; the one named `none` is what the others' tokens are compared with."""

    def run(name: str, group: Group) -> GroupRun:
        return run_group(engines[name], group, params)

    results = {name: MethodResult() for name in engines}
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
    advance: Advance,
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


def _add(result: MethodResult, runs: Sequence[GroupRun], plain: GroupRun) -> None:
    median = median_run(runs, lambda run: run.stats.decode_seconds).stats
    result.stats.merge(median)
    result.groups.append(median)
    result.answers += len(plain.token_ids)
    result.same += sum(
        all(index < len(run.token_ids) and run.token_ids[index] == tokens for run in runs)
        for index, tokens in enumerate(plain.token_ids)
    )


# What is measured: prompt files cut into groups that are decoded together, and one timed run of a group.


Group = Sequence[PromptRow]


@dataclass
class Task:
    """A prompt file: its good rows, `batch_size` at a time, and what was wrong with the others."""

    name: str
    groups: list[Group]
    errors: list[str] = field(default_factory=list)


def read_tasks(paths: Sequence[Path], batch_size: int, limit: int | None = None) -> list[Task]:
    """All files, each once, named by its stem or, where two share one, by its path."""
    distinct = list(dict.fromkeys(paths))
    stems = [path.stem for path in distinct]
    tasks = [read_task(path, batch_size, limit) for path in distinct]
    for task, path in zip(tasks, distinct, strict=True):
        if stems.count(path.stem) > 1:
            task.name = str(path)
    return tasks


def read_task(path: Path, batch_size: int, limit: int | None = None) -> Task:
    """Cut a file into groups; a single row is a group of its own, so figures of batch 1 are per row."""
    rows = read_prompts(path, limit)
    good = [row for row in rows if isinstance(row, PromptRow)]
    groups: list[Group] = [good[i : i + batch_size] for i in range(0, len(good), batch_size)]
    return Task(path.stem, groups, [row.error for row in rows if isinstance(row, BadRow)])


class GroupRun(NamedTuple):
    """One run of a group."""

    stats: Stats
    token_ids: list[list[int]]
    """Every turn of every row."""
    errors: list[str]


def run_group(engine: Engine, group: Group, params: SamplingParams) -> GroupRun:
    """Decode a group. Times are wall time: what sequences of a batch share is counted once."""
    dialogues = [Dialogue(row) for row in group]
    for _ in converse(engine, dialogues, params):
        pass
    stats = Stats()
    for turn in range(max(len(dialogue.completions) for dialogue in dialogues)):
        stats.merge(_together([d.completions[turn] for d in dialogues if len(d.completions) > turn]))
    return GroupRun(
        stats,
        [completion.token_ids for dialogue in dialogues for completion in dialogue.completions],
        [dialogue.error for dialogue in dialogues if dialogue.error is not None],
    )


def _together(completions: Sequence[Completion]) -> Stats:
    """Sequences that began together: the one that ran longest took part in every round."""
    stats = Stats()
    for completion in completions:
        stats.merge(completion.stats)
    stats.prefill_seconds = max(completion.stats.prefill_seconds for completion in completions)
    stats.decode_seconds = max(completion.stats.decode_seconds for completion in completions)
    return stats
