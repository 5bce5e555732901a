"""The style of all plots, and how a figure becomes an SVG file.

Colours are Okabe and Ito's, which colour-blind readers can tell apart; text and lines are a mid grey on a transparent
ground, legible on light and dark pages. matplotlib is imported when a plot is made, without a display.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eyas.errors import UsageError

BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
COLOURS = (BLUE, RED, GREEN, ORANGE, PURPLE, SKY)
GREY = "#7f7f7f"
_STYLE: dict[str, Any] = {
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "text.color": GREY,
    "axes.labelcolor": GREY,
    "axes.edgecolor": GREY,
    "axes.titlecolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "font.size": 9,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "svg.fonttype": "path",
    "svg.hashsalt": "eyas",  # the same figure is the same file
}


@contextmanager
def canvas(rows: int, columns: int, width: float, height: float, **options: Any) -> Iterator[tuple[Any, Any]]:
    """A figure in the style, its size in inches, and its axes [rows][columns]; `options` go to `Figure.subplots`."""
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
    axes.grid(visible=True, color=GREY, alpha=0.2, linewidth=0.6)


def svg(figure: Any) -> bytes:
    """The figure as an SVG document, the same bytes every time."""
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
    """The unit that suits a span of seconds: the seconds in it, and its name."""
    longest = max(values, default=0.0)
    for seconds, name in ((3600.0, "hours"), (60.0, "minutes")):
        if longest >= 2 * seconds:
            return seconds, name
    return 1.0, "seconds"
