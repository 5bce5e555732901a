"""Figures for reports: a training run, its checkpoints on real tasks, a tree sweep, servers under load.

The palette is Okabe and Ito's, which color-blind readers can tell apart. Text and lines are mid-gray on a transparent
background, legible on light and dark pages. matplotlib is imported only to draw, and needs no display.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.errors import UsageError

if TYPE_CHECKING:
    from eyas.bench.offline.trees import TrainingRun  # imports torch, which check_plot shouldn't wait for

BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
RED = "#D55E00"
PURPLE = "#CC79A7"
SKY = "#56B4E9"
COLORS = (BLUE, RED, GREEN, ORANGE, PURPLE, SKY)
GRAY = "#7f7f7f"
_STYLE: dict[str, Any] = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "text.color": GRAY,
    "axes.labelcolor": GRAY,
    "axes.edgecolor": GRAY,
    "axes.titlecolor": GRAY,
    "xtick.color": GRAY,
    "ytick.color": GRAY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "font.size": 9,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "svg.fonttype": "path",
    "svg.hashsalt": "eyas",  # equal figures give equal files
}


@contextmanager
def canvas(rows: int, columns: int, width: float, height: float, **options: Any) -> Iterator[tuple[Any, Any]]:
    """A styled figure of the given size in inches and its axes [rows][columns]; `options` go to `Figure.subplots`."""
    try:
        import matplotlib as mpl
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("plots need matplotlib: pip install 'eyas[train]'") from None
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure, figure.subplots(rows, columns, squeeze=False, **options)


def label(axes: Any, x: str, y: str, title: str = "") -> None:
    """Label both axes, units included, and draw a faint grid."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if title:
        axes.set_title(title)
    axes.grid(visible=True, color=GRAY, alpha=0.2, linewidth=0.6)


def svg(figure: Any) -> bytes:
    """Render a figure as an SVG document, byte for byte reproducible."""
    import matplotlib as mpl

    out = io.BytesIO()
    with mpl.rc_context(_STYLE):
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def check_plot(path: Path | None) -> None:
    """Raise UsageError for a plot file that can't be written, before anything is measured."""
    if path is not None and path.suffix != ".svg":
        raise UsageError(f"{path}: plots are written as .svg")
    if path is not None and not path.parent.is_dir():
        raise UsageError(f"{path}: there is no directory {path.parent} to write it to; make it first")


def seconds_axis(values: Sequence[float]) -> tuple[float, str]:
    """Pick a unit for a time axis in seconds: its length in seconds, and its name."""
    longest = max(values, default=0.0)
    for seconds, name in ((3600.0, "hours"), (60.0, "minutes")):
        if longest >= 2 * seconds:
            return seconds, name
    return 1.0, "seconds"


ROWS = (("speedup", "speedup (x plain decoding)"), ("accept_length", "accept length (tokens per pass)"))
"""The rows of a tree sweep's figure: name in the report, label."""
_AXIS = {"closed": "concurrent clients", "open": "requests per second"}
"""Kind of load -> label of its axis."""


def training_figure(run: TrainingRun) -> bytes:
    """An SVG of a run's log: loss, accuracy at every draft step, accept length."""
    moments = [run.moment(record) for record in run.records]
    unit, name = seconds_axis(moments) if run.timed else (1.0, "")
    across = f"training time ({name})" if run.timed else "step"
    steps = sorted({key for record in run.records for key in record if key.startswith("validation_accuracy_")})
    with canvas(1, 3, 10.5, 3.2) as (figure, grid):
        loss, accuracy, length = grid[0]

        curve(loss, run, "loss", unit, GRAY, "training", marker="")
        curve(loss, run, "validation_loss", unit, BLUE, "validation")
        for number, metric in enumerate(steps):
            curve(accuracy, run, metric, unit, COLORS[number % len(COLORS)], f"step {metric.rpartition('_')[2]}")
        curve(length, run, "validation_accept_length", unit, ORANGE, "simulated")
        curve(length, run, "decoded_accept_length", unit, GREEN, "decoded")
        label(loss, across, "loss")
        label(accuracy, across, "top-1 accuracy (validation)")
        label(length, across, "accept length (tokens per pass)")
        for axes in grid[0]:
            if axes.get_legend_handles_labels()[0]:
                axes.legend(fontsize=7)
        return svg(figure)


