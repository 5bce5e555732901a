"""Figures of a serving benchmark as a table, Markdown and JSON. Every figure is defined here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
from rich.table import Table

from eyas.bench.serving.client import Load, LoadRun, TimedAnswer
from eyas.bench.serving.run import Results
from eyas.bench.serving.servers import SpeculationCounts

QUANTILES = {"p50": 50, "p90": 90, "p99": 99}
ACCEPT_LENGTH = (
    "accept length: tokens per target pass, 1 + accepted / passes (from `usage.eyas` or llama.cpp's `timings`; else "
    "1 + accepted / drafts of the server's counters, or SGLang's own latest mean). Where the first token comes from "
    "prefill, that isn't counted as a pass."
)
DEFINITIONS = (
    "tokens/s: output tokens of all answers (as the server's `usage` counts them) / wall time from the first request "
    "to the end of the last answer, prefill included; median over repeats.",
    "ratio: tokens/s of the side / tokens/s of the baseline in the same repeat (open loop: the baseline's mean time "
    "per answer / the side's); median over repeats. least: the smallest of all repeats.",
    "TTFT: request sent to first text. TPOT: (end - first text) / (tokens - 1) of an answer. e2e: request sent to end "
    "of stream. Quantiles over the answers of all repeats, milliseconds.",
    ACCEPT_LENGTH,
    "same: answers whose text equals the baseline's, of those that both gave.",
)


COLUMNS = (
    "load",
    "side",
    "tokens/s",
    "ratio",
    "least",
    "TTFT p50/p90/p99",
    "TPOT p50/p90/p99",
    "e2e p50/p90/p99",
    "accept length",
    "same",
    "errors",
)


@dataclass(frozen=True)
class LoadLine:
    """The figures of one side under one load: a line of the table."""

    load: Load
    side: str
    tokens_per_second: list[float]
    """Output tokens per second, repeat by repeat."""
    ratios: list[float]
    """To the baseline, repeat by repeat."""
    ttft: dict[str, float]
    """Time to first text: quantile -> milliseconds."""
    tpot: dict[str, float]
    """Time per token after the first: quantile -> milliseconds."""
    e2e: dict[str, float]
    """Time of a whole answer: quantile -> milliseconds."""
    accept_length: float | None
    requests_per_second: float
    answers: int
    errors: dict[str, int]
    same: int
    compared: int

    def as_dict(self) -> dict[str, Any]:
        """The JSON form, with medians and the least ratio."""
        return {
            "load": {"kind": self.load.kind, "level": self.load.level},
            "side": self.side,
            "tokens_per_second": [round(x, 3) for x in self.tokens_per_second],
            "tokens_per_second_median": round(median(self.tokens_per_second), 3),
            "ratios": [round(x, 4) for x in self.ratios],
            "ratio_median": round(median(self.ratios), 4),
            "ratio_least": round(min(self.ratios), 4),
            "ttft_ms": self.ttft,
            "tpot_ms": self.tpot,
            "e2e_ms": self.e2e,
            "accept_length": None if self.accept_length is None else round(self.accept_length, 4),
            "requests_per_second": round(self.requests_per_second, 4),
            "answers": self.answers,
            "errors": self.errors,
            "same": self.same,
            "compared": self.compared,
        }


@dataclass(frozen=True)
class ServeReport:
    """The figures of all sides under all loads, and what they were measured with."""

    baseline: str
    lines: list[LoadLine]
    settings: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    idle: Mapping[str, float] = field(default_factory=dict)
    """Server started here -> share of a core that it used while another side was measured."""

    @property
    def sides(self) -> list[str]:
        """Names of the sides, in the order they were given."""
        return list(dict.fromkeys(line.side for line in self.lines))

    def of(self, side: str) -> list[LoadLine]:
        """The lines of a side, load by load."""
        return [line for line in self.lines if line.side == side]

    def crossover(self, side: str) -> Load | None:
        """The lowest load from which a side stays slower than the baseline; None if it isn't slower at the highest."""
        crossed = None
        for line in reversed(self.of(side)):
            if median(line.ratios) >= 1.0:
                break
            crossed = line.load
        return crossed

    def verdicts(self) -> list[str]:
        """A sentence for each side but the baseline: where it is slower."""
        sentences = []
        for side in self.sides:
            if side == self.baseline:
                continue
            crossed = self.crossover(side)
            lines = self.of(side)
            if crossed is not None:
                sentences.append(f"{side} is slower than {self.baseline} from {crossed} on")
                continue
            slower = [str(line.load) for line in lines if median(line.ratios) < 1.0]
            where = f", but slower at {', '.join(slower)}" if slower else ""
            sentences.append(f"no crossover: {side} is not slower than {self.baseline} at {lines[-1].load}{where}")
        return sentences

    def errors(self) -> list[str]:
        """Every error of every side and load, with how often it occurred."""
        return [
            f"{line.side}, {line.load}: {count} times {error}"
            for line in self.lines
            for error, count in line.errors.items()
        ]

    def as_dict(self) -> dict[str, Any]:
        """The JSON form, with the crossover of every side."""
        crossed = {side: self.crossover(side) for side in self.sides if side != self.baseline}
        return {
            "machine": dict(self.machine),
            "settings": dict(self.settings),
            "baseline": self.baseline,
            "lines": [line.as_dict() for line in self.lines],
            "crossover": {side: None if load is None else load.level for side, load in crossed.items()},
            "idle_processor_share": dict(self.idle),
        }


