"""Measure several engines on prompt files: for each group of prompts, every method in turn, several times.

A prompt file is split into groups of rows that are decoded together. Interleaving spreads slow and fast phases of the
machine evenly over all methods; rotating the order keeps any from always running first. The run with the median
decoding time represents its group, so that counts and times come from the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple, TypeVar

from eyas.engine import Engine
from eyas.runtime import machine_load, taken_by_others
from eyas.text.dialogue import Dialogue, converse
from eyas.text.prompts import BadRow, PromptRow, read_prompts
from eyas.types import Completion, SamplingParams, Stats

PLAIN = "none"
"""The name of plain decoding among the methods."""
Group = Sequence[PromptRow]
"""Rows that are decoded together."""
Advance = Callable[[], None]
"""Called after every run of a group, to show progress."""
Measure = Callable[["Task", Mapping[str, Engine], SamplingParams, "Plan", Advance], dict[str, "MethodResult"]]
"""`measure`, or its counterpart on the workers of a cluster."""
RunT = TypeVar("RunT")


class GroupRun(NamedTuple):
    """One timed run of a group of prompts."""

    stats: Stats
    token_ids: list[list[int]]
    """One list for every turn of every row."""
    errors: list[str]

    @staticmethod
    def of(stats: Stats, dialogues: Sequence[Dialogue]) -> GroupRun:
        """The run that answered these dialogues."""
        answers = [completion.token_ids for dialogue in dialogues for completion in dialogue.completions]
        return GroupRun(stats, answers, [dialogue.error for dialogue in dialogues if dialogue.error is not None])


GroupAnswerer = Callable[[Group], GroupRun]
"""Answers a group of prompts and reports its statistics."""


@dataclass(frozen=True)
class Plan:
    """How often each method runs every group, and before that, uncounted, the first group."""

    repeats: int = 3
    warmup: int = 1


@dataclass
class MethodResult:
    """The statistics of a method on a task."""

    stats: Stats = field(default_factory=Stats)
    """Pooled over the groups' median runs."""
    same: int = 0
    """Answers equal to plain decoding's, token for token, in every repeat."""
    answers: int = 0
    groups: list[Stats] = field(default_factory=list)
    """The median runs one by one, in the order of the task's groups."""
    spreads: list[float] = field(default_factory=list)
    """Relative standard deviations of decoding times over the repeats, by group; empty without repeats."""
    ratios: list[float] = field(default_factory=list)
    """Tokens/s / plain decoding's in the same repeat of the same group, one by one."""
    sample: list[int] = field(default_factory=list)
    """The tokens of the first answer."""
    others: float = 0.0
    """The share of the machine that other processes may have used during the runs (`eyas.runtime.taken_by_others`)."""

    @property
    def identical(self) -> bool:
        """Whether every answer is plain decoding's, token for token."""
        return self.same == self.answers


def measure(
    task: Task, engines: Mapping[str, Engine], params: SamplingParams, plan: Plan, advance: Advance = lambda: None
) -> dict[str, MethodResult]:
    """Run a task with every engine; tokens are compared with those of the one named `none`, plain decoding."""
    return measure_answerers(task, {name: answerer(engine, params) for name, engine in engines.items()}, plan, advance)


def answerer(engine: Engine, params: SamplingParams) -> GroupAnswerer:
    """Wrap an engine as a `GroupAnswerer`."""
    return lambda group: run_group(engine, group, params)


def measure_answerers(
    task: Task, answerers: Mapping[str, GroupAnswerer], plan: Plan, advance: Advance = lambda: None
) -> dict[str, MethodResult]:
    """Like `measure`, for anything that answers groups of prompts: an engine or another program's decoding."""
    results = {name: MethodResult() for name in answerers}
    if not task.groups:
        return results
    for _ in range(plan.warmup):
        for answer in answerers.values():
            answer(task.groups[0])
    for number, group in enumerate(task.groups):
        runs = interleaved(
            list(answerers), lambda name, each: answerers[name](each), group, plan.repeats, number, advance
        )
        add_group(task, results, runs)
    others = taken_by_others(machine_load())
    for result in results.values():
        result.others = others
    return results


def add_group(task: Task, results: Mapping[str, MethodResult], runs: Mapping[str, Sequence[GroupRun]]) -> None:
    """Add a group's runs to the results of a task, unless plain decoding answered nothing of it."""
    task.errors += runs[PLAIN][0].errors
    if not runs[PLAIN][0].token_ids:
        return
    for name, result in results.items():
        _add(result, runs[name], runs[PLAIN])


