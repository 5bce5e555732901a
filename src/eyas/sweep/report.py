"""What a sweep found: ranked table and JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

from rich.table import Table

from eyas.bench.offline.candidates import Selection
from eyas.bench.report.page import Block, DataTable, Image, Section, Text
from eyas.bench.report.plots import BLUE, GREY, RED, canvas, label, svg
from eyas.sweep.sweep import Sweep, SweepResult
from eyas.sweep.trial import short, shown


def report_dict(sweep: Sweep, choice: Selection | None, machine: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON object; trials in order of rank, then the failed ones."""
    return {
        "config": sweep.config.model_dump(mode="json"),
        "machine": dict(machine),
        "choice": None if choice is None else {"pick": choice.best.name, "reason": choice.reason},
        "trials": [_row(outcome) for outcome in (*sweep.ranked, *sweep.failed)],
    }


def _row(outcome: SweepResult) -> dict[str, Any]:
    trial, timed = outcome.trial, outcome.timed
    return {
        "trial": trial.name,
        "values": trial.values,
        "accept_length": None if outcome.failure else round(outcome.accept_length, 4),
        "tasks": {name: round(length, 4) for name, length in outcome.accept_lengths.items()},
        "tokens_per_second": None if timed is None else round(timed.mean("tokens_per_second"), 2),
        "speedup": None if timed is None else round(timed.mean("speedup"), 4),
        "seconds": trial.seconds,
        "drafter": None if outcome.failure else str(trial.drafter),
        "failure": outcome.failure,
    }


def table_of(sweep: Sweep) -> Table:
    """Best first; failed trials at the end."""
    knobs = list(sweep.config.knobs)
    table = Table("", "trial", *map(short, knobs), title=f"Sweep over {sweep.config.recipe}")
    for header in ("accept length", "tokens/s", "speedup", "trained s"):
        table.add_column(header, justify="right")
    for rank, outcome in enumerate(sweep.ranked, start=1):
        timed = outcome.timed
        table.add_row(
            str(rank),
            outcome.trial.name,
            *(shown(outcome.trial.values[knob]) for knob in knobs),
            f"{outcome.accept_length:.3f}",
            "" if timed is None else f"{timed.mean('tokens_per_second'):.1f}",
            "" if timed is None else f"{timed.mean('speedup'):.2f}x",
            "" if outcome.trial.seconds is None else f"{outcome.trial.seconds:.0f}",
        )
    for outcome in sweep.failed:
        table.add_row("", outcome.trial.name, *(shown(outcome.trial.values[knob]) for knob in knobs), "failed")
    return table


# A sweep's plots: accept length against each knob, and against tokens/s. Both are drawn from its JSON.


_LENGTH = "accept length (tokens a pass)"


def knob_figure(report: Mapping[str, Any]) -> bytes:
    """One panel a knob; the line goes through the best of each value."""
    rows = [row for row in report["trials"] if row["failure"] is None]
    knobs = list(report["config"]["knobs"])
    columns = min(3, len(knobs))
    lines = ceil(len(knobs) / columns)
    with canvas(lines, columns, 0.6 + 3.2 * columns, 0.4 + 2.8 * lines, sharey=True) as (figure, grid):
        panels = [axes for line in grid for axes in line]
        for axes, knob in zip(panels, knobs, strict=False):
            _knob(axes, [row["values"][knob] for row in rows], [row["accept_length"] for row in rows])
            label(axes, short(knob), _LENGTH if axes in [line[0] for line in grid] else "")
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
        names = sorted({shown(value) for value in values})
        positions = [float(names.index(shown(value))) for value in values]
        axes.set_xticks(range(len(names)), names)
    axes.plot(positions, lengths, linestyle="", marker="o", color=BLUE, alpha=0.7)
    best = {x: max(y for at, y in zip(positions, lengths, strict=True) if at == x) for x in positions}
    if len(best) < len(positions):  # several trials a value: a search over ranges has one each
        axes.plot(sorted(best), [best[x] for x in sorted(best)], color=RED, linewidth=1)


def trade_figure(report: Mapping[str, Any]) -> bytes:
    """Accept length against tokens/s; what no other trial beats in both is joined."""
    rows = [row for row in report["trials"] if row["tokens_per_second"] is not None]
    with canvas(1, 1, 5.5, 4.0) as (figure, grid):
        axes = grid[0][0]
        points = [(row["tokens_per_second"], row["accept_length"]) for row in rows]
        for row, point in zip(rows, points, strict=True):
            axes.plot(*point, marker="o", color=BLUE)
            axes.annotate(row["trial"], point, textcoords="offset points", xytext=(4, 4), fontsize=6, color=GREY)
        front = sorted(unbeaten(points))
        axes.plot([x for x, _ in front], [y for _, y in front], color=RED, linewidth=1, label="unbeaten in both")
        label(axes, "tokens/s", _LENGTH)
        if len(points) > 1:
            axes.legend(fontsize=7)
        return svg(figure)


def unbeaten(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points than which no other is at least as good in both and better in one."""
    return [
        (x, y) for x, y in points if not any(other != (x, y) and other[0] >= x and other[1] >= y for other in points)
    ]


# A sweep's part of a report.


def sweep_section(report: Mapping[str, Any]) -> Section:
    """`report` is the sweep's results.json."""
    knobs = list(report["config"]["knobs"])
    rows = [
        (
            row["trial"],
            *(shown(row["values"][knob]) for knob in knobs),
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
    headers = ("trial", *map(short, knobs), "accept length", "tokens/s", "trained s")
    return Section("Sweep", [*blocks, DataTable(headers, rows)])
