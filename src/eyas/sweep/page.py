"""A sweep's part of a report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyas.bench.page import Block, Grid, Image, Section, Text
from eyas.sweep.figures import knob_figure, trade_figure
from eyas.sweep.trial import short, shown


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
    return Section("Sweep", [*blocks, Grid(headers, rows)])
