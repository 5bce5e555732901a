"""What a terminal shows: marks on accepted draft tokens, the line of figures."""

from __future__ import annotations

import sys
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from eyas.cli.common import display
from eyas.cli.common.display import (
    ProgressLines,
    counting,
    next_step,
    quietly_refreshing,
    row_bar,
)


def test_nothing_is_drawn_where_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    def view() -> Any:
        raise AssertionError("drawn")

    with quietly_refreshing(view, show=False) as refresh, row_bar(3) as advance:
        refresh()
        advance()
    assert capsys.readouterr() == ("", "")


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_in_place_of_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    lines = ProgressLines("rows")
    moments = ((1.0, 100), (59.0, 150), (60.0, 200), (70.0, 300), (180.0, 1000), (300.0, 1900), (400.0, 2100))
    for clock[0], done in moments:
        lines.show(done, 2100, ", fine")
    assert capsys.readouterr().err.splitlines() == [
        "rows: 200 of 2,100 (10%), about 19 min left, fine",
        "rows: 1,000 of 2,100 (48%), about 4 min left, fine",
        "rows: 1,900 of 2,100 (90%), about 33 s left, fine",
    ]
    monkeypatch.setattr(sys, "stderr", Terminal())
    drawn = ProgressLines("rows")
    clock[0] = 999.0
    drawn.show(1, 9)
    assert isinstance(sys.stderr, Terminal)
    assert sys.stderr.getvalue() == ""


def test_the_bar_of_runs_is_lines_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(display, "SILENCE", 0.0)
    with row_bar(3) as advance:
        for _ in range(3):
            advance()
    assert [line.split(",")[0] for line in capsys.readouterr().err.splitlines()] == [
        "runs: 1 of 3 (33%)",
        "runs: 2 of 3 (67%)",
    ]
    with counting() as report:
        report("reading", 5, None)
    assert capsys.readouterr().err == "reading: 5\n"


def test_a_command_that_comes_next_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    next_step("serve", "my model", "--draft-model", Path("runs/pick"))
    assert capsys.readouterr().err == "next: eyas serve 'my model' --draft-model runs/pick\n"
