"""Which checkpoint of a training run to serve: its folder as `eyas train` wrote it, and the report of the choice."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from rich.table import Table

from eyas.bench.offline.candidates import Candidate, Selection
from eyas.errors import DataError

METRICS = ("loss", "validation_loss", "validation_accept_length", "decoded_accept_length")
"""What a run's log says of a step: training and validation loss; accept length, simulated and decoded."""
Record = dict[str, Any]
"""A line of a run's metrics.jsonl."""


@dataclass(frozen=True)
class CheckpointReport:
    """The choice of a checkpoint: every candidate on real tasks, beside what training said of it at the time."""

    run: TrainingRun
    choice: Selection
    settings: Mapping[str, Any]
    machine: Mapping[str, Any]
    errors: Sequence[str]

    @property
    def in_order(self) -> list[tuple[Candidate, int, dict[str, float]]]:
        """Candidates by step: (candidate, step, the values of `METRICS` and `moment` at that step)."""
        found = {candidate.name: candidate for candidate in self.choice.ranked}
        return [
            (found[checkpoint.name], checkpoint.step, self.run.at(checkpoint.step, METRICS))
            for checkpoint in self.run.checkpoints
            if checkpoint.name in found
        ]

    def as_dict(self) -> dict[str, Any]:
        """The JSON form: settings, machine, the choice, and every checkpoint's training metrics."""
        rows = [
            {"name": candidate.name, "step": step, "training": training} for candidate, step, training in self.in_order
        ]
        return {
            "run": self.run.path.name,
            "settings": dict(self.settings),
            "machine": dict(self.machine),
            **self.choice.as_dict(),
            "checkpoints": rows,
            "errors": list(self.errors),
        }

    def table(self) -> Table:
        """The table for a terminal, by step; the choice and what ties with it are marked."""
        rows = self.in_order
        tasks = list(self.choice.best.tasks)
        shown = [metric for metric in METRICS if any(metric in training for *_, training in rows)]
        table = Table("", "step", "trained s" if self.run.timed else "", title=f"Checkpoints of {self.run.path}")
        for header in (*(metric.replace("_", " ") for metric in shown), *_columns(tasks), "identical"):
            table.add_column(header, justify="right")
        for candidate, step, training in rows:
            mark = "pick" if candidate is self.choice.best else "tie" if candidate.name in self.choice.ties else ""
            moment = f"{training['moment']:.0f}" if self.run.timed and "moment" in training else ""
            metrics = (f"{training[name]:.3f}" if name in training else "" for name in shown)
            same = sum(score.same for score in candidate.tasks.values())
            answers = sum(score.answers for score in candidate.tasks.values())
            table.add_row(mark, str(step), moment, *metrics, *_figures(candidate, tasks), f"{same}/{answers}")
        return table


def _columns(tasks: Sequence[str]) -> list[str]:
    names = [f"{task}: accept length, speedup" for task in tasks]
    return [*names, *(["mean: accept length, speedup"] if len(tasks) > 1 else [])]


def _figures(candidate: Candidate, tasks: Sequence[str]) -> list[str]:
    scores = [candidate.tasks[task] for task in tasks]
    cells = [f"{score.figure('accept_length'):.2f} {score.figure('speedup'):.2f}x" for score in scores]
    mean = f"{candidate.mean('accept_length'):.3f} {candidate.mean('speedup'):.2f}x"
    return [*cells, *([mean] if len(tasks) > 1 else [])]


@dataclass(frozen=True)
class RunCheckpoint:
    """A drafter directory of a run, and the training step after which it was written."""

    name: str
    path: Path
    step: int


@dataclass(frozen=True)
class TrainingRun:
    """The folder that `eyas train` writes: its checkpoints, its metrics and its recipe."""

    path: Path

    @cached_property
    def checkpoints(self) -> list[RunCheckpoint]:
        """Checkpoints by step. A directory without config.json, which is written last, is unfinished and left out."""
        found = [
            RunCheckpoint(path.name, path, int(path.name.removeprefix("step-")))
            for path in (self.path / "checkpoints").glob("step-*")
            if path.name.removeprefix("step-").isdecimal() and (path / "config.json").is_file()
        ]
        if not found:
            raise DataError(
                f"{self.path} has no checkpoints: a run of `eyas train` keeps them in {self.path / 'checkpoints'}, "
                "one directory step-N each"
            )
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    @cached_property
    def records(self) -> list[Record]:
        """The lines of metrics.jsonl, without a last one that a kill cut short; empty if there is no such file."""
        path = self.path / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        records = []
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
                records.append({**record, "step": int(record["step"])})
            except (ValueError, TypeError, KeyError) as error:
                if number < len(lines):
                    raise DataError(f"{path}:{number} isn't a metrics record (an object with a step)") from error
        return records

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """The drafter section of the run's recipe, config.yaml; empty if there is none."""
        path = self.path / "config.yaml"
        if not path.is_file():
            return {}
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except yaml.YAMLError as error:
            raise DataError(f"{path} is not valid YAML: {error}") from error
        section = values.get("drafter", values) if isinstance(values, dict) else None
        return section if isinstance(section, dict) else {}

    def curve(self, metric: str) -> tuple[list[float], list[float]]:
        """Training seconds (steps, if records carry no seconds) and values of all records that have `metric`."""
        found = [(self.moment(record), record[metric]) for record in self.records if metric in record]
        return [moment for moment, _ in found], [value for _, value in found]

    @property
    def timed(self) -> bool:
        """Whether records carry seconds of training."""
        return bool(self.records) and all("seconds" in record for record in self.records)

    def moment(self, record: Record) -> float:
        """Where a record lies on the run's axis: its seconds, or its step."""
        return float(record["seconds"] if self.timed else record["step"])

    def at(self, step: int, metrics: Sequence[str]) -> dict[str, float]:
        """The latest values of `metrics` not after `step`, and the run's `moment` there."""
        found: dict[str, float] = {}
        for record in self.records:
            if record["step"] <= step:
                found |= {name: record[name] for name in metrics if name in record}
                found["moment"] = self.moment(record)
        return found
