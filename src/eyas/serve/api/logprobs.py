"""Log-probabilities as OpenAI writes them: tokens as text, and as bytes where text can't say what they are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from eyas.serve.answer import Scored

_LEAST = -9999.0
"""What OpenAI writes for tokens that are impossible: JSON has no infinity."""


class TokenNames:
    """The text and bytes of single tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._anchor: list[int] = tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
        self._shared = len(tokenizer.decode(self._anchor))
        self._known: dict[int, tuple[str, bytes]] = {}

    def __call__(self, token: int) -> tuple[str, bytes]:
        """As it reads behind other text, so with its leading space."""
        if token not in self._known:
            text = self._tokenizer.decode([*self._anchor, token])[self._shared :]
            data = text.encode()
            if "\ufffd" in text:  # a part of a character
                data = _raw_bytes(self._tokenizer.convert_ids_to_tokens(token)) or data
            self._known[token] = text, data
        return self._known[token]


def chat_logprobs(names: TokenNames, scored: Sequence[Scored]) -> dict[str, Any]:
    """The chat API's form."""
    content = [
        _entry(names, each.logprobs.token_id, each.logprobs.logprob)
        | {"top_logprobs": [_entry(names, token, value) for token, value in each.logprobs.top]}
        for each in scored
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(names: TokenNames, scored: Sequence[Scored], before: int = 0) -> dict[str, Any]:
    """The completions API's form; offsets count from the beginning of the text."""
    return {
        "tokens": [names(each.logprobs.token_id)[0] for each in scored],
        "token_logprobs": [_finite(each.logprobs.logprob) for each in scored],
        "top_logprobs": [_by_text(names, each.logprobs.top) for each in scored],
        "text_offset": [before + each.offset for each in scored],
    }


def _entry(names: TokenNames, token: int, value: float) -> dict[str, Any]:
    text, data = names(token)
    return {"token": text, "logprob": _finite(value), "bytes": list(data)}


def _by_text(names: TokenNames, top: Sequence[tuple[int, float]]) -> dict[str, float]:
    """Of tokens that read alike, the likelier."""
    found: dict[str, float] = {}
    for token, value in top:
        found.setdefault(names(token)[0], _finite(value))
    return found


def _finite(value: float) -> float:
    return max(value, _LEAST)


def _raw_bytes(piece: str) -> bytes | None:
    """The bytes a vocabulary's piece stands for: `<0xE2>`, or one character a byte."""
    if len(piece) == 6 and piece.startswith("<0x"):
        return bytes([int(piece[3:5], 16)])
    table = _byte_alphabet()
    return bytes(table[c] for c in piece) if all(c in table for c in piece) else None


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: printable bytes are themselves, the others shifted up from 256."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}
