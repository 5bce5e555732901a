"""Tables on a terminal of any width: nothing is dropped, and no figure is cut.

A table that fits is printed as it is. On a narrower terminal its headers and names are wrapped. If that isn't enough,
its columns are split over several tables that repeat the names. Where even that leaves too little room, each row
becomes a list of headers and values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import takewhile, zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_BREAK = re.compile(r"(?<=[:/])(?=..)|(?<=[,+_=-])(?=[^\W\d_])")
"""Where a line may break within a name, such as the tree `static:mc_sim_7b_63`."""
_FIGURE = re.compile(r"[^\w]*\d")
"""The beginning of a figure, such as `1.70-1.81` or `9/9`, within which a line never breaks."""
_SHORT = 12
"""A figure with its unit or margin, such as `34 min` or `1.28x ±0.31`, that stays on one line."""
_LONGEST = 24
"""A part of a name that is longer may break anywhere."""
_KEYS = 3
"""Maximum number of columns that name a row, and are repeated where a table is split."""
_GAP = "  "
"""What separates columns."""
_POSITIONS = 8
"""Maximum number of draft positions whose rates are shown; a copied passage may have 64."""


def by_position(rates: Sequence[float], form: str = "{:.2f}", gap: str = " ") -> str:
    """The rates of the first draft positions, each in a `form`, and how many more there are."""
    shown = gap.join(form.format(rate) for rate in rates[:_POSITIONS])
    return shown + (f" ({len(rates) - _POSITIONS} more)" if len(rates) > _POSITIONS else "")


def show_table(console: Console, table: Table) -> None:
    """Print a table within the console's width."""
    from rich.text import Text

    if _fits(console, table):
        console.print(table)
        return
    if table.title is not None:
        console.print(Text("\n".join(_wrapped(_text(table.title), console.width)), style="italic"))
    for line in _lines(table, console.width):
        console.print(Text(line), no_wrap=True, overflow="ignore", crop=False)


def _fits(console: Console, table: Table) -> bool:
    endless = console.options.update(width=100_000)  # a table's measured width is capped at the available width
    return console.measure(table, options=endless).maximum <= console.width


class _Column(NamedTuple):
    """A column of text."""

    header: str
    cells: list[str]
    right: bool

    @property
    def min_width(self) -> int:
        """Minimum width that cuts no figure, and breaks names between their parts only."""
        lines = [line for text in (self.header, *self.cells) for line in text.splitlines()]
        whole = [line for line in lines if _FIGURE.match(line) and len(line) <= _SHORT]
        parts = [*whole, *(part for line in lines for word in line.split() for part in _parts(word))]
        return max((len(part) if _FIGURE.match(part) else min(len(part), _LONGEST) for part in parts), default=1)

    @property
    def unbroken(self) -> int:
        """The width at which only words of the header are below each other, and a line of a cell only if it is long."""
        cells = max((len(line) for cell in self.cells for line in cell.splitlines()), default=1)
        return max(self.min_width, min(cells, _LONGEST))

    @property
    def max_width(self) -> int:
        """The width at which nothing is broken."""
        return max((len(line) for text in (self.header, *self.cells) for line in text.splitlines()), default=1)


def _lines(table: Table, width: int) -> Iterator[str]:
    """The table's lines, at most `width` characters long unless a single figure is longer."""
    columns = [_Column(_text(one.header), [*map(_text, one.cells)], one.justify == "right") for one in table.columns]
    keys = list(takewhile(lambda column: not column.right, columns))[:_KEYS]
    rest = columns[len(keys) :]
    if _min_across(keys) > (width // 2 if rest else width) or any(
        _min_across([*keys, column]) > width for column in rest
    ):
        yield from _records(columns, width)
        return
    if _min_across(columns) <= width:
        yield from _compact(columns, [column.min_width for column in columns], width, header=table.show_header)
        return
    named = [column.min_width for column in keys]
    while rest:
        fitting = len(rest)
        while fitting > 1 and _across([*named, *(column.unbroken for column in rest[:fitting])]) > width:
            fitting -= 1
        ideal = [*named, *(column.unbroken for column in rest[:fitting])]
        widths = ideal if _across(ideal) <= width else [*named, rest[0].min_width]
        yield from _compact([*keys, *rest[:fitting]], widths, width, header=table.show_header)
        rest = rest[fitting:]
        if rest:
            yield ""


