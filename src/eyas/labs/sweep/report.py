"""The results of a sweep as JSON, as a table for the terminal, as plots, and as a section of an HTML report.

Plots and section are made from the JSON alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

from rich.table import Table

from eyas.bench.offline.candidates import Selection
from eyas.bench.report.figures import BLUE, GRAY, RED, canvas, label, svg
from eyas.bench.report.page import Block, DataTable, Image, Section, Text
from eyas.labs.sweep.sweep import Sweep, SweepResult
from eyas.labs.sweep.trial import format_value, short_key

_LENGTH = "accept length (tokens per pass)"


def report_dict(sweep: Sweep, choice: Selection | None, machine: Mapping[str, Any]) -> dict[str, Any]:
    """The content of `results.json`: trials in order of rank, then the failed ones."""
    return {
        "config": sweep.config.model_dump(mode="json"),
        "machine": dict(machine),
        "choice": None if choice is None else {"pick": choice.best.name, "reason": choice.reason},
        "trials": [_row(result) for result in (*sweep.ranked, *sweep.failed)],
    }


def _row(result: SweepResult) -> dict[str, Any]:
    trial, timed = result.trial, result.timed
    return {
        "trial": trial.name,
        "values": trial.values,
        "accept_length": None if result.failure else round(result.accept_length, 4),
        "tasks": {name: round(length, 4) for name, length in result.accept_lengths.items()},
        "tokens_per_second": None if timed is None else round(timed.mean("tokens_per_second"), 2),
        "speedup": None if timed is None else round(timed.mean("speedup"), 4),
        "seconds": trial.seconds,
        **({} if result.until is None else {"stopped_at": result.until}),
        "drafter": None if result.failure else str(trial.drafter),
        "failure": result.failure,
    }


def table_of(sweep: Sweep) -> Table:
    """A table of all trials, best first, failed trials last."""
    knobs = list(sweep.config.knobs)
    table = Table("", "trial", *map(short_key, knobs), title=f"Sweep over {sweep.config.recipe}")
    for header in ("accept length", "tokens/s", "speedup", "trained s"):
        table.add_column(header, justify="right")
    for rank, result in enumerate(sweep.ranked, start=1):
        timed = result.timed
        table.add_row(
            str(rank),
            result.trial.name,
            *(format_value(result.trial.values[knob]) for knob in knobs),
            f"{result.accept_length:.3f}" + ("" if result.until is None else f" at step {result.until}"),
            "" if timed is None else f"{timed.mean('tokens_per_second'):.1f}",
            "" if timed is None else f"{timed.mean('speedup'):.2f}x",
            "" if result.trial.seconds is None else f"{result.trial.seconds:.0f}",
        )
    for result in sweep.failed:
        table.add_row("", result.trial.name, *(format_value(result.trial.values[knob]) for knob in knobs), "failed")
    return table


def knob_figure(report: Mapping[str, Any]) -> bytes:
    """An SVG of accept length against each knob, one panel per knob; a line joins the best trials of each value."""
    rows = [row for row in report["trials"] if row["failure"] is None]
    knobs = list(report["config"]["knobs"])
    columns = min(3, len(knobs))
    lines = ceil(len(knobs) / columns)
    with canvas(lines, columns, 0.6 + 3.2 * columns, 0.4 + 2.8 * lines, sharey=True) as (figure, grid):
        panels = [axes for line in grid for axes in line]
        for axes, knob in zip(panels, knobs, strict=False):
            _knob(axes, [row["values"][knob] for row in rows], [row["accept_length"] for row in rows])
            label(axes, short_key(knob), _LENGTH if axes in [line[0] for line in grid] else "")
        for axes in panels[len(knobs) :]:
            axes.set_visible(False)
        return svg(figure)


def _knob(axes: Any, values: Sequence[Any], lengths: Sequence[float]) -> None:
    numeric = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
    if numeric:
        positions: list[float] = [float(value) for value in values]
        if positions and min(positions) > 0 and max(positions) >= 8 * min(positions):
            axes.set_xscale("log")
    else:
        names = sorted({format_value(value) for value in values})
        positions = [float(names.index(format_value(value))) for value in values]
        axes.set_xticks(range(len(names)), names)
    axes.plot(positions, lengths, linestyle="", marker="o", color=BLUE, alpha=0.7)
    best = {x: max(y for at, y in zip(positions, lengths, strict=True) if at == x) for x in positions}
    if len(best) < len(positions):  # some value has several trials, unlike in a search over a range
        axes.plot(sorted(best), [best[x] for x in sorted(best)], color=RED, linewidth=1)


def trade_figure(report: Mapping[str, Any]) -> bytes:
    """An SVG of accept length against tokens/s; a line joins the trials on the Pareto front."""
    rows = [row for row in report["trials"] if row["tokens_per_second"] is not None]
    with canvas(1, 1, 5.5, 4.0) as (figure, grid):
        axes = grid[0][0]
        points = [(row["tokens_per_second"], row["accept_length"]) for row in rows]
        for row, point in zip(rows, points, strict=True):
            axes.plot(*point, marker="o", color=BLUE)
            axes.annotate(row["trial"], point, textcoords="offset points", xytext=(4, 4), fontsize=6, color=GRAY)
        front = sorted(pareto_front(points))
        axes.plot([x for x, _ in front], [y for _, y in front], color=RED, linewidth=1, label="Pareto front")
        label(axes, "tokens/s", _LENGTH)
        if len(points) > 1:
            axes.legend(fontsize=7)
        return svg(figure)


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other point dominates, that is, equals or exceeds in both coordinates."""
    return [
        (x, y) for x, y in points if not any(other != (x, y) and other[0] >= x and other[1] >= y for other in points)
    ]


def sweep_section(report: Mapping[str, Any]) -> Section:
    """The section of an HTML report for a sweep, whose `results.json` is `report`."""
    knobs = list(report["config"]["knobs"])
    rows = [
        (
            row["trial"],
            *(format_value(row["values"][knob]) for knob in knobs),
            "failed" if row["accept_length"] is None else f"{row['accept_length']:.3f}",
            "" if row["tokens_per_second"] is None else f"{row['tokens_per_second']:.1f}",
            "" if row["seconds"] is None else f"{row['seconds']:.0f}",
        )
        for row in report["trials"]
    ]
    blocks: list[Block] = []
    if report["choice"] is not None:
        blocks = [
            Text(f"Best: {report['choice']['reason']}"),
            Image(knob_figure(report), "Accept length against each knob."),
            Image(trade_figure(report), "Accept length against tokens/s."),
        ]
    headers = ("trial", *map(short_key, knobs), "accept length", "tokens/s", "trained s")
    return Section("Sweep", [*blocks, DataTable(headers, rows)])
