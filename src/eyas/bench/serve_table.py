"""The table of a serving benchmark, for a terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

from rich.table import Table

from eyas.bench.serve_report import Line, ServeReport

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


def row_of(line: Line, baseline: str) -> tuple[str, ...]:
    """One line's cells; what means nothing is left empty."""
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
    """For people at a terminal."""
    table = Table(title=title)
    for number, name in enumerate(COLUMNS):
        table.add_column(name, justify="left" if number < 2 else "right")
    for line in report.lines:
        table.add_row(*row_of(line, report.baseline))
    return table


def markdown_of(report: ServeReport) -> str:
    """For a page."""
    rows = [COLUMNS, ("---",) * len(COLUMNS), *(row_of(line, report.baseline) for line in report.lines)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _spread(values: Mapping[str, float]) -> str:
    return " / ".join(f"{value:.0f}" if value >= 100 else f"{value:.1f}" for value in values.values())
