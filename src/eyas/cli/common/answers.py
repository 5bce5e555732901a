"""Answers on the terminal: streamed, with draft tokens marked and lines broken between words; statistics; limits."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from eyas.cli.common.display import note
from eyas.tables import by_position

if TYPE_CHECKING:
    from eyas.text.reasoning import ThoughtSplitter
    from eyas.types import Chunk, Completion, Stats

Style = Callable[[str], str]
"""Adds a terminal's codes to a text; `str` adds none."""
_FENCE = "```"
_TAB = 8
"""Columns between a terminal's tab stops."""


def mark(text: str) -> str:
    """Mark the text of accepted draft tokens: underlined, and green unless NO_COLOR is set."""
    return typer.style(text, underline=True, fg=None if os.environ.get("NO_COLOR") else typer.colors.GREEN)


def dim(text: str) -> str:
    """Mark the text of a thought."""
    return typer.style(text, dim=True)


class StreamedText:
    """Writes an answer to standard output as it is decoded.

    On a terminal, accepted draft tokens are marked, thoughts are dimmed, and lines are broken between words. Elsewhere
    the text has the thoughts' own marks.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        speculating: bool,
        splitter: ThoughtSplitter | None = None,
        visible_specials: frozenset[int] = frozenset(),
    ) -> None:
        """`splitter`: what finds thoughts, in a text with the special tokens `visible_specials`."""
        from eyas.text.detokenizer import Detokenizer

        self.thought = ""
        """What was thought so far; empty without a splitter."""
        self.answer = ""
        """The rest of the text so far."""
        screen = sys.stdout.isatty()
        self._pieces = Detokenizer(tokenizer, visible_specials)
        self._splitter = splitter
        self._wrap = WordWrap() if screen else None
        self._marked = speculating and screen
        if self._marked:
            note(f"{mark('marked')}: drafted and accepted; unmarked: the target's own tokens")

    def add(self, chunk: Chunk) -> None:
        """Write the text that a decoding round added."""
        for index, token in enumerate(chunk.token_ids):
            self._add(self._pieces.push(token), mark if self._marked and index < chunk.accepted else str)
        if chunk.completion is not None:
            self._add(self._pieces.finish(), str, last=True)
            self._write("\n", str)
        sys.stdout.flush()

    def _add(self, text: str, style: Style, last: bool = False) -> None:
        """Write text after finding out what is thought in it."""
        if self._splitter is None:
            self.answer += text
            self._write(text, style)
            return
        if self._wrap is None:
            self._write(text, style)
        for piece in self._splitter.feed(text) + (self._splitter.finish() if last else []):
            if self._wrap is not None:
                begins = piece.text and not piece.thought and self.thought and not self.answer
                self._write("\n\n" if begins else "", str)
                self._write(piece.text, dim if piece.thought else style)
            if piece.thought:
                self.thought += piece.text
            else:
                self.answer += piece.text

    def _write(self, text: str, style: Style) -> None:
        if not text:
            return
        for piece in [Piece(text, style)] if self._wrap is None else self._wrap.push(text, style):
            sys.stdout.write(piece.style(piece.text))


class Piece(NamedTuple):
    """Text to write, and its style."""

    text: str
    style: Style


class WordWrap:
    """Breaks streamed lines between words at the terminal's width; a word is held back until its end is known.

    Lines of code between fences are left to the terminal, so that what is copied from it still runs.
    """

    def __init__(self) -> None:
        self._space: list[Piece] = []  # before the word
        self._word: list[Piece] = []
        self._line = ""  # the characters of the line so far, those held back too
        self._column = 0  # cells of the line that are written
        self._code = False  # between fences

    def push(self, text: str, style: Style) -> list[Piece]:
        """Add text; returns what can be written by now. A line break lets all of the line go."""
        out: list[Piece] = []
        for char in text:
            if char == "\n":
                out += self._release()
                out.append(Piece(char, str))
                if self._line.lstrip().startswith(_FENCE):
                    self._code = not self._code
                self._line = ""
                self._column = 0
                continue
            if self._ends_word(char):
                out += self._release()
            (self._word if self._word or not char.isspace() else self._space).append(Piece(char, style))
            self._line += char
        return _joined(out)

    def _ends_word(self, char: str) -> bool:
        """Whether a line may break before `char`: at a space, and between wide characters, as of Chinese."""
        if not self._word:
            return False
        return char.isspace() or (_cells(char) == 2 and _cells(self._word[-1].text) == 2)

    def finish(self) -> list[Piece]:
        """The word that is still held back."""
        return _joined(self._release())

    def _release(self) -> list[Piece]:
        """The word held back, on a new line if it doesn't fit on this one; the spaces before it stay behind then."""
        space, word = self._space, self._word
        self._space = []
        self._word = []
        width = shutil.get_terminal_size().columns
        before = self._line[: len(self._line) - len(word)]
        column = self._column
        for char, _ in space:
            column += _TAB - column % _TAB if char == "\t" else _cells(char)
        if not word:  # the line ends in spaces, which may not begin another one
            return space if column <= width else []
        cells = _cells("".join(char for char, _ in word))
        breaks = column + cells > width and not self._code and not before.isspace() and before != ""
        column = cells if breaks else column + cells
        self._column = column if column <= width else column % width
        return [Piece("\n", str), *word] if breaks else space + word


