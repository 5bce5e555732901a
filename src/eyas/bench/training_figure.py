"""How training went: loss, how often a step's best guess was right, accept length."""

from __future__ import annotations

from typing import Any

from eyas.bench.plots import BLUE, COLOURS, GREEN, GREY, ORANGE, canvas, label, seconds_axis, svg
from eyas.bench.training_run import TrainingRun


def training_figure(run: TrainingRun) -> bytes:
    """An SVG of what the run's log says."""
    ends = [run.moment(record) for record in run.records]
    unit, name = seconds_axis(ends) if run.timed else (1.0, "")
    across = f"training time ({name})" if run.timed else "step"
    steps = sorted({key for record in run.records for key in record if key.startswith("validation_accuracy_")})
    with canvas(1, 3, 10.5, 3.2) as (figure, grid):
        loss, accuracy, length = grid[0]

        curve(loss, run, "loss", unit, GREY, "training", marker="")
        curve(loss, run, "validation_loss", unit, BLUE, "validation")
        for number, metric in enumerate(steps):
            curve(accuracy, run, metric, unit, COLOURS[number % len(COLOURS)], f"step {metric.rpartition('_')[2]}")
        curve(length, run, "validation_accept_length", unit, ORANGE, "simulated")
        curve(length, run, "decoded_accept_length", unit, GREEN, "decoded")
        label(loss, across, "loss")
        label(accuracy, across, "best guess right (share, validation)")
        label(length, across, "accept length (tokens a pass)")
        for axes in grid[0]:
            if axes.get_legend_handles_labels()[0]:
                axes.legend(fontsize=7)
        return svg(figure)


def curve(axes: Any, run: TrainingRun, metric: str, unit: float, colour: str, name: str, marker: str = ".") -> None:
    """A metric of the log over the run's axis, if the log has it; `unit` is what its seconds are divided by."""
    moments, values = run.curve(metric)
    if values:
        axes.plot([moment / unit for moment in moments], values, color=colour, marker=marker, label=name)
