"""Figures of measurements, as a table for a terminal and as JSON. Every figure is defined here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from rich.table import Table

from eyas.bench.offline.runner import PLAIN, MethodResult
from eyas.types import CONTEXT_BUCKETS

DEFINITIONS = (
    "tokens/s: emitted tokens / wall time of decoding; prefill is timed apart. A group of prompts counts with its "
    "median run.",
    "speedup: tokens/s of the method / tokens/s of `none`, plain decoding by the same code and counter.",
    "accept length: tokens per target pass, the bonus token counted (1 + accepted / passes), pooled over rows.",
    "by context: accept length of rounds by the tokens before them (k = 1,024); shown where there are several.",
    "efficiency: speedup / accept length; 1 = verifying and drafting cost nothing.",
    "by position: share of the passes offering a draft token at that depth in which it was accepted.",
    "identical: answers whose every token is plain decoding's, in every repeat.",
    "mean: arithmetic mean of the files' figures.",
)


MEAN = "mean"
"""The task of lines that are means over files."""
MOST_EFFICIENT = 1.05
"""Speedup / accept length beyond which a figure can't be true: a pass that verifies costs at least a plain one."""


def impossible(name: str, speedup: float | None, accept_length: float | None) -> str | None:
    """A sentence about a speedup that can't be true; None if it can."""
    if not speedup or not accept_length or speedup / accept_length <= MOST_EFFICIENT:
        return None
    return (
        f"impossible: {name}, {speedup:.2f}x at accept length {accept_length:.2f}: no pass yields more tokens than its "
        "accept length, so something else slowed plain decoding down. Measure again, with more --repeats"
    )


@dataclass(frozen=True)
class MethodLine:
    """The figures of one method on one file, or their mean over files: a line of the table."""

    task: str
    method: str
    tokens_per_second: float
    speedup: float | None
    """tokens/s over those of the baseline; None without one."""
    accept_length: float | None
    """Tokens per target pass; None if the server doesn't report it."""
    prefill_seconds: float | None
    by_position: list[float]
    same: int
    answers: int
    ttft_ms: float | None = None
    """Median time to the first text, of methods timed as a client sees them."""
    tpot_ms: float | None = None
    """Median time per token after the first, of the same."""
    by_context: Mapping[str, float] = field(default_factory=dict)
    """Accept length by range of context, of the ranges that had rounds."""
    against_plain: bool = True
    """Whether the baseline is another method, and decodes plainly."""

    @property
    def efficiency(self) -> float | None:
        """Speedup / accept length; None without a plain baseline or without one of the two."""
        if self.method == PLAIN or not self.against_plain or self.speedup is None:
            return None
        return self.speedup / self.accept_length if self.accept_length else None

    @property
    def impossible(self) -> str | None:
        """A sentence about a speedup that can't be true; None if it can, and for means."""
        if self.efficiency is None or self.task == MEAN:
            return None
        return impossible(f"{self.method} on {self.task}", self.speedup, self.accept_length)


def lines_of(task: str, results: Mapping[str, MethodResult]) -> list[MethodLine]:
    """The figures of every method on one file."""
    base = results[PLAIN].stats.tokens_per_second
    return [
        MethodLine(
            task,
            method,
            measured.stats.tokens_per_second,
            measured.stats.tokens_per_second / base if base else 0.0,
            measured.stats.accept_length,
            measured.stats.prefill_seconds,
            measured.stats.accepted_by_position,
            measured.same,
            measured.answers,
            by_context=measured.stats.accept_length_by_context,
        )
        for method, measured in results.items()
    ]


