"""What is measured: prompt files cut into groups that are decoded together, and one timed run of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from eyas.data.dialogue import Dialogue, converse
from eyas.data.prompts import BadRow, PromptRow, read_prompts
from eyas.engine import Engine
from eyas.types import Completion, SamplingParams, Stats

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