def curve(axes: Any, run: TrainingRun, metric: str, unit: float, color: str, name: str, marker: str = ".") -> None:
    """Plot a metric against time (in `unit` seconds) or steps, if the log has it."""
    moments, values = run.curve(metric)
    if values:
        axes.plot([moment / unit for moment in moments], values, color=color, marker=marker, label=name)


def checkpoint_figure(run: TrainingRun, report: Mapping[str, Any]) -> bytes:
    """An SVG of training and real decoding on one time axis: where only training still improves, the run overfits.

    Draws loss, accept length and speedup. `report` is `CheckpointReport.as_dict()`.
    """
    measured = {candidate["name"]: candidate for candidate in report["ranked"]}
    rows = [(row, measured[row["name"]]) for row in report["checkpoints"]]
    moments = [row["training"].get("moment", 0.0) if run.timed else row["step"] for row, _ in rows]
    unit, axis = seconds_axis(moments) if run.timed else (1.0, "")
    x = [moment / unit for moment in moments]
    tasks = list(report["ranked"][0]["tasks"])
    with canvas(3, 1, 7.0, 7.5, sharex=True) as (figure, grid):
        loss, length, speed = (line[0] for line in grid)
        curve(loss, run, "loss", unit, GRAY, "training", marker="")
        curve(loss, run, "validation_loss", unit, BLUE, "validation")
        label(loss, "", "loss", "What training says")
        curve(length, run, "validation_accept_length", unit, ORANGE, "simulated on validation")
        curve(length, run, "decoded_accept_length", unit, GREEN, "decoded on validation chats")
        for axes, figures in ((length, "accept_length"), (speed, "speedup")):
            for number, task in enumerate(tasks):
                values = [candidate["tasks"][task][figures] for _, candidate in rows]
                color = COLORS[number % len(COLORS)]
                axes.plot(x, values, color=color, alpha=0.6, linewidth=1, linestyle="--", label=task)
            means = [candidate["mean"][figures] for _, candidate in rows]
            axes.plot(x, means, color=RED, linewidth=2.2, marker="o", label="mean over tasks")
        label(length, "", "accept length (tokens per pass)", "What decoding gives")
        label(speed, f"training time ({axis})" if run.timed else "step", "speedup (x plain decoding)")
        speed.axhline(1.0, color=GRAY, linewidth=0.8)
        pick = next(moment for moment, (row, _) in zip(x, rows, strict=True) if row["name"] == report["pick"])
        for axes in (loss, length, speed):
            axes.axvline(pick, color=GRAY, linestyle=":", label=f"pick: {report['pick']}")
            axes.legend(fontsize=7)
        return svg(figure)


def learning_figure(runs: Sequence[tuple[str, Sequence[tuple[float, float]]]]) -> bytes:
    """An SVG of accept length by tokens read. `runs`: (name, its points in order)."""
    with canvas(1, 1, 6.0, 3.2) as (figure, grid):
        axes = grid[0][0]
        for (name, points), color in zip(runs, _colors(len(runs)), strict=True):
            axes.plot(*zip(*points, strict=True), color=color, marker="o", label=name)
        axes.set_xscale("log")
        label(axes, "tokens read in training", "accept length (tokens per pass)")
        axes.legend(fontsize=7)
        return svg(figure)


def tree_figure(report: Mapping[str, Any]) -> bytes:
    """An SVG heat map of a tree sweep: depth against nodes, a panel for each beam, speedup above accept length.

    It shows the last pass of every setting, as the table does; finalists are framed, the pick is starred. `report` is
    `TreeReport.as_dict()`.
    """
    measured = list({one["name"]: one for done in report["passes"] for one in done["candidates"]}.values())
    beams = sorted({candidate["top_k"] for candidate in measured})
    finalists = {candidate["name"] for candidate in report["passes"][-1]["candidates"]}
    with canvas(len(ROWS), len(beams), 1.6 + 2.6 * len(beams), 5.6) as (figure, grid):
        for line, (name, words) in zip(grid, ROWS, strict=True):
            values = [candidate["mean"][name] for candidate in measured]
            scale = min(values), max(values)
            for axes, beam in zip(line, beams, strict=True):
                shown = [candidate for candidate in measured if candidate["top_k"] == beam]
                picture = _panel(axes, shown, name, scale, finalists, report["pick"])
                axes.set_title("chains" if beam == 1 else f"top_k {beam}")
            figure.colorbar(picture, ax=line, label=words)
        return svg(figure)


