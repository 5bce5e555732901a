"""Text to tokens, each with the exact characters it covers. Legend: T tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eyas.errors import ModelError


class Span(NamedTuple):
    """Characters [start, stop) that the assistant wrote."""

    start: int
    stop: int
    closed: bool
    """It ends in an end mark, which is one token whatever whitespace that token takes in after it."""


class Encoded(NamedTuple):
    """A text as tokens."""

    tokens: NDArray[np.int64]  # [T]
    starts: NDArray[np.int64]  # [T] first character of each; bytes of one character share it
    stops: NDArray[np.int64]  # [T] after its last character

    def inside(self, spans: Sequence[Span]) -> list[tuple[int, int]]:
        """Token ranges that lie in the spans. A token half in a span is not the assistant's: it can't be generated."""
        ranges = []
        for span in spans:
            first = int(np.searchsorted(self.starts, span.start, side="left"))
            last = int(np.searchsorted(self.starts, span.stop, side="left"))
            while not span.closed and last > first and self.stops[last - 1] > span.stop:
                last -= 1
            if last > first:
                ranges.append((first, last))
        return ranges


class OffsetEncoder:
    """A fast tokenizer without what it does after tokenizing: some of them shorten offsets by the whitespace."""

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ModelError(
                f"the tokenizer {tokenizer.name_or_path} is a slow one ({type(tokenizer).__name__}): "
                "it can't say which characters a token covers; save it as a fast tokenizer (tokenizer.json)"
            )
        from tokenizers import Tokenizer

        own = tokenizer.backend_tokenizer
        settings = json.loads(own.to_str()) | {"post_processor": None, "truncation": None, "padding": None}
        self._backend = Tokenizer.from_str(json.dumps(settings))
        self._backend.encode_special_tokens = own.encode_special_tokens
        self._tokenizer = tokenizer

    def encode(self, text: str) -> Encoded:
        """The tokens of a rendered chat; nothing is added."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        offsets = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        return Encoded(np.asarray(encoding.ids, dtype=np.int64), offsets[:, 0], offsets[:, 1])

    def check(self, text: str) -> None:
        """ModelError if the tokens are not the ones that the tokenizer itself makes."""
        if self._tokenizer(text, add_special_tokens=False)["input_ids"] != self.encode(text).tokens.tolist():
            raise ModelError(
                f"the tokenizer {self._tokenizer.name_or_path} does more than its tokenizer.json says, so tokens can't "
                "be traced to characters; save it with save_pretrained and use that"
            )