def means(lines: Sequence[MethodLine]) -> list[MethodLine]:
    """The mean of every method over all files; empty if there is one file only."""
    if len({line.task for line in lines}) < 2:
        return []
    made = []
    for method in dict.fromkeys(line.method for line in lines):
        mine = [line for line in lines if line.method == method]
        depth = min(len(line.by_position) for line in mine)
        ranges = [name for name in CONTEXT_BUCKETS if all(name in line.by_context for line in mine)]
        made.append(
            MethodLine(
                MEAN,
                method,
                fmean(line.tokens_per_second for line in mine),
                _mean([line.speedup for line in mine]),
                _mean([line.accept_length for line in mine]),
                _mean([line.prefill_seconds for line in mine]),
                [fmean(line.by_position[i] for line in mine) for i in range(depth)],
                sum(line.same for line in mine),
                sum(line.answers for line in mine),
                _mean([line.ttft_ms for line in mine]),
                _mean([line.tpot_ms for line in mine]),
                {name: fmean(line.by_context[name] for line in mine) for name in ranges},
                all(line.against_plain for line in mine),
            )
        )
    return made


def _mean(values: Sequence[float | None]) -> float | None:
    """Arithmetic mean; None if a value is missing."""
    known = [value for value in values if value is not None]
    return fmean(known) if len(known) == len(values) else None


def table_of(lines: Sequence[MethodLine], title: str) -> Table:
    """The table for a terminal; with TTFT and TPOT in place of prefill if any method has them."""
    as_client = any(line.ttft_ms is not None for line in lines)
    times = ("TTFT ms", "TPOT ms") if as_client else ("prefill s",)
    by_context = any(len(line.by_context) > 1 for line in lines)
    table = Table("file", "method", title=title)
    for name in ("tokens/s", "speedup", "accept length", "efficiency", *times):
        table.add_column(name, justify="right")
    table.add_column("by position")
    if by_context:
        table.add_column("by context")
    table.add_column("identical", justify="right")
    for line in lines:
        table.add_row(
            line.task,
            line.method,
            f"{line.tokens_per_second:.1f}",
            _cell(line.speedup, "{:.2f}x"),
            _cell(line.accept_length, "{:.2f}"),
            efficiency_cell(line),
            *(
                (_cell(line.ttft_ms, "{:.1f}"), _cell(line.tpot_ms, "{:.1f}"))
                if as_client
                else (_cell(line.prefill_seconds, "{:.2f}"),)
            ),
            " ".join(f"{rate:.2f}" for rate in line.by_position),
            *([" ".join(f"{name}: {one:.2f}" for name, one in line.by_context.items())] if by_context else []),
            f"{line.same}/{line.answers}" if line.answers else "",
        )
    return table


def _cell(value: float | None, form: str) -> str:
    """The formatted value; empty for None."""
    return "" if value is None else form.format(value)


def efficiency_cell(line: MethodLine) -> str:
    """The efficiency, with a question mark if it can't be true."""
    return _cell(line.efficiency, "{:.2f}" if line.impossible is None else "{:.2f} ?")


def line_dict(line: MethodLine) -> dict[str, Any]:
    """The JSON form, rounded to four digits."""
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in vars(line).items()}
    del rounded["against_plain"]
    rounded["by_context"] = {name: round(length, 4) for name, length in line.by_context.items()}
    rounded["by_position"] = [round(rate, 4) for rate in line.by_position]
    rounded["efficiency"] = None if line.efficiency is None else round(line.efficiency, 4)
    return rounded


def report_dict(
    machine: Mapping[str, Any],
    settings: Mapping[str, Any],
    results: Mapping[str, Mapping[str, MethodResult]],
    errors: Sequence[str],
) -> dict[str, Any]:
    """The JSON form of a measurement: figures, and the counts they came from."""
    lines = [line for task, measured in results.items() for line in lines_of(task, measured)]
    counts = {
        task: {method: one.stats.as_dict() for method, one in measured.items()} for task, measured in results.items()
    }
    return document(machine, settings, DEFINITIONS, lines, counts, errors)


def document(
    machine: Mapping[str, Any],
    settings: Mapping[str, Any],
    definitions: Sequence[str],
    lines: Sequence[MethodLine],
    counts: Mapping[str, Any],
    errors: Sequence[str],
) -> dict[str, Any]:
    """The JSON form of a report, however its lines were measured; `counts` by task and method."""
    return {
        "machine": dict(machine),
        "settings": dict(settings),
        "definitions": list(definitions),
        "lines": [line_dict(line) for line in (*lines, *means(lines))],
        "stats": dict(counts),
        "errors": list(errors),
    }
