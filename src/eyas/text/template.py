"""A tokenizer's chat template: chats to text. It is the same text that `encode_chat` makes prompts of."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from eyas.errors import ModelError, RowError
from eyas.text.chats import Message

REFUSED = "the template refuses the chat"

Turn = dict[str, Any]
"""A message as templates take it."""

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_CALL = {"id": "call00000", "type": "function", "function": {"name": "look_up", "arguments": {"word": "eyas"}}}
_CALLING: list[Turn] = [
    {"role": "user", "content": "What is an eyas?"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
]


class ChatTemplate:
    """The template of one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ModelError(f"the tokenizer {tokenizer.name_or_path} has no chat template: chats can't be rendered")
        self._tokenizer = tokenizer

    def turns(self, messages: Sequence[Message]) -> list[Turn]:
        """The messages as this template reads them: most want a call's arguments as an object, some as text."""
        return turns_for(self._tokenizer, messages)

    def shows_calls(self) -> bool:
        """Does the template know tool calls at all?"""
        return _call_form(self._tokenizer, str(self._tokenizer.chat_template)) is not None

    def render(self, turns: Sequence[Turn], tools: Sequence[dict[str, Any]] | None, prompt: bool = False) -> str:
        """The chat as text, with `prompt` up to where the assistant begins; RowError if the template refuses it."""
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(turns), tools=list(tools) if tools else None, tokenize=False, add_generation_prompt=prompt
            )
        except Exception as error:  # templates raise whatever they like
            raise RowError(REFUSED, str(error) or type(error).__name__) from error
        return text

    def has_generation_marks(self, tools: Sequence[dict[str, Any]] | None) -> bool:
        """Does the template itself say what the assistant wrote?"""
        return _GENERATION.search(self._source(tools)) is not None

    def generated(
        self, turns: Sequence[Turn], tools: Sequence[dict[str, Any]] | None
    ) -> tuple[str, list[tuple[int, int]]]:
        """The chat as text, and the characters between generation marks."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, spans = render_jinja_template(
                [list(turns)],
                tools=list(tools) if tools else None,
                chat_template=self._source(tools),
                return_assistant_tokens_mask=True,
                **self._tokenizer.special_tokens_map,
            )
        except Exception as error:  # as above
            raise RowError(REFUSED, str(error) or type(error).__name__) from error
        return texts[0], [(start, stop) for start, stop in spans[0] if stop > start]

    def _source(self, tools: Sequence[dict[str, Any]] | None) -> str:
        source: str = self._tokenizer.get_chat_template(None, list(tools) if tools else None)
        return source


def turns_for(tokenizer: Any, messages: Sequence[Message]) -> list[Turn]:
    """See `ChatTemplate.turns`."""
    turns = [message.for_template() for message in messages]
    if any("tool_calls" in turn for turn in turns) and _call_form(tokenizer, str(tokenizer.chat_template)) == "text":
        for turn in turns:
            _write_arguments(turn)
    return turns


def _write_arguments(turn: Turn) -> None:
    for call in turn.get("tool_calls", ()):
        function = call["function"]
        if not isinstance(function["arguments"], str):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)


@lru_cache(maxsize=16)
def _call_form(tokenizer: Any, source: str) -> str | None:  # noqa: ARG001  # a template can be replaced
    """`object` or `text`: how the template wants a call's arguments; None if it shows no calls either way."""
    template = ChatTemplate(tokenizer)
    written = [dict(turn) for turn in json.loads(json.dumps(_CALLING))]
    for turn in written:
        _write_arguments(turn)
    for form, turns in (("object", _CALLING), ("text", written)):
        try:
            text = template.render(turns, None)
        except RowError:
            continue
        # an object written by string concatenation comes out as Python writes it
        if "look_up" in text and "{'word'" not in text:
            return form
    return None
