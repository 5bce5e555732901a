"""Prompts made with a tokenizer: raw text, chats, and chats that a template refuses."""

from __future__ import annotations

from typing import Any

import pytest

from eyas.errors import RequestError
from eyas.text.chats import Message
from eyas.text.template import encode_chat, encode_text


def test_encoding(tokenizer: Any) -> None:
    assert encode_text(tokenizer, "def add") == tuple(tokenizer("def add")["input_ids"])
    chat = [Message(role="system", content="s"), Message(role="user", content="u")]
    text = "<|system|>s<|end|><|user|>u<|end|><|assistant|>"
    assert tokenizer.decode(encode_chat(tokenizer, chat)) == text


def test_chats_that_cannot_be_encoded() -> None:
    class Bare:
        chat_template = None

    class Picky:
        chat_template = "x"

        def apply_chat_template(self, *_: Any, **__: Any) -> Any:
            raise ValueError("roles must alternate")

    said = [Message(role="user", content="a")]
    with pytest.raises(RequestError, match="no chat template: use rows with `prompt` or `token_ids`"):
        encode_chat(Bare(), said)
    with pytest.raises(RequestError, match="refuses this chat: roles must alternate"):
        encode_chat(Picky(), said)
