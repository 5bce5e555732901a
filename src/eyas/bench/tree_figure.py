"""The heat map of a tree sweep: depth against nodes, one panel a beam, speedup above accept length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from eyas.bench.plots import RED, canvas, svg

ROWS = (("speedup", "speedup (x plain decoding)"), ("accept_length", "accept length (tokens a pass)"))


def tree_figure(report: Mapping[str, Any]) -> bytes:
    """An SVG of the first pass, in which every setting ran; finalists are framed, the pick is starred.

    `report` is `TreeReport.as_dict()`.
    """
    first, last = report["passes"][0], report["passes"][-1]
    beams = sorted({candidate["top_k"] for candidate in first["candidates"]})
    finalists = {candidate["name"] for candidate in last["candidates"]}
    with canvas(len(ROWS), len(beams), 1.6 + 2.6 * len(beams), 5.6) as (figure, grid):
        for line, (name, words) in zip(grid, ROWS, strict=True):
            values = [candidate["mean"][name] for candidate in first["candidates"]]
            scale = min(values), max(values)
            for axes, beam in zip(line, beams, strict=True):
                shown = [candidate for candidate in first["candidates"] if candidate["top_k"] == beam]
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
        y, x = depths.index(candidate["depth"]), nodes.index(_column(candidate))
        value = table[y][x] = candidate["mean"][figure]
        # cividis runs from dark to light, so the text has to change sides
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
    """Nodes; chains, whose nodes are their levels, share one column."""
    return 0 if candidate["top_k"] == 1 else int(candidate["nodes"])


def _frame(x: int, y: int) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.46, y - 0.46), 0.92, 0.92, fill=False, edgecolor=RED, linewidth=1.8)