def _panel(
    axes: Any,
    candidates: Sequence[Mapping[str, Any]],
    figure: str,
    scale: tuple[float, float],
    finalists: set[str],
    pick: str,
) -> Any:
    depths = sorted({candidate["depth"] for candidate in candidates})
    nodes = sorted({_column(candidate) for candidate in candidates})
    table = [[float("nan")] * len(nodes) for _ in depths]
    for candidate in candidates:
        y = depths.index(candidate["depth"])
        x = nodes.index(_column(candidate))
        value = table[y][x] = candidate["mean"][figure]
        # light text on dark cells of cividis, dark text on light ones
        light = value < (scale[0] + scale[1]) / 2
        star = "*" if candidate["name"] == pick else ""
        axes.text(x, y, f"{value:.2f}{star}", ha="center", va="center", color="white" if light else "black", fontsize=8)
        if candidate["name"] in finalists:
            axes.add_patch(_frame(x, y))
    picture = axes.imshow(table, cmap="cividis", vmin=scale[0], vmax=scale[1], aspect="auto", origin="lower")
    axes.set_xticks(range(len(nodes)), [str(number) if number else "= depth" for number in nodes])
    axes.set_yticks(range(len(depths)), [str(number) for number in depths])
    axes.set_xlabel("nodes")
    axes.set_ylabel("depth (levels)")
    return picture


def _column(candidate: Mapping[str, Any]) -> int:
    """The column of a candidate: its node count, or 0 for chains, which share one column."""
    return 0 if candidate["top_k"] == 1 else int(candidate["nodes"])


def _frame(x: int, y: int) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.46, y - 0.46), 0.92, 0.92, fill=False, edgecolor=RED, linewidth=1.8)


def methods_figure(content: Mapping[str, Any]) -> bytes:
    """An SVG of a comparison of methods: speedup and accept length by file, acceptance by position, by temperature.

    Whiskers are two standard errors. `content` is `MethodComparison.as_dict()`.
    """
    heats = content["settings"]["temperatures"]
    names = [method["method"] for method in content["methods"]]
    with canvas(len(heats), 3, 11.5, (1.2 + 0.42 * max(3, len(names))) * len(heats)) as (figure, grid):
        for heat, (speed, length, positions) in zip(heats, grid, strict=True):
            lines = [line for line in content["lines"] if line["temperature"] == heat and line["method"] in names]
            tasks = list(dict.fromkeys(line["task"] for line in lines))
            for number, task in enumerate(tasks):
                mine = {line["method"]: line for line in lines if line["task"] == task}
                _bars(speed, [mine[name] for name in names], "speedup", number, tasks)
                _bars(length, [mine[name] for name in names], "accept_length", number, tasks)
            shown = {line["method"]: line["by_position"] for line in lines if line["task"] == tasks[-1]}
            for name, color in zip(names, _colors(len(names)), strict=True):
                rates = shown[name]
                positions.plot(range(1, len(rates) + 1), rates, color=color, marker="o", label=name)
            speed.axvline(1.0, color=GRAY, linewidth=0.8)
            for axes, x_name in ((speed, "speedup (x plain decoding)"), (length, "accept length (tokens per pass)")):
                axes.set_yticks(range(len(names)), names)
                axes.invert_yaxis()
                label(axes, x_name, "", f"T = {heat:g}")
            label(positions, "draft position", "accepted (share)", f"T = {heat:g}, {tasks[-1]}")
            positions.set_ylim(0.0, 1.02)
            positions.xaxis.get_major_locator().set_params(integer=True)
            if names:
                positions.legend(fontsize=7)
                length.legend(fontsize=7)
        settings = content["settings"]
        figure.suptitle(f"{settings['model']}, {settings['weights']}, batch {settings['batch_size']}", fontsize=10)
        return svg(figure)


