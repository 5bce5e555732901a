"""The picture of a race: two panels side by side, each showing the end of what its lane has written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eyas.bench.race import Lane

LEGEND = (
    "Underlined: drafted, and accepted because the model itself writes exactly that. The two take turns on this "
    "machine; each clock counts its own side only, reading the prompt included (the table below leaves that out)."
)
_WIDEST, _LINES = 72, 14


def side_by_side(lanes: Sequence[Lane], size: tuple[int, int]) -> Any:
    """All lanes, on a screen of `size` columns and rows."""
    from rich.table import Table

    columns, rows = size
    width = min(_WIDEST, columns // len(lanes))
    lines = max(3, min(_LINES, rows - 4))
    grid = Table.grid()
    for _ in lanes:
        grid.add_column(width=width)
    grid.add_row(*(_panel(lane, width, lines) for lane in lanes))
    return grid


def _panel(lane: Lane, width: int, lines: int) -> Any:
    from rich.panel import Panel

    parts = [f"{lane.tokens} tokens", f"{lane.seconds:.2f} s"]
    if lane.seconds:
        parts.append(f"{lane.tokens / lane.seconds:.0f} tokens/s")
    title = f"{lane.name}: done" if lane.completion is not None else lane.name
    return Panel(_end_of(lane, width - 4, lines), title=title, subtitle=", ".join(parts), width=width, height=lines + 2)


def _end_of(lane: Lane, width: int, lines: int) -> Any:
    """The last `lines` lines of the text, wrapped to `width`."""
    from rich.console import Console
    from rich.text import Text

    text = Text(tab_size=4)
    for piece, accepted in lane.pieces:
        text.append(piece, style="green underline" if accepted else "")
    wrapped = text.wrap(Console(width=width), width)
    return Text("\n").join(wrapped[-lines:])
