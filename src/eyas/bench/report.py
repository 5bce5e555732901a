"""Figures from measurements: the table a person reads and the JSON a machine keeps. Every figure is defined here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from rich.table import Table

from eyas.bench.runner import PLAIN, Measured

DEFINITIONS = (
    "tokens/s: emitted tokens / wall time of decoding; prefill is timed apart. A group of prompts counts with its "
    "median run.",
    "speedup: tokens/s of the method / tokens/s of `none`, plain decoding by the same code and counter.",
    "accept length: tokens per target pass, the bonus token counted (1 + accepted / passes), pooled over rows.",
    "efficiency: speedup / accept length; 1 = verifying and drafting cost nothing.",
    "by position: share of the passes offering a draft token at that depth in which it was accepted.",
    "identical: answers whose every token is plain decoding's, in every repeat.",
    "mean: arithmetic mean of the files' figures.",
)


@dataclass(frozen=True)
class Line:
    """One method on one file, or the mean over files."""

    task: str
    method: str
    tokens_per_second: float
    speedup: float
    accept_length: float
    prefill_seconds: float
    by_position: list[float]
    same: int
    answers: int

    @property
    def efficiency(self) -> float | None:
        """None for plain decoding, where it would say nothing."""
        return None if self.method == PLAIN or not self.accept_length else self.speedup / self.accept_length


def lines_of(task: str, results: Mapping[str, Measured]) -> list[Line]:
    """The lines of one file."""
    base = results[PLAIN].stats.tokens_per_second
    return [
        Line(
            task,
            method,
            measured.stats.tokens_per_second,
            measured.stats.tokens_per_second / base if base else 0.0,
            measured.stats.accept_length,
            measured.stats.prefill_seconds,
            measured.stats.accepted_by_position,
            measured.same,
            measured.answers,
        )
        for method, measured in results.items()
    ]


def means(lines: Sequence[Line]) -> list[Line]:
    """One line a method, over all files; none if there is one file only."""
    if len({line.task for line in lines}) < 2:
        return []
    made = []
    for method in dict.fromkeys(line.method for line in lines):
        mine = [line for line in lines if line.method == method]
        depth = min(len(line.by_position) for line in mine)
        made.append(
            Line(
                "mean",
                method,
                fmean(line.tokens_per_second for line in mine),
                fmean(line.speedup for line in mine),
                fmean(line.accept_length for line in mine),
                fmean(line.prefill_seconds for line in mine),
                [fmean(line.by_position[i] for line in mine) for i in range(depth)],
                sum(line.same for line in mine),
                sum(line.answers for line in mine),
            )
        )
    return made


def table_of(lines: Sequence[Line], title: str) -> Table:
    """The table for people."""
    numbers = ("tokens/s", "speedup", "accept length", "efficiency", "prefill s")
    table = Table("file", "method", title=title)
    for name in numbers:
        table.add_column(name, justify="right")
    table.add_column("by position")
    table.add_column("identical", justify="right")
    for line in lines:
        efficiency = line.efficiency
        table.add_row(
            line.task,
            line.method,
            f"{line.tokens_per_second:.1f}",
            f"{line.speedup:.2f}x",
            f"{line.accept_length:.2f}",
            "" if efficiency is None else f"{efficiency:.2f}",
            f"{line.prefill_seconds:.2f}",
            " ".join(f"{rate:.2f}" for rate in line.by_position),
            f"{line.same}/{line.answers}",
        )
    return table


def line_dict(line: Line) -> dict[str, Any]:
    """A line for JSON."""
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in vars(line).items()}
    rounded["by_position"] = [round(rate, 4) for rate in line.by_position]
    rounded["efficiency"] = None if line.efficiency is None else round(line.efficiency, 4)
    return rounded


def report_dict(
    machine: Mapping[str, Any],
    settings: Mapping[str, Any],
    results: Mapping[str, Mapping[str, Measured]],
    errors: Sequence[str],
) -> dict[str, Any]:
    """The whole measurement for JSON: figures, and the counts they came from."""
    lines = [line for task, measured in results.items() for line in lines_of(task, measured)]
    counts = {
        task: {method: one.stats.as_dict() for method, one in measured.items()} for task, measured in results.items()
    }
    return {
        "machine": dict(machine),
        "settings": dict(settings),
        "definitions": list(DEFINITIONS),
        "lines": [line_dict(line) for line in (*lines, *means(lines))],
        "stats": counts,
        "errors": list(errors),
    }
