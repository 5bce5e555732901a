"""Prompts made with a tokenizer: raw text, chats, and chats that a template refuses."""

from __future__ import annotations

from typing import Any

import pytest

from eyas.errors import RequestError
from eyas.text.chats import Message
from eyas.text.template import encode_chat, encode_text, template_variables


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


class Templated:
    """A tokenizer with nothing but a template."""

    def __init__(self, source: str) -> None:
        self.source = source

    def get_chat_template(self, _: None, tools: object) -> str:
        return self.source + ("{{ tool_style }}" if tools else "")

    def apply_chat_template(self, conversation: object, tools: object = None, tokenize: bool = True) -> None:
        """Its parameters are nobody's to set."""


def test_variables_that_a_template_reads() -> None:
    source = (
        "{{ bos_token }}{%- if not date is defined %}{%- set date = strftime_now('%d') %}{% endif %}"
        "{% for m in messages %}{% if m.x %}{% continue %}{% endif %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% endfor %}{% if tools or enable_thinking is defined and enable_thinking %}{{ raise_exception(date) }}"
        "{% endif %}{% set ns = namespace(a=1) %}{{ ns.a }}{{ conversation }}{{ tokenize }}"
    )
    assert template_variables(Templated(source)) == {"bos_token", "date", "enable_thinking"}
    assert template_variables(Templated("x"), [{}]) == {"tool_style"}
    with pytest.raises(RequestError, match="template can't be read"):
        template_variables(Templated("{% if %}"))