def interleaved(
    names: Sequence[str], run: Callable[[str, Group], RunT], group: Group, repeats: int, number: int, advance: Advance
) -> dict[str, list[RunT]]:
    """Run every method `repeats` times on a group, the task's `number`-th: name -> its runs."""
    runs: dict[str, list[RunT]] = {name: [] for name in names}
    for repeat in range(repeats):
        for name in rotated(names, number + repeat):
            runs[name].append(run(name, group))
            advance()
    return runs


def rotated(names: Sequence[str], by: int) -> Iterator[str]:
    """All names, starting at index `by` and wrapping around."""
    by %= len(names)
    yield from names[by:]
    yield from names[:by]


def median_run(runs: Sequence[RunT], seconds: Callable[[RunT], float]) -> RunT:
    """The run with the median time; with an even number, the faster of the middle two."""
    return sorted(runs, key=seconds)[(len(runs) - 1) // 2]


def _add(result: MethodResult, runs: Sequence[GroupRun], plain: Sequence[GroupRun]) -> None:
    median = median_run(runs, lambda run: run.stats.decode_seconds).stats
    result.stats.merge(median)
    result.groups.append(median)
    seconds = [run.stats.decode_seconds for run in runs]
    if len(seconds) > 1 and median.decode_seconds:
        result.spreads.append(stdev(seconds) / fmean(seconds))
    pairs = ((run.stats.tokens_per_second, base.stats.tokens_per_second) for run, base in zip(runs, plain, strict=True))
    result.ratios += [speed / base for speed, base in pairs if base]
    result.sample = result.sample or list(runs[0].token_ids[0])
    expected = plain[0].token_ids
    result.answers += len(expected)
    result.same += sum(
        all(index < len(run.token_ids) and run.token_ids[index] == tokens for run in runs)
        for index, tokens in enumerate(expected)
    )


@dataclass
class Task:
    """A prompt file, or one of its categories: rows in groups, and errors of rows that can't be read."""

    name: str
    groups: list[Group]
    errors: list[str] = field(default_factory=list)
    file: Path = Path()


def read_tasks(
    paths: Sequence[Path], batch_size: int, limit: int | None = None, by_category: bool = False
) -> list[Task]:
    """Read all files, each once; a task is named by its file's stem or, where two share one, by the path.

    `by_category` makes FILE/CATEGORY a task of its own. At most `limit` rows of a task are taken.
    """
    distinct = list(dict.fromkeys(paths))
    stems = [path.stem for path in distinct]
    tasks = []
    for path in distinct:
        parts: dict[str, list[PromptRow | BadRow]] = {}
        for row in read_prompts(path, None if by_category else limit):
            category = row.category if by_category and isinstance(row, PromptRow) else None
            parts.setdefault("" if category is None else f"/{category}", []).append(row)
        name = str(path) if stems.count(path.stem) > 1 else path.stem
        tasks += [_task(name + part, path, rows[:limit], batch_size) for part, rows in parts.items()]
    return tasks


def _task(name: str, path: Path, rows: Sequence[PromptRow | BadRow], batch_size: int) -> Task:
    """Rows of a file in groups of `batch_size`."""
    good = [row for row in rows if isinstance(row, PromptRow)]
    groups: list[Group] = [good[i : i + batch_size] for i in range(0, len(good), batch_size)]
    return Task(name, groups, [row.error for row in rows if isinstance(row, BadRow)], path)


def run_group(engine: Engine, group: Group, params: SamplingParams) -> GroupRun:
    """Decode a group, turn by turn. Times are wall time: time that sequences of a batch share is counted once."""
    dialogues = [Dialogue(row) for row in group]
    for _ in converse(engine, dialogues, params):
        pass
    stats = Stats()
    for turn in range(max(len(dialogue.completions) for dialogue in dialogues)):
        stats.merge(pooled([d.completions[turn] for d in dialogues if len(d.completions) > turn]))
    return GroupRun.of(stats, dialogues)


def pooled(completions: Sequence[Completion]) -> Stats:
    """Pool statistics of sequences that began together; times are the longest of any sequence."""
    stats = Stats()
    for completion in completions:
        stats.merge(completion.stats)
    stats.prefill_seconds = max(completion.stats.prefill_seconds for completion in completions)
    stats.decode_seconds = max(completion.stats.decode_seconds for completion in completions)
    stats.draft_seconds = max(completion.stats.draft_seconds for completion in completions)
    return stats
