"""Which checkpoint of a run to serve: real decoding beside what training said at the time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from eyas.bench.choice import Choice
from eyas.bench.score import Candidate
from eyas.bench.training_run import TrainingRun

METRICS = ("loss", "validation_loss", "validation_accept_length", "decoded_accept_length")
"""What a run's log says of a step: training and validation loss; accept length, simulated and decoded."""


@dataclass(frozen=True)
class CheckpointReport:
    """Everything about the choice."""

    run: TrainingRun
    choice: Choice
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
