"""What a terminal shows: marks on accepted draft tokens, the line of figures."""

from __future__ import annotations

import re
import sys
import time
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from eyas.cli.common import display
from eyas.cli.common.display import (
    ProgressLines,
    StreamedText,
    counting,
    mark,
    next_step,
    quietly_refreshing,
    row_bar,
    stats_line,
)
from eyas.types import Chunk, Completion, Stats

from ...pairs import tokenizer


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def written(monkeypatch: pytest.MonkeyPatch, screen: StringIO, *, speculating: bool) -> str:
    """An answer of two rounds; the first token of each was drafted."""
    ids = tokenizer()("def add(a, b): clips", add_special_tokens=False)["input_ids"][:4]
    done = Completion("", ids, tokenizer().decode(ids), "length", Stats())
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", screen)
        live = StreamedText(tokenizer(), speculating=speculating)
        live.add(Chunk(0, tuple(ids[:2]), 1))
        live.add(Chunk(0, tuple(ids[2:]), 1, done))
    return screen.getvalue()


def test_accepted_draft_tokens_are_marked_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = written(monkeypatch, StringIO(), speculating=True)
    assert "\x1b" not in plain
    assert capsys.readouterr().err == ""
    shown = written(monkeypatch, Terminal(), speculating=True)
    assert re.sub(r"\x1b\[\d*m", "", shown) == plain
    assert shown.startswith(mark(tokenizer().decode(tokenizer()(plain)["input_ids"][:1])))
    assert shown.count("\x1b[4m") == 2
    assert "drafted and accepted" in capsys.readouterr().err
    assert written(monkeypatch, Terminal(), speculating=False) == plain


def test_without_colour_the_mark_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert mark("x") == "\x1b[32m\x1b[4mx\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert mark("x") == "\x1b[4mx\x1b[0m"


def test_the_line_of_figures() -> None:
    stats = Stats(tokens=8, prefill_seconds=0.5, decode_seconds=2.0)
    stats.record(0, 0, 9)
    assert stats_line(stats) == "8 tokens in 1 target passes | prefill 0.50 s | decode 2.00 s | 4.0 tokens/s"
    stats.record(2, 3, 12)
    line = stats_line(stats, lossy=True)
    assert "accept length 2.00 | accepted by position 1.00 1.00 0.00" in line
    assert line.endswith("| LOSSY acceptance")


def test_nothing_is_drawn_where_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    def view() -> Any:
        raise AssertionError("drawn")

    with quietly_refreshing(view, show=False) as refresh, row_bar(3) as advance:
        refresh()
        advance()
    assert capsys.readouterr() == ("", "")


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