def _min_across(columns: Sequence[_Column]) -> int:
    """Minimum width of a table of these columns."""
    return _across([column.min_width for column in columns])


def _across(widths: Sequence[int]) -> int:
    """The width of columns side by side."""
    return sum(width + len(_GAP) for width in widths) - len(_GAP)


def _compact(columns: Sequence[_Column], min_widths: Sequence[int], width: int, *, header: bool) -> Iterator[str]:
    """The columns side by side, each between its width in `min_widths` and its full width, names first."""
    spare = width - _across(min_widths)
    widths = []
    for column, room in zip(columns, min_widths, strict=True):
        more = min(spare, max(0, column.max_width - room))
        spare -= more
        widths.append(room + more)
    if header:
        yield from _row([column.header for column in columns], columns, widths)
        yield _GAP.join("-" * each for each in widths)
    for cells in zip(*(column.cells for column in columns), strict=True):
        yield from _row(cells, columns, widths)


def _row(cells: Sequence[str], columns: Sequence[_Column], widths: Sequence[int]) -> Iterator[str]:
    """The lines of a row whose cells are wrapped."""
    wrapped = [_wrapped(cell, width) for cell, width in zip(cells, widths, strict=True)]
    for line in zip_longest(*wrapped, fillvalue=""):
        sides = zip(line, columns, widths, strict=True)
        padded = (text.rjust(width) if column.right else text.ljust(width) for text, column, width in sides)
        yield _GAP.join(padded).rstrip()


def _records(columns: Sequence[_Column], width: int) -> Iterator[str]:
    """Each row as a list of headers and values, with an empty line between rows."""
    named = min(max(len(column.header) for column in columns), width // 2)
    for number, cells in enumerate(zip(*(column.cells for column in columns), strict=True)):
        if number:
            yield ""
        for column, cell in zip(columns, cells, strict=True):
            if cell or column.header:
                name = _wrapped(column.header, named)
                value = _wrapped(cell, width - named - len(_GAP))
                for left, right in zip_longest(name, value, fillvalue=""):
                    yield f"{left.ljust(named)}{_GAP}{right}".rstrip()


def _wrapped(text: str, width: int) -> list[str]:
    """The lines of a text in `width` columns: broken between words, else between the parts of a name."""
    lines = []
    for paragraph in text.splitlines():
        first, *words = paragraph.split() or [""]
        indent = len(paragraph) - len(paragraph.lstrip())
        line = ""
        for word in (" " * indent + first, *words):
            if line and len(line) + 1 + len(word) > width:
                lines.append(line)
                line = word
            else:
                line = f"{line} {word}" if line else word
            if len(line) > width:
                *full, line = _broken(line, width)
                lines += full
        lines.append(line)
    return lines


def _broken(word: str, width: int) -> list[str]:
    """A word that is wider than `width` in pieces."""
    pieces = [""]
    for part in _parts(word):
        if len(pieces[-1]) + len(part) > width and pieces[-1]:
            pieces.append("")
        pieces[-1] += part
        while len(pieces[-1]) > width:
            pieces[-1:] = [pieces[-1][:width], pieces[-1][width:]]
    return pieces


def _parts(word: str) -> list[str]:
    """The parts of a word that stay whole."""
    return [word] if _FIGURE.match(word) else _BREAK.split(word)


def _text(cell: Any) -> str:
    return str(getattr(cell, "plain", cell))  # a rich Text, or a string
