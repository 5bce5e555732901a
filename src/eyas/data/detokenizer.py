"""Incremental detokenisation: the text each token adds, characters split over tokens and spaces kept right.

A tokenizer's decode is not the sum of its tokens: bytes of one character may sit in several tokens, and the first
token of a text loses its leading space. So the tokens since the last but one complete piece are decoded together,
and only what the new ones add is handed out.
"""

from __future__ import annotations

from typing import Any

_INCOMPLETE = "\ufffd"


class Detokenizer:
    """The pieces of one answer, special tokens left out; together they are the text that decoding all at once gives."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: list[int] = []  # tokens of the last piece handed out
        self._new: list[int] = []  # tokens since then

    def push(self, token: int) -> str:
        """The text this token completes; empty while a character is incomplete."""
        self._new.append(token)
        piece = self._added()
        if not piece or piece.endswith(_INCOMPLETE):
            return ""
        self._known, self._new = self._new, []
        return piece

    def finish(self) -> str:
        """What is left at the end, incomplete or not."""
        piece = self._added()
        self._known, self._new = self._new, []
        return piece

    def _added(self) -> str:
        before = self._decode(self._known)
        return self._decode(self._known + self._new)[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text