def _bars(axes: Any, lines: Sequence[Mapping[str, Any]], name: str, number: int, tasks: Sequence[str]) -> None:
    """Draw one file's bars (`tasks[number]`), one for each method; with their margins as whiskers."""
    height = 0.8 / len(tasks)
    y = [index - 0.4 + height * (number + 0.5) for index in range(len(lines))]
    values = [line[name] or 0.0 for line in lines]
    axes.barh(y, values, height=0.9 * height, color=_colors(len(tasks))[number], label=tasks[number])
    margins = [line.get("margins", {}).get(name) or 0.0 for line in lines]
    axes.errorbar(values, y, xerr=margins, fmt="none", ecolor=GRAY, elinewidth=1)
    if name == "speedup":
        for value, at, over in zip(values, y, margins, strict=True):
            axes.annotate(
                f"{value:.2f}", (value + over, at), (4, 0), textcoords="offset points", fontsize=6, va="center"
            )


def serve_figure(content: Mapping[str, Any]) -> bytes:
    """An SVG of a serving benchmark: throughput, ratios, latencies and accept length by load.

    `content` is `ServeReport.as_dict()`; its loads are all of one kind.
    """
    lines = content["lines"]
    sides = list(dict.fromkeys(line["side"] for line in lines))
    baseline = content["baseline"]
    x_name = _AXIS[lines[0]["load"]["kind"]]
    with canvas(2, 3, 11.0, 5.6) as (figure, axes):
        for side, color in zip(sides, _colors(len(sides)), strict=True):
            mine = [line for line in lines if line["side"] == side]
            at = [line["load"]["level"] for line in mine]
            style = {"color": color, "marker": "o", "label": side}
            axes[0][0].plot(at, [line["tokens_per_second_median"] for line in mine], **style)
            if side != baseline:
                ratios = axes[0][1].plot(at, [line["ratio_median"] for line in mine], **style)[0]
                least, most = ([pick(line["ratios"]) for line in mine] for pick in (min, max))
                axes[0][1].fill_between(at, least, most, color=ratios.get_color(), alpha=0.2, linewidth=0)
            for panel, name in ((axes[0][2], "ttft_ms"), (axes[1][0], "tpot_ms"), (axes[1][1], "e2e_ms")):
                for quantile, dashes in (("p50", "-"), ("p99", ":")):
                    known = [line for line in mine if line[name]]
                    options = style if quantile == "p50" else {**style, "label": None, "marker": None}
                    levels = [line["load"]["level"] for line in known]
                    panel.plot(levels, [line[name][quantile] for line in known], linestyle=dashes, **options)
            known = [line for line in mine if line["accept_length"] is not None]
            levels = [line["load"]["level"] for line in known]
            axes[1][2].plot(levels, [line["accept_length"] for line in known], **style)
        axes[0][1].axhline(1.0, color=GRAY, linewidth=0.8)
        for side, level in content["crossover"].items():
            if level is not None:
                below = {"xytext": (0, -12), "textcoords": "offset points", "fontsize": 7}
                axes[0][1].annotate(f"{side}: crossover", (level, 1.0), **below)
        titles = (
            ("output tokens/s", "throughput"),
            (f"ratio to {baseline}", "ratio, minimum to maximum"),
            ("ms", "TTFT, p50 and p99 (dotted)"),
            ("ms per token", "TPOT, p50 and p99 (dotted)"),
            ("ms", "whole answer, p50 and p99 (dotted)"),
            ("tokens per target pass", "accept length"),
        )
        for panel, (y_name, title) in zip((one for row in axes for one in row), titles, strict=True):
            label(panel, x_name, y_name, title)
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter("{x:g}")
        for panel in (axes[0][2], axes[1][0], axes[1][1]):
            panel.set_yscale("log")
        axes[0][0].legend(fontsize=7)
        return svg(figure)


def _colors(count: int) -> list[str]:
    return [COLORS[number % len(COLORS)] for number in range(count)]
