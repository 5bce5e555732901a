"""Incremental detokenization for streams: the text that each new token adds.

Decoding token by token gives different text than decoding all tokens together: the bytes of one character may lie in
several tokens, and the first token of a text loses its leading space. So new tokens are decoded together with those of
the last emitted piece, and only the text they add is emitted.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

_REPLACEMENT = "\ufffd"
_LONGEST_CHARACTER = 4
_MAX_PENDING = 32
"""Maximum tokens held back for an incomplete character. No character takes more, so a longer run isn't one."""


class Detokenizer:
    """Detokenizes one sequence; its pieces joined are the text of decoding all tokens together.

    Special tokens are left out, except for `visible_specials`. Without a tokenizer there is no text.
    """

    def __init__(self, tokenizer: Any, visible_specials: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._skipped = special_token_ids(tokenizer) - visible_specials
        self._context: list[int] = []  # tokens of the piece emitted last
        self._pending: list[int] = []  # tokens whose text is not emitted yet

    def push(self, *tokens: int) -> str:
        """Add tokens and return the text they complete; empty while a character is incomplete."""
        self._pending += [token for token in tokens if token not in self._skipped]
        piece = self._added_text(self._pending)
        if not piece or piece.endswith(_REPLACEMENT):
            return "" if len(self._pending) <= _MAX_PENDING else self._complete_part(piece)
        return self._emit(len(self._pending), piece)

    def finish(self) -> str:
        """Return the rest of the text at the end of the sequence, complete or not."""
        return self._emit(len(self._pending), self._added_text(self._pending))

    def _complete_part(self, piece: str) -> str:
        """Emit the part of the pending text that later tokens can't change."""
        for count in range(len(self._pending) - _LONGEST_CHARACTER, len(self._pending) - 2 * _LONGEST_CHARACTER, -1):
            first = self._added_text(self._pending[:count])
            if first + self._decode(self._pending[count:]) == piece:
                return self._emit(count, first)
        return self._emit(len(self._pending), piece)

    def _emit(self, count: int, piece: str) -> str:
        self._context = self._pending[:count] or self._context
        self._pending = self._pending[count:]
        return piece

    def _added_text(self, tokens: list[int]) -> str:
        if not tokens:
            return ""
        before = self._decode(self._context)
        return self._decode(self._context + tokens)[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids) if ids and self._tokenizer is not None else ""
        return text


@lru_cache(maxsize=8)
def special_token_ids(tokenizer: Any) -> frozenset[int]:
    """Token ids that decoding with `skip_special_tokens` leaves out."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(token for token, entry in added.items() if entry.special)
