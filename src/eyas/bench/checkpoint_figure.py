"""Training and real decoding on one time axis: where the first still improves and the second doesn't, it over-fits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyas.bench.plots import BLUE, COLOURS, GREEN, GREY, ORANGE, RED, canvas, label, seconds_axis, svg
from eyas.bench.training_figure import curve
from eyas.bench.training_run import TrainingRun


def checkpoint_figure(run: TrainingRun, report: Mapping[str, Any]) -> bytes:
    """An SVG: loss, accept length, speedup. `report` is `CheckpointReport.as_dict()`."""
    measured = {candidate["name"]: candidate for candidate in report["ranked"]}
    rows = [(row, measured[row["name"]]) for row in report["checkpoints"]]
    places = [row["training"].get("moment", 0.0) if run.timed else row["step"] for row, _ in rows]
    unit, axis = seconds_axis(places) if run.timed else (1.0, "")
    x = [place / unit for place in places]
    tasks = list(report["ranked"][0]["tasks"])
    with canvas(3, 1, 7.0, 7.5, sharex=True) as (figure, grid):
        loss, length, speed = (line[0] for line in grid)
        curve(loss, run, "loss", unit, GREY, "training", marker="")
        curve(loss, run, "validation_loss", unit, BLUE, "validation")
        label(loss, "", "loss", "What training says")
        curve(length, run, "validation_accept_length", unit, ORANGE, "simulated on validation")
        curve(length, run, "decoded_accept_length", unit, GREEN, "decoded on validation chats")
        for axes, figures in ((length, "accept_length"), (speed, "speedup")):
            for number, task in enumerate(tasks):
                values = [candidate["tasks"][task][figures] for _, candidate in rows]
                colour = COLOURS[number % len(COLOURS)]
                axes.plot(x, values, color=colour, alpha=0.6, linewidth=1, linestyle="--", label=task)
            means = [candidate["mean"][figures] for _, candidate in rows]
            axes.plot(x, means, color=RED, linewidth=2.2, marker="o", label="mean over tasks")
        label(length, "", "accept length (tokens a pass)", "What decoding gives")
        label(speed, f"training time ({axis})" if run.timed else "step", "speedup (x plain decoding)")
        speed.axhline(1.0, color=GREY, linewidth=0.8)
        pick = next(place for place, (row, _) in zip(x, rows, strict=True) if row["name"] == report["pick"])
        for axes in (loss, length, speed):
            axes.axvline(pick, color=GREY, linestyle=":", label=f"pick: {report['pick']}")
            axes.legend(fontsize=7)
        return svg(figure)
