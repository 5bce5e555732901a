"""Tables on terminals of every width: nothing is dropped, no figure is cut, no line is too long."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from eyas import tables
from eyas.tables import by_position, show_table

from .source import FILES, calls, ids

WIDTHS = (40, 60, 80, 120)


def printed(table: Table, width: int) -> str:
    screen = StringIO()
    show_table(Console(file=screen, width=width, force_terminal=True, color_system=None), table)
    return screen.getvalue()


def check_every_width(table: Table, fits: Callable[[Console, Table], bool]) -> None:
    """Fail if a table loses anything at a width, or exceeds it; `fits` is the real `tables._fits`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "_fits", fits)
        for width in WIDTHS:
            check(table, printed(table, width), width)


def check(table: Table, shown: str, width: int) -> None:
    assert "…" not in shown
    longest = max(shown.splitlines(), key=len, default="")
    assert len(longest) <= width, f"{len(longest)} columns at {width}: {longest}"
    words = shown.split()
    for column in table.columns:
        texts = [str(cell) for cell in column.cells] + ([str(column.header)] if table.show_header else [])
        for word in (word for text in texts for word in text.split()):
            if re.match(r"\W*\d", word):
                assert word in words, f"{word} is cut or dropped at {width} columns"
            for part in re.findall(r"[^\W_]{2,24}", word):
                assert part in shown, f"{part} of {word} is cut or dropped at {width} columns"


def table(*headers: str, rows: list[tuple[str, ...]], left: int = 2, **more: Any) -> Table:
    """A table whose columns after the first `left` are aligned right."""
    made = Table(*headers[:left], **more)
    for header in headers[left:]:
        made.add_column(header, justify="right")
    for row in rows:
        made.add_row(*row)
    return made


METHODS = (
    "file", "method", "tokens/s", "speedup", "quartiles", "accept length", "efficiency", "drafting", "by position",
    "identical",
)  # fmt: skip
FIGURES = ("1234.5", "1.77x", "1.70-1.81", "2.28", "0.78", "12%", "0.81 0.52 0.33 0.20 0.11", "9/9")
CASES = {
    "many columns": table(
        *METHODS,
        rows=[("humaneval", name, *FIGURES) for name in ("none", "runs_of_mine+suffix", "static:mc_sim_7b_63")],
        title="a title that is longer than the narrowest of all terminals",
    ),
    "names that take half of a narrow terminal": table(
        "file", "T", "method", "tokens/s", left=3, rows=[("mt_bench/reasoning", "0.7", "dynamic:10,16,1024", "1,234.5")]
    ),
    "long headers": table(
        "step", "mean: accept length, speedup", "validation accept length", left=1,
        rows=[("1500", "2.345 1.77x", "2.281")],
    ),
    "no header": table(
        rows=[("parameters", "136,178,560"), ("path", "/a/folder/with/a/very_long_name/of-a-model-1.5b-instruct.gguf")],
        show_header=False, box=None,
    ),
    "only names": table(
        "setting", "value", "from", left=3,
        rows=[("data", "1,234 chats, 567,890 tokens, 123,456 of them answers", "target and data")],
    ),
    "an empty cell and an empty header": table(
        "", "tree", "efficiency", rows=[("pick", "chain:3", ""), ("", "chain:5", "0.9 ?")]
    ),
    "no rows": table("source", "rows", rows=[]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_dropped_and_no_figure_is_cut(name: str) -> None:
    check_every_width(CASES[name], tables._fits)


def test_columns_are_split_before_rows_become_lists() -> None:
    wide, narrow, narrowest = (printed(CASES["many columns"], width) for width in (120, 80, 30))
    assert wide.count("humaneval") == 3
    assert narrow.count("humaneval") == 6, "a table for some columns, then one for others"
    rows = [line.split() for line in narrowest.splitlines()]
    assert rows.count(["tokens/s", "1234.5"]) == rows.count(["efficiency", "0.78"]) == 3


def test_names_break_between_their_parts() -> None:
    shown = printed(table("tree", "tokens/s", left=1, rows=[("static:mc_sim_name_7b_63", "12.3")]), 20)
    assert [line.split()[0] for line in shown.splitlines()[2:]] == ["static:mc_", "sim_", "name_7b_63"]


def test_tables_are_printed_here_only() -> None:
    """What is printed by `print` would be cut on a narrow terminal: `show_table` prints every table."""
    makers = {"Table", "table", "table_of", "accuracy_table"}
    printing = ((path, node) for path in FILES for name, node in calls(path) if name.endswith(".print"))
    for path, node in printing:
        if ids(path) == "tables.py":
            continue
        named = {
            each.id if isinstance(each, ast.Name) else each.attr
            for argument in node.args
            for each in ast.walk(argument)
            if isinstance(each, ast.Name | ast.Attribute)
        }
        assert not named & makers, f"{ids(path)}:{node.lineno} prints a table by itself"


def test_rates_of_deep_drafts_are_shown_up_to_the_eighth_position() -> None:
    assert by_position([0.75, 0.5]) == "0.75 0.50"
    assert by_position([0.5] * 61, "{:.0%}", " / ") == " / ".join(["50%"] * 8) + " (53 more)"
