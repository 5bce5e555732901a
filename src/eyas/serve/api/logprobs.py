"""Log-probabilities as JSON, in OpenAI's two forms: tokens as text and, in chats, also as UTF-8 bytes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from eyas.serve.api.generation import ScoredToken
from eyas.text.detokenizer import Detokenizer, special_token_ids
from eyas.types import PromptLogprobs

_MIN_LOGPROB = -9999.0
"""OpenAI's value for impossible tokens, because JSON has no infinity."""
_AT_ONCE, _REST_SECONDS = 100, 0.01
"""Prompt tokens written in a row, which takes about 5 ms, and the pause after them."""


class TokenTexts:
    """The texts and bytes of single tokens, each computed once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._before: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
        self._before_length = len(tokenizer.decode(self._before))
        self._cache: dict[int, tuple[str, bytes]] = {}

    def __call__(self, token: int) -> tuple[str, bytes]:
        """A token's text as it follows other text, with its leading space, and its bytes."""
        if token not in self._cache:
            text = self._tokenizer.decode([*self._before, token])[self._before_length :]
            data = text.encode()
            if "\ufffd" in text:  # a part of a character, which only bytes can show
                data = _raw_bytes(self._tokenizer.convert_ids_to_tokens(token)) or data
            self._cache[token] = text, data
        return self._cache[token]


def chat_logprobs(token_texts: TokenTexts, scored: Sequence[ScoredToken]) -> dict[str, Any]:
    """The `logprobs` of a choice of the chat API."""
    content = [
        _entry(token_texts, each.logprobs.token_id, each.logprobs.logprob)
        | {"top_logprobs": [_entry(token_texts, token, value) for token, value in each.logprobs.top]}
        for each in scored
    ]
    return {"content": content, "refusal": None}


@dataclass(frozen=True)
class Echo:
    """A prompt as the text that its choices begin with."""

    text: str
    offsets: tuple[int, ...] = ()
    """Where its tokens begin in the text, in characters; empty unless they have log-probabilities."""

    @classmethod
    def of(cls, tokenizer: Any, prompt: str | Sequence[int], tokens: Sequence[int], scored: bool) -> Echo:
        """Make it from a `prompt` as sent and its `tokens`; those that the tokenizer adds begin where the text does."""
        text = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
        if not scored:
            return cls(text)
        detokenizer = Detokenizer(tokenizer, visible_specials=special_token_ids(tokenizer))
        offsets = []
        length = 0
        for token in tokens:
            offsets.append(length)
            length += len(detokenizer.push(token))
        added = length + len(detokenizer.finish()) - len(text)
        return cls(text, tuple(min(max(0, offset - added), len(text)) for offset in offsets))


def completion_logprobs(token_texts: TokenTexts, scored: Sequence[ScoredToken], before: int = 0) -> dict[str, Any]:
    """The `logprobs` of a choice of the completions API; its output begins `before` characters into the text."""
    return {
        "tokens": [token_texts(each.logprobs.token_id)[0] for each in scored],
        "token_logprobs": [_finite(each.logprobs.logprob) for each in scored],
        "top_logprobs": [_by_text(token_texts, each.logprobs.top) for each in scored],
        "text_offset": [before + each.offset for each in scored],
    }


def echoed_logprobs(
    token_texts: TokenTexts, echo: Echo, first: int, rest: Sequence[PromptLogprobs], alternatives: int
) -> dict[str, Any]:
    """The same for an echoed prompt: its `first` token, which has no log-probability, and the `rest`."""
    tops = [_by_text(token_texts, each.top[:alternatives]) for each in rest]
    return {
        "tokens": [token_texts(token)[0] for token in (first, *(each.token_id for each in rest))],
        "token_logprobs": [None, *(_finite(each.logprob) for each in rest)],
        "top_logprobs": [None, *tops],
        "text_offset": list(echo.offsets),
    }


def prompt_logprobs(
    token_texts: TokenTexts, scored: Sequence[PromptLogprobs], alternatives: int
) -> list[dict[str, Any] | None]:
    """The field `prompt_logprobs` in vLLM's form: by token id, the prompt's token and the likeliest in its place.

    For a long prompt this runs on a worker thread, with pauses that release the GIL to other threads.
    """
    entries: list[dict[str, Any] | None] = [None]
    for each in scored:
        if len(entries) % _AT_ONCE == 0:
            time.sleep(_REST_SECONDS)
        ranked = [(token, value, rank) for rank, (token, value) in enumerate(each.top[:alternatives], start=1)]
        entry: dict[str, Any] = {}
        for token, value, rank in ((each.token_id, each.logprob, each.rank), *ranked):
            fields = {"logprob": _finite(value), "rank": rank, "decoded_token": token_texts(token)[0]}
            entry.setdefault(str(token), fields)
        entries.append(entry)
    return entries


def _entry(token_texts: TokenTexts, token: int, value: float) -> dict[str, Any]:
    text, data = token_texts(token)
    return {"token": text, "logprob": _finite(value), "bytes": list(data)}


def _by_text(token_texts: TokenTexts, top: Sequence[tuple[int, float]]) -> dict[str, float]:
    """Log-probabilities by token text; among tokens with the same text, the most likely one counts."""
    found: dict[str, float] = {}
    for token, value in top:
        found.setdefault(token_texts(token)[0], _finite(value))
    return found


def _finite(value: float) -> float:
    return max(value, _MIN_LOGPROB)


def _raw_bytes(piece: str) -> bytes | None:
    """The bytes of a vocabulary piece that is written as `<0xE2>` or with one character per byte; otherwise None."""
    if len(piece) == 6 and piece.startswith("<0x"):
        return bytes([int(piece[3:5], 16)])
    table = _byte_alphabet()
    return bytes(table[c] for c in piece) if all(c in table for c in piece) else None


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's byte for each character: printable bytes are themselves, the others are counted up from 256."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}
