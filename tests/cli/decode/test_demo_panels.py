"""The picture of the race at the widths people have."""

from __future__ import annotations

from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from eyas.cli.decode.demo import Lane, side_by_side

ENGINE: Any = None


def drawn(lanes: list[Lane], width: int, height: int, color: bool = False) -> str:
    console = Console(width=width, height=height, file=StringIO(), record=True, force_terminal=color)
    console.print(side_by_side(lanes, console.size))
    return console.export_text(styles=color)


def lane(name: str, count: int, seconds: float) -> Lane:
    pieces = [(f"word{i} ", i % 2 == 0) for i in range(count)]
    return Lane(name, ENGINE, pieces, tokens=count, seconds=seconds)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (200, 50), (81, 10)])
def test_both_panels_fit_and_show_the_end(width: int, height: int) -> None:
    text = drawn([lane("plain", 90, 2.0), lane("speculative", 400, 2.0)], width, height)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) <= height
    assert all(line[0] in "│╭╰" and line.rstrip()[-1] in "│╮╯" for line in lines)
    assert "word89" in text
    assert "word399" in text
    assert "word200 " not in text
    assert "plain" in lines[0]
    assert "speculative" in lines[0]
    assert "90 tokens, 2.00 s" in lines[-1]
    if width >= 80:
        assert "400 tokens, 2.00 s, 200 tokens/s" in lines[-1]


def test_nothing_yet() -> None:
    text = drawn([lane("plain", 0, 0.0), lane("speculative", 0, 0.0)], 80, 24)
    assert text.count("0 tokens, 0.00 s") == 2
    assert "tokens/s" not in text


def test_line_ends_of_the_text_are_kept_and_accepted_tokens_marked() -> None:
    code = Lane("plain", ENGINE, [("def f():\n", False), ("    return 1", True)])
    lines = drawn([code, lane("speculative", 0, 0.0)], 80, 24).splitlines()
    assert lines[1].startswith("│ def f():  ")
    assert lines[2].startswith("│     return 1")
    styled = drawn([code], 80, 24, color=True)
    marked = [part for part in styled.split("\x1b[") if "return" in part]
    assert marked
    assert marked[0].startswith("4;32m")


@pytest.mark.parametrize(("width", "height", "across"), [(80, 24, 2), (120, 40, 3), (240, 50, 5)])
def test_many_panels_lie_in_rows(width: int, height: int, across: int) -> None:
    text = drawn([lane(f"method{number}", 90, 2.0) for number in range(5)], width, height)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) <= height
    assert all(f"method{number}" in text for number in range(5))
    assert lines[0].count("╭") == across
