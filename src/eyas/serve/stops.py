"""Stop strings: text comes in pieces of any size, and goes out up to where the first stop string is complete.

Every stop string is matched character by character (Knuth-Morris-Pratt), so the result doesn't depend on how the text
was cut into pieces: speculation cuts it differently than plain decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


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