def lines_of(results: Results, baseline: str) -> list[LoadLine]:
    """The figures of every side under every load."""
    return [
        _line(load, side, runs, of_load[baseline])
        for load, of_load in results.items()
        for side, runs in of_load.items()
    ]


def _line(load: Load, side: str, runs: Sequence[LoadRun], base: Sequence[LoadRun]) -> LoadLine:
    good = [answer for run in runs for answer in run.answers if answer.error is None]
    pairs = [
        (mine, theirs)
        for run, other in zip(runs, base, strict=True)
        for mine, theirs in zip(run.answers, other.answers, strict=True)
        if mine.error is None and theirs.error is None
    ]
    return LoadLine(
        load,
        side,
        [throughput(run) for run in runs],
        [_ratio(load, run, other) for run, other in zip(runs, base, strict=True)],
        quantiles([answer.first_seconds for answer in good]),
        quantiles([answer.seconds_per_token for answer in good]),
        quantiles([answer.seconds for answer in good]),
        accept_length(runs),
        len(good) / sum(run.seconds for run in runs),
        len(good),
        dict(Counter(answer.error for run in runs for answer in run.answers if answer.error is not None)),
        sum(mine.text == theirs.text for mine, theirs in pairs),
        len(pairs),
    )


def throughput(run: LoadRun) -> float:
    """Output tokens of all answers per second."""
    return sum(answer.tokens for answer in run.answers) / run.seconds


def quantiles(seconds: Sequence[float | None]) -> dict[str, float]:
    """Quantile -> milliseconds over the values that aren't None; empty if there is none."""
    known = [1e3 * value for value in seconds if value is not None]
    return {name: round(float(np.percentile(known, q)), 3) for name, q in QUANTILES.items()} if known else {}


def accept_length(runs: Sequence[LoadRun]) -> float | None:
    """1 + accepted / target passes, from the answers or else the server's counters; None without either."""
    counted = [answer for run in runs for answer in run.answers if answer.passes]
    if counted:
        return 1.0 + sum(answer.accepted for answer in counted) / sum(answer.passes for answer in counted)
    return sum((run.counted for run in runs), SpeculationCounts()).accept_length


def _ratio(load: Load, run: LoadRun, base: LoadRun) -> float:
    """How much faster a side is than the baseline; 0 if one of the two gave no answer."""
    if load.kind == "closed":
        return throughput(run) / throughput(base) if throughput(base) else 0.0
    mine = _mean_seconds(run.answers)
    theirs = _mean_seconds(base.answers)
    return theirs / mine if mine else 0.0


def _mean_seconds(answers: Sequence[TimedAnswer]) -> float:
    good = [answer.seconds for answer in answers if answer.error is None]
    return sum(good) / len(good) if good else 0.0


def row_of(line: LoadLine, baseline: str) -> tuple[str, ...]:
    """The cells of a line, by `COLUMNS`; empty where a figure has no meaning."""
    other = line.side != baseline
    return (
        str(line.load),
        line.side,
        f"{median(line.tokens_per_second):.1f}",
        f"{median(line.ratios):.2f}x" if other else "1.00x",
        f"{min(line.ratios):.2f}x" if other else "",
        _spread(line.ttft),
        _spread(line.tpot),
        _spread(line.e2e),
        "" if line.accept_length is None else f"{line.accept_length:.2f}",
        f"{line.same}/{line.compared}" if other else "",
        str(sum(line.errors.values()) or ""),
    )


def table_of(report: ServeReport, title: str) -> Table:
    """The table of all lines for a terminal."""
    table = Table(title=title)
    for number, name in enumerate(COLUMNS):
        table.add_column(name, justify="left" if number < 2 else "right")
    for line in report.lines:
        table.add_row(*row_of(line, report.baseline))
    return table


def markdown_of(report: ServeReport) -> str:
    """The table as Markdown, for a page."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *(row_of(line, report.baseline) for line in report.lines)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _spread(values: Mapping[str, float]) -> str:
    return " / ".join(f"{value:.0f}" if value >= 100 else f"{value:.1f}" for value in values.values())