def _cells(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Neighbors of the same style as one."""
    found: list[Piece] = []
    for piece in pieces:
        if found and found[-1].style == piece.style:
            found[-1] = Piece(found[-1].text + piece.text, piece.style)
        else:
            found.append(piece)
    return found


def wrapped(text: str) -> str:
    """The text with lines broken between words at the terminal's width."""
    wrap = WordWrap()
    return "".join(piece.text for piece in [*wrap.push(text, str), *wrap.finish()])


def stats_line(stats: Stats, lossy: bool = False, seeded: bool = True) -> str:
    """One line of statistics; `docs/metrics.md` defines them."""
    parts = [f"{stats.tokens} tokens in {stats.target_passes} target passes"]
    if stats.drafted_depth:
        rates = by_position(stats.accepted_by_position)
        parts += [f"accept length {stats.accept_length:.2f}", f"accepted by position {rates}"]
    parts += [
        f"prefill {stats.prefill_seconds:.2f} s",
        f"decode {stats.decode_seconds:.2f} s",
        f"{stats.tokens_per_second:.1f} tokens/s",
    ]
    parts += ["LOSSY acceptance"] if lossy else [] if seeded else ["rejection: not plain decoding's draws"]
    return " | ".join(parts)


def note_stats(answers: Sequence[Completion]) -> None:
    """Write the statistics line of these answers, with their counts pooled."""
    from eyas.types import Stats

    pooled = Stats()
    for answer in answers:
        pooled.merge(answer.stats)
    line = stats_line(pooled, any(one.lossy for one in answers), all(one.seeded for one in answers))
    note(wrapped(line) if sys.stderr.isatty() else line)


def note_cut(answers: Sequence[Completion], limit: int) -> None:
    """Say that answers of the conversation or file were cut, and by which limit: `limit` tokens, or the context."""
    cut = [len(answer.token_ids) for answer in answers if answer.finish_reason == "length"]
    by_limit = sum(count >= limit for count in cut)
    whose = "the answer was" if len(answers) == 1 else f"{by_limit} of {len(answers)} answers were"
    if by_limit:
        note(f"({whose} cut at {limit} tokens: --max-new-tokens sets this limit)")
    if len(cut) > by_limit:
        whose = "the answer was" if len(answers) == 1 else f"{len(cut) - by_limit} of {len(answers)} answers were"
        note(f"({whose} cut at the end of the model's context)")
