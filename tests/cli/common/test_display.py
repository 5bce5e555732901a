"""What a terminal shows: marks on accepted draft tokens, the line of figures."""

from __future__ import annotations

import re
import sys
from io import StringIO
from typing import Any

import pytest

from eyas.cli.common.display import StreamedText, mark, quietly_refreshing, row_bar, stats_line
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
    stats.record(0, 0)
    assert stats_line(stats) == "8 tokens in 1 target passes | prefill 0.50 s | decode 2.00 s | 4.0 tokens/s"
    stats.record(2, 3)
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
