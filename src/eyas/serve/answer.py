"""One choice as it grows: the engine's chunks in, text out, cut at stop strings and never inside a character."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from eyas.text.detokenizer import Detokenizer
from eyas.types import Chunk, Stats, TokenLogprobs


@dataclass(frozen=True)
class Scored:
    """An emitted token's log-probabilities, and where in the answer its text begins.

    Tokens that only together are characters begin where those do.
    """

    offset: int
    logprobs: TokenLogprobs


@dataclass
class Delta:
    """What a chunk adds that may be shown."""

    text: str = ""
    scored: list[Scored] = field(default_factory=list)
    """Tokens whose text has begun to be shown."""


class Answer:
    """Keeps what isn't settled yet; `finish_reason` is None until the answer has ended."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], kept: frozenset[int] = frozenset()) -> None:
        """`kept`: special tokens that are text all the same."""
        self._pieces = Detokenizer(tokenizer, kept)
        self._stops = StopStrings(stops)
        self._one_by_one = bool(stops)
        self._read = 0  # characters that were detokenized
        self._shown = 0  # characters that were given out
        self._scored: list[Scored] = []
        self.tokens = 0
        """Tokens up to the end, the one that completed a stop string counted."""
        self.finish_reason: str | None = None
        self.stats: Stats | None = None
        """Of the sequence, once the engine has ended it."""
        self.error: str | None = None

    def add(self, chunk: Chunk) -> Delta:
        """Take a chunk; after the answer has ended only its statistics count."""
        delta = Delta()
        if self.finish_reason is None:
            self._take(chunk, delta)
        done = chunk.completion
        if done is not None:
            self.stats, self.error = done.stats, done.error
            if self.finish_reason is None:
                self._push(self._pieces.finish(), delta)
                if self.finish_reason is None:
                    self._show(self._stops.finish(), delta)
                    self.finish_reason = done.finish_reason
        return delta

    def _take(self, chunk: Chunk, delta: Delta) -> None:
        if not self._one_by_one and chunk.logprobs is None:
            self.tokens += len(chunk.token_ids)
            self._push(self._pieces.push(*chunk.token_ids), delta)
            return
        for place, token in enumerate(chunk.token_ids):
            self.tokens += 1
            if chunk.logprobs is not None:
                self._scored.append(Scored(self._read, chunk.logprobs[place]))
            self._push(self._pieces.push(token), delta)
            if self.finish_reason is not None:
                return

    def _push(self, piece: str, delta: Delta) -> None:
        self._read += len(piece)
        passed = self._stops.push(piece)
        self._show(passed.text, delta)
        if passed.stopped:
            self.finish_reason = "stop"

    def _show(self, text: str, delta: Delta) -> None:
        delta.text += text
        self._shown += len(text)
        while self._scored and self._scored[0].offset < self._shown:
            delta.scored.append(self._scored.pop(0))


# Stop strings: text comes in pieces of any size, and goes out up to where the first stop string is complete.
#
# Every stop string is matched character by character (Knuth-Morris-Pratt), so the result doesn't depend on how the text
# was cut into pieces: speculation cuts it differently than plain decoding.


class Passed(NamedTuple):
    """What may be shown so far."""

    text: str
    stopped: bool


class _Pattern:
    """One string, and how much of it the text ends with."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._fallback = [0] * len(text)  # longest proper border of text[: i + 1]
        border = 0
        for i in range(1, len(text)):
            while border and text[i] != text[border]:
                border = self._fallback[border - 1]
            border += text[i] == text[border]
            self._fallback[i] = border

    def step(self, character: str) -> bool:
        """Take a character; is the string complete with it?"""
        while self.matched and self.text[self.matched] != character:
            self.matched = self._fallback[self.matched - 1]
        self.matched += self.text[self.matched] == character
        return self.matched == len(self.text)


class StopStrings:
    """Cuts a text before the stop string that is complete first (of several, the longest)."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._patterns = [_Pattern(stop) for stop in stops]
        self._held = ""  # may be the beginning of a stop string

    def push(self, piece: str) -> Passed:
        """The text that no stop string can begin in any more."""
        if not self._patterns:
            return Passed(piece, False)
        text = self._held + piece
        for place, character in enumerate(piece, start=len(self._held) + 1):
            complete = [len(pattern.text) for pattern in self._patterns if pattern.step(character)]
            if complete:
                self._held = ""
                return Passed(text[: place - max(complete)], True)
        kept = len(text) - max(pattern.matched for pattern in self._patterns)
        self._held = text[kept:]
        return Passed(text[:kept], False)

    def finish(self) -> str:
        """What was held back, at the end of the text."""
        held, self._held = self._held, ""
        return held
