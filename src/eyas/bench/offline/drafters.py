"""Several drafters against plain decoding on the same tasks: interleaved, kept on disk, resumable.

`together` drafters are in memory at a time. Plain decoding is interleaved with every such batch, so that a speedup is
always a ratio of times from the same interleaved runs. The scores of a batch on a task are written before the next task
begins.

Scores are kept on disk (`Ledger`): a JSON file for each candidate, in a folder named after the settings. A score is
valid only for the settings, weights and prompts it was measured with; anything else is measured again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from eyas.bench.offline.candidates import Candidate, TaskScore, task_score
from eyas.bench.offline.runner import PLAIN, Advance, Measure, Plan, Task, measure
from eyas.drafters.options import DrafterOptions
from eyas.engine import Engine
from eyas.errors import DataError, EyasError
from eyas.files import file_hash, write_json
from eyas.options import EngineOptions
from eyas.session import Session
from eyas.types import SamplingParams


class Ledger:
    """Scores by candidate and task in `folder`/KEY, KEY being a digest of the settings."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], tasks: Mapping[str, str]) -> None:
        """`tasks`: name -> digest of its prompts. `settings`: everything else that a score depends on."""
        self.settings = dict(settings)
        self._tasks = dict(tasks)
        text = json.dumps(self.settings, sort_keys=True)
        self.folder = folder / hashlib.sha256(text.encode()).hexdigest()[:12]
        self._weights: dict[str, str] = {}
        self._rows: dict[str, dict[str, Any]] = {}  # candidate -> task -> row of its file

    def open(self, name: str, weights: str) -> None:
        """Read the scores of a candidate; `weights` is the digest of its files. Raises DataError."""
        self._weights[name] = weights
        self._rows[name] = {}
        path = self._path(name)
        if not path.is_file():
            return
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
            if known["weights"] == weights:
                self._rows[name] = dict(known["tasks"])
            self.scores(name)
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} has no readable scores: delete it to measure them again") from error

    def scores(self, name: str) -> dict[str, TaskScore]:
        """The candidate's scores on the tasks of this measurement, by task."""
        rows = self._rows[name]
        return {
            task: TaskScore.from_dict(rows[task]["score"])
            for task, prompts in self._tasks.items()
            if task in rows and rows[task]["prompts"] == prompts
        }

    def put(self, name: str, task: str, score: TaskScore) -> None:
        """Store a score; it is on disk when this returns."""
        self._rows[name][task] = {"prompts": self._tasks[task], "score": score.as_dict()}
        content = {"settings": self.settings, "weights": self._weights[name], "tasks": self._rows[name]}
        write_json(self._path(name), content)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.json"


@dataclass
class DrafterBench:
    """The drafters to measure, by name, and what they are measured with."""

    drafters: Mapping[str, Path]
    session: Session
    tasks: Sequence[Task]
    params: SamplingParams
    plan: Plan
    ledger: Ledger
    options: EngineOptions
    """Options of all engines; without a tree, each drafter's own shape."""
    together: int = 6
    measure: Measure | None = None
    """Measures a task; None: in this process."""
    failures: dict[str, str] = field(default_factory=dict)
    """Drafters that couldn't be loaded or run -> the reason."""

    @cached_property
    def missing(self) -> list[tuple[str, set[str]]]:
        """Drafters that lack scores, each with the tasks it has to be measured on."""
        found = []
        for name, path in self.drafters.items():
            self.ledger.open(name, file_hash(*sorted(path.glob("*.safetensors")), path / "config.json"))
            tasks = {task.name for task in self.tasks} - self.ledger.scores(name).keys()
            if tasks:
                found.append((name, tasks))
        return found

    @property
    def work(self) -> int:
        """Number of group runs to be done, plain decoding's included."""
        steps = 0
        for batch in _chunks(self.missing, self.together):
            for task in self.tasks:
                waiting = sum(task.name in tasks for _, tasks in batch)
                steps += (waiting + 1) * len(task.groups) * self.plan.repeats if waiting else 0
        return steps

    def run(self, advance: Advance = lambda: None) -> list[Candidate]:
        """Measure what the ledger lacks; returns candidates in the given order, except those that failed."""
        plain = self.session.engine(None, replace(self.options, tree=None))
        for batch in _chunks(self.missing, self.together):
            engines = {name: engine for name, _ in batch if (engine := self._engine(name)) is not None}
            for task in self.tasks:
                waiting = [name for name, tasks in batch if task.name in tasks and name in engines]
                if not waiting:
                    continue
                group = {PLAIN: plain} | {name: engines[name] for name in waiting}
                results = (self.measure or measure)(task, group, self.params, self.plan, advance)
                for name in waiting:
                    self.ledger.put(name, task.name, task_score(results[name], results[PLAIN]))
        return [Candidate(name, self.ledger.scores(name)) for name in self.drafters if name not in self.failures]

    def _engine(self, name: str) -> Engine | None:
        try:
            drafter = self.session.drafter(DrafterOptions(self.drafters[name]))
            return self.session.fixed_engine(drafter, self.options)
        except EyasError as error:
            self.failures[name] = str(error)
            return None


def _chunks(items: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
