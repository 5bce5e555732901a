"""Chats and documents -> token ids with a loss mask."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eyas.data.chats import Chat
from eyas.errors import DataError


@dataclass(frozen=True)
class TokenRow:
    """One chat or document. Legend: T = its length."""

    tokens: NDArray[np.int64]  # [T]
    loss_mask: NDArray[np.bool_]  # [T] true where the assistant wrote the token (its end mark included)
    id: str = ""  # the chat's


def tokenize_chat(tokenizer: Any, chat: Chat) -> TokenRow:
    """The chat's own tokens if it carries them, else rendered with the tokenizer's template.

    `{% generation %}` marks make the mask exact. Templates without them are rendered turn by turn: what a
    turn adds to the prompt before it, up to its last end token, is the assistant's.
    """
    if chat.tokens is not None:
        given = np.zeros(len(chat.tokens), dtype=np.bool_)
        for start, stop in chat.answers or ():
            given[start:stop] = True
        return TokenRow(np.asarray(chat.tokens, dtype=np.int64), given, chat.id)
    messages = [message.for_template() for message in chat.messages]
    marked = "{% generation %}" in (tokenizer.chat_template or "")
    encoded = tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=marked
    )
    tokens = np.asarray(encoded["input_ids"], dtype=np.int64)
    if marked:
        return TokenRow(tokens, np.asarray(encoded["assistant_masks"], dtype=np.bool_), chat.id)
    mask = np.zeros(len(tokens), dtype=np.bool_)
    for i, message in enumerate(chat.messages):
        if message.role == "assistant":
            start = _prefix(tokenizer, chat, tokens, i, prompt=True)
            stop = _prefix(tokenizer, chat, tokens, i + 1, prompt=False)
            ends = np.flatnonzero(tokens[start:stop] == tokenizer.eos_token_id)
            mask[start : start + ends[-1] + 1 if len(ends) else stop] = True
    return TokenRow(tokens, mask, chat.id)


def _prefix(tokenizer: Any, chat: Chat, tokens: NDArray[np.int64], turns: int, prompt: bool) -> int:
    """Length of the first `turns` turns, checked to be what the whole chat starts with."""
    encoded = tokenizer.apply_chat_template(
        [message.for_template() for message in chat.messages[:turns]],
        tokenize=True, return_dict=True, add_generation_prompt=prompt,
    )  # fmt: skip
    ids = encoded["input_ids"]
    if list(tokens[: len(ids)]) != list(ids):
        raise DataError(
            f"chat {chat.id}: the chat template of {tokenizer.name_or_path} renders a turn differently once "
            "others follow, so answers can't be told from prompts; put {% generation %} and "
            "{% endgeneration %} around its assistant content"
        )
    return len(ids)


def tokenize_document(tokenizer: Any, text: str, end_id: int) -> TokenRow:
    """Plain text closed by `end_id`; every token counts."""
    tokens = np.asarray([*tokenizer(text, add_special_tokens=False)["input_ids"], end_id], dtype=np.int64)
    return TokenRow(tokens, np.ones(len(tokens), dtype=np.bool_))


def pack(rows: Iterable[TokenRow], length: int) -> NDArray[np.int64]:
    """Lay rows end to end and cut to blocks [N, length]; the tail that fills no block is dropped."""
    streams = [row.tokens for row in rows]
    stream = np.concatenate(streams) if streams else np.zeros(0, dtype=np.int64)
    count = len(stream) // length
    if count == 0:
        raise DataError(f"{len(stream)} tokens don't fill one block of {length}; add data or shorten the blocks")
    return stream[: count * length].reshape(count, length)
