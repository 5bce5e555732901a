"""Which checkpoint of a run to serve: real decoding beside what training said at the time."""

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


@dataclass(frozen=True)
class CheckpointReport:
    """Everything about the choice."""

    run: TrainingRun
    choice: Selection
    settings: Mapping[str, Any]
    machine: Mapping[str, Any]
    errors: Sequence[str]

    @property
    def in_order(self) -> list[tuple[Candidate, int, dict[str, float]]]:
        """Candidates by step: candidate, step, what training said (see `METRICS`, and `moment`)."""
        found = {candidate.name: candidate for candidate in self.choice.ranked}
        return [
            (found[checkpoint.name], checkpoint.step, self.run.at(checkpoint.step, METRICS))
            for checkpoint in self.run.checkpoints
            if checkpoint.name in found
        ]

    def as_dict(self) -> dict[str, Any]:
        """The JSON object."""
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
        """By step; the pick is marked."""
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


# A training run's folder, as selection reads it: its recipe, its metrics, its checkpoints.


Record = dict[str, Any]


@dataclass(frozen=True)
class RunCheckpoint:
    """A servable drafter directory, and how far training was when it was written."""

    name: str
    path: Path
    step: int


@dataclass(frozen=True)
class TrainingRun:
    """The folder that `eyas train` writes."""

    path: Path

    @cached_property
    def checkpoints(self) -> list[RunCheckpoint]:
        """By step; a directory without config.json, which is written last, is not finished and left out."""
        found = [
            RunCheckpoint(place.name, place, int(place.name.removeprefix("step-")))
            for place in (self.path / "checkpoints").glob("step-*")
            if place.name.removeprefix("step-").isdecimal() and (place / "config.json").is_file()
        ]
        if not found:
            raise DataError(
                f"{self.path} has no checkpoints: a run of `eyas train` keeps them in {self.path / 'checkpoints'}, "
                "one directory step-N each"
            )
        return sorted(found, key=lambda checkpoint: checkpoint.step)

    @cached_property
    def records(self) -> list[Record]:
        """metrics.jsonl; a last line that a kill cut short is left out. Empty if there is no such file."""
        path = self.path / "metrics.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        records = []
        for number, line in enumerate(lines, start=1):
            try:
                record = json.loads(line)
                records.append({**record, "step": int(record["step"])})
            except (ValueError, TypeError, KeyError) as error:
                if number < len(lines):
                    raise DataError(f"{path}:{number} is no metrics record (an object with a step)") from error
        return records

    @cached_property
    def recipe(self) -> dict[str, Any]:
        """The drafter section of config.yaml, the recipe of the run; empty if it is not there."""
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
        """Training seconds (or steps, if records carry no seconds) and values of every record that has `metric`."""
        found = [(self.moment(record), record[metric]) for record in self.records if metric in record]
        return [moment for moment, _ in found], [value for _, value in found]

    @property
    def timed(self) -> bool:
        """Do the records say when they were written?"""
        return bool(self.records) and all("seconds" in record for record in self.records)

    def moment(self, record: Record) -> float:
        """A record's place on the run's axis."""
        return float(record["seconds"] if self.timed else record["step"])

    def at(self, step: int, metrics: Sequence[str]) -> dict[str, float]:
        """The latest values of `metrics` not after `step`, and the run's `moment` there."""
        found: dict[str, float] = {}
        for record in self.records:
            if record["step"] <= step:
                found |= {name: record[name] for name in metrics if name in record}
                found["moment"] = self.moment(record)
        return found
