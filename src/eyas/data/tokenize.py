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


def tokenize_chat(tokenizer: Any, chat: Chat) -> TokenRow:
    """Render with the tokenizer's own template; its `{% generation %}` marks make the mask exact."""
    if "{% generation %}" not in (tokenizer.chat_template or ""):
        raise DataError(
            f"the chat template of {tokenizer.name_or_path or 'this tokenizer'} has no generation marks, so answers "
            "can't be told from prompts; wrap its assistant content in {% generation %} ... {% endgeneration %}"
        )
    encoded = tokenizer.apply_chat_template(
        [message.model_dump() for message in chat.messages],
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return TokenRow(
        np.asarray(encoded["input_ids"], dtype=np.int64),
        np.asarray(encoded["assistant_masks"], dtype=np.bool_),
    )


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
