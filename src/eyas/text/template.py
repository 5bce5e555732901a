"""Chat templates and tokenization: chats and raw text as token ids, chats as text.

`encode_chat` and `encode_text` make the prompts of the server and of every command that decodes. `ChatTemplate` renders
the same chats as text and marks what the assistant wrote in them, which is what training data needs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from eyas.errors import ModelError, RequestError, RowError
from eyas.text.chats import Message

REFUSED = "the template refuses the chat"

Turn = dict[str, Any]
"""A message in the form that chat templates take."""

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_CALL = {"id": "call00000", "type": "function", "function": {"name": "look_up", "arguments": {"word": "eyas"}}}
_CHAT_WITH_CALL: list[Turn] = [
    {"role": "user", "content": "What is an eyas?"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
]


def encode_text(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Tokenize raw text, with the special tokens that the tokenizer adds by itself."""
    return tuple(tokenizer(text)["input_ids"])


def encode_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] | None = None,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    **variables: Any,
) -> tuple[int, ...]:
    """Tokenize a chat up to where the assistant's next answer begins.

    Without `add_generation_prompt` no answer is begun; with `continue_final_message` the last message isn't ended.
    `variables` are passed to the template. Raises RequestError if there is no template or if it refuses the chat.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise RequestError("the tokenizer has no chat template: use rows with `prompt` or `token_ids`")
    turns = _template_turns(tokenizer, messages)
    schemas = list(tools) if tools else None
    try:
        ids = tokenizer.apply_chat_template(
            turns,
            tools=schemas,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            return_dict=False,
            **variables,
        )
    except Exception as error:  # templates raise whatever they like
        raise RequestError(f"the chat template refuses this chat: {error}") from error
    return tuple(ids)


class ChatTemplate:
    """The chat template of one tokenizer; ModelError if the tokenizer has none."""

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ModelError(f"the tokenizer {tokenizer.name_or_path} has no chat template: chats can't be rendered")
        self._tokenizer = tokenizer

    def turns(self, messages: Sequence[Message]) -> list[Turn]:
        """The messages as this template reads them: most want a call's arguments as an object, some as text."""
        return _template_turns(self._tokenizer, messages)

    def shows_calls(self) -> bool:
        """Whether the template renders tool calls at all."""
        return _arguments_form(self._tokenizer, str(self._tokenizer.chat_template)) is not None

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
        """Whether the template marks what the assistant wrote, with `{% generation %}` blocks."""
        return _GENERATION.search(self._source(tools)) is not None

    def generated(
        self, turns: Sequence[Turn], tools: Sequence[dict[str, Any]] | None
    ) -> tuple[str, list[tuple[int, int]]]:
        """The chat as text, and the half-open character spans inside generation marks; RowError if it is refused."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, spans = render_jinja_template(
                [list(turns)],
                tools=list(tools) if tools else None,
                chat_template=self._source(tools),
                return_assistant_tokens_mask=True,
                **self._tokenizer.special_tokens_map,
            )
        except Exception as error:  # templates raise whatever they like
            raise RowError(REFUSED, str(error) or type(error).__name__) from error
        return texts[0], [(start, stop) for start, stop in spans[0] if stop > start]

    def _source(self, tools: Sequence[dict[str, Any]] | None) -> str:
        source: str = self._tokenizer.get_chat_template(None, list(tools) if tools else None)
        return source


def _template_turns(tokenizer: Any, messages: Sequence[Message]) -> list[Turn]:
    turns = [message.for_template() for message in messages]
    calls = any("tool_calls" in turn for turn in turns)
    if calls and _arguments_form(tokenizer, str(tokenizer.chat_template)) == "text":
        for turn in turns:
            _arguments_to_text(turn)
    return turns


def _arguments_to_text(turn: Turn) -> None:
    for call in turn.get("tool_calls", ()):
        function = call["function"]
        if not isinstance(function["arguments"], str):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)


@lru_cache(maxsize=16)
def _arguments_form(tokenizer: Any, source: str) -> str | None:  # noqa: ARG001  # a template can be replaced
    """Whether the template wants a call's arguments as `object` or as `text`; None if it shows no calls either way."""
    template = ChatTemplate(tokenizer)
    as_text = [dict(turn) for turn in json.loads(json.dumps(_CHAT_WITH_CALL))]
    for turn in as_text:
        _arguments_to_text(turn)
    for form, turns in (("object", _CHAT_WITH_CALL), ("text", as_text)):
        try:
            text = template.render(turns, None)
        except RowError:
            continue
        # an object that was put into a string by concatenation comes out as Python writes it
        if "look_up" in text and "{'word'" not in text:
            return form
    return None
