"""Incremental detokenisation: the text each token adds, characters split over tokens and spaces kept right.

A tokenizer's decode is not the sum of its tokens: bytes of one character may sit in several tokens, and the first
token of a text loses its leading space. So the tokens since the last but one complete piece are decoded together,
and only what the new ones add is handed out.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

_INCOMPLETE = "\ufffd"
_LONGEST_CHARACTER = 4
_PATIENCE = 32
"""Tokens that may wait for the end of a character: more than any has, so what waits then is no character at all."""


class Detokenizer:
    """The pieces of one answer; together they are the text that decoding all at once gives.

    Special tokens are left out, those in `kept` are text.
    """

    def __init__(self, tokenizer: Any, kept: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._skipped = specials(tokenizer) - kept
        self._known: list[int] = []  # tokens of the last piece handed out
        self._new: list[int] = []  # tokens since then

    def push(self, *tokens: int) -> str:
        """The text these tokens complete; empty while a character is incomplete."""
        self._new += [token for token in tokens if token not in self._skipped]
        piece = self._added(self._new)
        if not piece or piece.endswith(_INCOMPLETE):
            return "" if len(self._new) <= _PATIENCE else self._settled(piece)
        return self._hand_out(len(self._new), piece)

    def finish(self) -> str:
        """What is left at the end, incomplete or not."""
        return self._hand_out(len(self._new), self._added(self._new))

    def _settled(self, piece: str) -> str:
        """The part of what waits that the next tokens can't change."""
        for count in range(len(self._new) - _LONGEST_CHARACTER, len(self._new) - 2 * _LONGEST_CHARACTER, -1):
            first = self._added(self._new[:count])
            if first + self._decode(self._new[count:]) == piece:
                return self._hand_out(count, first)
        return self._hand_out(len(self._new), piece)

    def _hand_out(self, count: int, piece: str) -> str:
        self._known, self._new = self._new[:count] or self._known, self._new[count:]
        return piece

    def _added(self, new: list[int]) -> str:
        if not new:
            return ""
        before = self._decode(self._known)
        return self._decode(self._known + new)[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids) if ids else ""
        return text


@lru_cache(maxsize=8)
def specials(tokenizer: Any) -> frozenset[int]:
    """The ids that `skip_special_tokens` leaves out."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(token for token, entry in added.items() if entry.special)
