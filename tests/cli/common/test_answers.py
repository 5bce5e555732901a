"""Answers on the terminal: marks on accepted draft tokens, lines broken between words, figures, limits."""

from __future__ import annotations

import re
import sys
from io import StringIO

import pytest

from eyas.cli.common.answers import StreamedText, WordWrap, dim, mark, note_cut, stats_line, wrapped
from eyas.text.reasoning import PARSERS, ThoughtSplitter
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


def test_a_thought_is_dimmed_on_a_terminal_and_kept_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    said = tokenizer()("<think>\nSix clips.\n</think>\n\nIn May.", add_special_tokens=False)["input_ids"]
    for screen in (Terminal(), StringIO()):
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", screen)
            live = StreamedText(tokenizer(), speculating=False, splitter=ThoughtSplitter(PARSERS["think"]))
            for token in said[:-1]:
                live.add(Chunk(0, (token,), 0))
            live.add(Chunk(0, (said[-1],), 0, Completion("", said, "", "stop", Stats())))
        assert (live.thought, live.answer) == ("Six clips.", "In May.")
        if not screen.isatty():
            assert screen.getvalue() == "<think>\nSix clips.\n</think>\n\nIn May.\n"
            continue
        assert re.sub(r"\x1b\[\d*m", "", screen.getvalue()) == "Six clips.\n\nIn May.\n"
        assert screen.getvalue().startswith(dim("Six"))
        assert "\x1b" not in screen.getvalue().partition("\n\n")[2]


def test_without_color_the_mark_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one two three four", "one two|three four"),
        ("one two thr", "one two|thr"),
        ("ten cells.", "ten cells."),  # as wide as the terminal
        ("ten cells. then", "ten cells.|then"),
        ("ten cells.   \n\nthen", "ten cells.||then"),
        ("a verylongwordindeed b", "a|verylongwordindeed b"),
        ("    verylongword", "    verylongword"),  # a break after spaces alone would be an empty line
        ("  - one two three", "  - one|two three"),
        ("漢字漢字漢字漢", "漢字漢字漢|字漢"),
        ("see 漢字漢字", "see 漢字漢|字"),
        ("👩‍🔬 and é́ and", "👩‍🔬 and é́|and"),
        ("a\tb c", "a\tb|c"),
        ("```py\nprint(1, 2, 3)\n```\none two three", "```py|print(1, 2, 3)|```|one two|three"),
    ],
)
def test_lines_break_between_words(monkeypatch: pytest.MonkeyPatch, text: str, lines: str) -> None:
    """Whatever the pieces in which the text comes."""
    monkeypatch.setenv("COLUMNS", "10")
    shown = lines.replace("|", "\n")
    assert wrapped(text) == shown
    wrap = WordWrap()
    pieces = [piece for char in text for piece in wrap.push(char, str)]
    assert "".join(piece.text for piece in [*pieces, *wrap.finish()]) == shown


def test_a_mark_covers_what_was_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    wrap = WordWrap()
    pieces = [*wrap.push("one", str), *wrap.push(" two thr", mark), *wrap.push("ee four ", str), *wrap.finish()]
    assert "".join(piece.text for piece in pieces) == "one two\nthree four"  # a space at the edge stays behind
    assert "".join(piece.text for piece in pieces if piece.style is mark) == " twothr"  # the break isn't marked


def test_what_cut_an_answer_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    def answer(tokens: int, reason: str) -> Completion:
        return Completion("", [1] * tokens, "", reason, Stats())

    note_cut([answer(8, "stop")], 8)
    assert capsys.readouterr().err == ""
    note_cut([answer(8, "length")], 8)
    assert capsys.readouterr().err == "(the answer was cut at 8 tokens: --max-new-tokens sets this limit)\n"
    note_cut([answer(5, "length")], 8)
    assert capsys.readouterr().err == "(the answer was cut at the end of the model's context)\n"
    note_cut([answer(8, "length"), answer(8, "length"), answer(5, "length"), answer(2, "stop")], 8)
    assert capsys.readouterr().err.splitlines() == [
        "(2 of 4 answers were cut at 8 tokens: --max-new-tokens sets this limit)",
        "(1 of 4 answers were cut at the end of the model's context)",
    ]
