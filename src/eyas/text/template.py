"""Chat templates and tokenization: chats and raw text as token ids, chats as text.

`encode_chat` and `encode_text` make the prompts of the server and of every command that decodes. `ChatTemplate` renders
the same chats as text and marks what the assistant wrote in them, which is what training data needs.
"""

from __future__ import annotations

import inspect
import json
import re
import secrets
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cached_property, lru_cache
from itertools import product
from typing import Any, NamedTuple

from eyas.errors import ModelError, RequestError, RowError
from eyas.text.chats import Message

REFUSED = "the template refuses the chat"
NO_TOKENIZER = (
    "the model has no tokenizer files (tokenizer.json, tokenizer_config.json), so text can't be read or written: add "
    "them, or give and take token ids"
)

Turn = dict[str, Any]
"""A message in the form that chat templates take."""

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_GENERATION_TAGS = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
_FUNCTIONS = frozenset({"raise_exception", "strftime_now"})
"""Functions that transformers offers to every template, in addition to Jinja's own."""
_FIRST_CALL, _SECOND_CALL = (
    {"id": number, "type": "function", "function": {"name": "look_up", "arguments": {"word": "eyas"}}}
    for number in ("call00000", "call00001")
)
_CALLING: Turn = {"role": "assistant", "tool_calls": [_FIRST_CALL]}
_QUESTION: Turn = {"role": "user", "content": "What is an eyas?"}
_RESULT: Turn = {"role": "tool", "tool_call_id": "call00000", "content": "a young falcon"}
_CHATS_WITH_CALLS: tuple[list[Turn], ...] = (
    [_QUESTION, _CALLING],
    [_QUESTION, {**_CALLING, "reasoning_content": "I look it up."}, _RESULT],
    [_QUESTION, _CALLING, _RESULT, {"role": "assistant", "content": "A falcon."}, _QUESTION, _CALLING, _RESULT],
    [
        _QUESTION,
        {**_CALLING, "tool_calls": [_FIRST_CALL, _SECOND_CALL]},
        _RESULT,
        {**_RESULT, "tool_call_id": "call00001"},
    ],
)
"""Chats in which the assistant calls tools without saying anything."""


def required(tokenizer: Any) -> Any:
    """The tokenizer; RequestError if the model came without one."""
    if tokenizer is None:
        raise RequestError(NO_TOKENIZER)
    return tokenizer


def has_chat_template(tokenizer: Any) -> bool:
    """Whether there is a tokenizer that has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def encode_text(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Tokenize raw text, with the special tokens that the tokenizer adds itself; RequestError without a tokenizer."""
    required(tokenizer)
    return tuple(tokenizer(text)["input_ids"])


def encode_prediction(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Tokenize what an answer is expected to be; special tokens spelled out in it become those tokens.

    RequestError without a tokenizer.
    """
    required(tokenizer)
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def encode_chat(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] | None = None,
    *,
    variables: Mapping[str, Any] | None = None,
    parse_special_tokens: bool = False,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> tuple[int, ...]:
    """Tokenize a chat up to where the assistant's next answer begins.

    Without `add_generation_prompt` no answer is begun; with `continue_final_message` the last message isn't ended.
    `variables` are passed to the template, and must be among `template_variables`. What messages, tools and variables
    say is text, even where it looks like a control token (`<|im_end|>`), unless `parse_special_tokens` is set. Raises
    RequestError if there is no template or if it refuses the chat.
    """
    if not has_chat_template(required(tokenizer)):
        raise RequestError("the tokenizer has no chat template: use rows with `prompt` or `token_ids`")
    turns = _template_turns(tokenizer, messages)
    schemas = list(tools) if tools else None
    given = dict(variables or {})
    control = None
    if not parse_special_tokens:
        control = control_tokens(tokenizer, str(tokenizer.chat_template))
        texts = (control.break_up_turns(turns), control.break_up(schemas), control.break_up(given))
        if texts == (turns, schemas, given):
            control = None
        else:
            (turns, schemas, given), tokenizer = texts, control.tokenizer
    try:
        ids = tokenizer.apply_chat_template(
            turns,
            tools=schemas,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            return_dict=False,
            **given,
        )
    except Exception as error:  # templates raise whatever they like
        raise RequestError(f"the chat template refuses this chat: {error}") from error
    return tuple(ids) if control is None else tuple(token for token in ids if token != control.mark_id)


def encode_user_turn(tokenizer: Any, messages: Sequence[Message]) -> tuple[tuple[int, ...], int]:
    """Tokenize a chat up to where the user's next message begins; the second value is the token that ends it there.

    A model that continues from here writes what a user would say: Magpie, arXiv 2406.08464. Raises RequestError if
    there is no template, if it refuses the chat, or if it ends a user's message with plain text.
    """
    if not has_chat_template(required(tokenizer)):
        raise RequestError("the tokenizer has no chat template, which says where a user's message begins")
    control = control_tokens(tokenizer, str(tokenizer.chat_template))
    turns = control.break_up_turns(_template_turns(tokenizer, messages))
    try:
        ids = control.tokenizer.apply_chat_template(
            [*turns, {"role": "user", "content": control.mark}], return_dict=False
        )
    except Exception as error:  # templates raise whatever they like
        raise RequestError(f"the chat template refuses this chat: {error}") from error
    last = max((at for at, token in enumerate(ids) if token == control.mark_id), default=None)
    if last is None:
        raise RequestError("the chat template doesn't write what the user says")
    added = tokenizer.added_tokens_decoder
    end = next((token for token in ids[last + 1 :] if tokenizer.decode([token]).strip()), None)
    if end is None or end not in added or not added[end].special:
        raise RequestError("the chat template ends a user's message with plain text, so its end can't be detected")
    return tuple(token for token in ids[:last] if token != control.mark_id), end


class ControlTokens:
    """The texts that a tokenizer reads as control tokens, and the means to have them read as plain text.

    Control tokens are the special ones, and those added tokens that the chat template writes (`<tool_call>`). A mark
    after the first character of such a text breaks it up. A copy of the tokenizer reads the mark as a token of its
    own, which is removed in the end: the rest are the tokens of the plain text.
    """

    def __init__(self, tokenizer: Any, template: str) -> None:
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        special = {token.content for token in added if token.special}
        written = {token.content for token in added if token.content.strip() and token.content in template}
        self._special = _beginnings(special)
        self._all = _beginnings(special | written)
        self._original = tokenizer
        self.mark = f"mark{secrets.token_hex(16)}"  # random, so that no text contains it

    @cached_property
    def tokenizer(self) -> Any:
        """The copy of the tokenizer that knows the mark."""
        from tokenizers import AddedToken

        copied = deepcopy(self._original)
        copied.add_tokens([AddedToken(self.mark, normalized=False)])
        return copied

    @property
    def mark_id(self) -> int:
        """The token id of the mark."""
        return int(self.tokenizer.convert_tokens_to_ids(self.mark))

    def break_up_turns(self, turns: Sequence[Turn]) -> list[Turn]:
        """The messages of a chat with a mark in each control token that they don't write themselves."""
        return [self.break_up(turn, only_special=turn["role"] == "assistant") for turn in turns]

    def break_up(self, value: Any, only_special: bool = False) -> Any:
        """The same text, or object made of texts, with a mark in each control token, or only in the special ones.

        An assistant's messages hold what models write themselves, such as `</think>`, and templates look for it.
        """
        pattern = self._special if only_special else self._all
        if pattern is None:
            return value
        if isinstance(value, str):
            return pattern.sub(lambda found: found[0] + self.mark, value)
        if isinstance(value, Mapping):
            return {self.break_up(key, only_special): self.break_up(each, only_special) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.break_up(each, only_special) for each in value]
        return value


@lru_cache(maxsize=4)
def control_tokens(tokenizer: Any, template: str) -> ControlTokens:
    """The control tokens of a tokenizer with this chat template; a cache key too, since it can be replaced."""
    return ControlTokens(tokenizer, template)


def _beginnings(texts: Collection[str]) -> re.Pattern[str] | None:
    """A pattern that finds every character with which one of the texts begins; None without texts."""
    rests: dict[str, set[str]] = {}
    for text in texts:
        if len(text) > 1:
            rests.setdefault(text[0], set()).add(text[1:])
    return (
        re.compile("|".join(f"{re.escape(first)}(?={_any_of(rest)})" for first, rest in rests.items()))
        if rests
        else None
    )


def _any_of(texts: set[str]) -> str:
    """A regular expression for any of the texts; a trie, so that matching time doesn't depend on their number."""
    if "" in texts:
        return ""
    rests: dict[str, set[str]] = {}
    for text in texts:
        rests.setdefault(text[0], set()).add(text[1:])
    return "(?:" + "|".join(re.escape(first) + _any_of(rest) for first, rest in rests.items()) + ")"


def template_variables(tokenizer: Any, tools: Sequence[dict[str, Any]] | None = None) -> frozenset[str]:
    """The variables that the chat template reads and the caller may set, such as `enable_thinking`.

    Raises RequestError if there is no template that can be read.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    given = {"messages", "self"}
    for function in (tokenizer.apply_chat_template, render_jinja_template):
        given |= inspect.signature(function).parameters.keys()
    return _undeclared_variables(_template_source(tokenizer, tools)) - given


class ChatTemplate:
    """The chat template of one tokenizer; ModelError if the tokenizer has none."""

    def __init__(self, tokenizer: Any) -> None:
        if tokenizer is None:
            raise ModelError(NO_TOKENIZER)
        if not has_chat_template(tokenizer):
            raise ModelError(f"the tokenizer {tokenizer.name_or_path} has no chat template: chats can't be rendered")
        self._tokenizer = tokenizer

    def turns(self, messages: Sequence[Message]) -> list[Turn]:
        """The messages as this template reads them.

        Most templates want a call's arguments as an object, some as text; some want a content with every call, or
        every call in a message of its own.
        """
        return _template_turns(self._tokenizer, messages)

    def shows_calls(self) -> bool:
        """Whether the template renders tool calls at all."""
        return _call_form(self._tokenizer, str(self._tokenizer.chat_template)).calls_shown > 0

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
        return _GENERATION.search(_template_source(self._tokenizer, tools)) is not None

    def generated(
        self, turns: Sequence[Turn], tools: Sequence[dict[str, Any]] | None
    ) -> tuple[str, list[tuple[int, int]]]:
        """The chat as text, and the half-open character spans inside generation marks; RowError if it is refused."""
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            texts, spans = render_jinja_template(
                [list(turns)],
                tools=list(tools) if tools else None,
                chat_template=_template_source(self._tokenizer, tools),
                return_assistant_tokens_mask=True,
                **self._tokenizer.special_tokens_map,
            )
        except Exception as error:  # templates raise whatever they like
            raise RowError(REFUSED, str(error) or type(error).__name__) from error
        return texts[0], [(start, stop) for start, stop in spans[0] if stop > start]


def _template_source(tokenizer: Any, tools: Sequence[dict[str, Any]] | None) -> str:
    source: str = tokenizer.get_chat_template(None, list(tools) if tools else None)
    return source


@lru_cache(maxsize=16)
def _undeclared_variables(source: str) -> frozenset[str]:
    """The variables that a template reads from outside; RequestError if it can't be parsed."""
    from jinja2 import Environment, TemplateError, meta

    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        read = meta.find_undeclared_variables(environment.parse(_GENERATION_TAGS.sub("", source)))
    except TemplateError as error:
        raise RequestError(f"the chat template can't be read: {error}") from error
    return frozenset(read - environment.globals.keys() - _FUNCTIONS)


class _CallForm(NamedTuple):
    """How a template wants the messages that call tools."""

    arguments_as_text: bool
    wants_content: bool
    """Whether a message without content must have an empty one. transformers leaves out what is None."""
    one_call: bool
    """Whether every call must be a message of its own, before its result: Llama 3, GPT-OSS, GigaChat."""
    calls_shown: int = 0
    """Of those in `_CHATS_WITH_CALLS`."""
    chats_taken: int = 0
    """Of `_CHATS_WITH_CALLS`."""

    def tried(self, template: ChatTemplate) -> _CallForm:
        """The same form, with what a template makes of it."""
        tries = [_rendered(template, self.applied(chat)) for chat in _CHATS_WITH_CALLS]
        texts = [text for text in tries if text is not None]
        # an object that the template concatenated to a string shows as Python's repr
        calls = sum(text.count("look_up") for text in texts if "{'word'" not in text)
        return self._replace(calls_shown=calls, chats_taken=len(texts))

    def applied(self, turns: Sequence[Turn]) -> list[Turn]:
        """The messages of a chat in this form."""
        return [self._applied(turn) for turn in (_with_one_call(turns) if self.one_call else turns)]

    def _applied(self, turn: Turn) -> Turn:
        if "tool_calls" not in turn:
            return turn
        calls = [{**call, "function": self._function(call["function"])} for call in turn["tool_calls"]]
        given = {"content": turn.get("content") or ""} if self.wants_content else {}
        return {**turn, **given, "tool_calls": calls}

    def _function(self, function: dict[str, Any]) -> dict[str, Any]:
        arguments = function["arguments"]
        if not self.arguments_as_text or isinstance(arguments, str):
            return function
        return {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}


def _template_turns(tokenizer: Any, messages: Sequence[Message]) -> list[Turn]:
    turns = [message.for_template() for message in messages]
    calls = any("tool_calls" in turn for turn in turns)
    if not calls:
        return turns
    return _call_form(tokenizer, str(tokenizer.chat_template)).applied(turns)


def _with_one_call(turns: Sequence[Turn]) -> Iterator[Turn]:
    """The same chat with every call in a message of its own, before its result."""
    rest = deque(turns)
    while rest:
        turn = rest.popleft()
        first, *others = turn.get("tool_calls") or [None]
        if not others:
            yield turn
            continue
        results = []
        while rest and rest[0]["role"] == "tool":
            results.append(rest.popleft())
        yield {**turn, "tool_calls": [first]}
        for call in others:
            named = [result for result in results if result.get("tool_call_id") == first.get("id")]
            own = named if first.get("id") else results[:1]
            yield from own
            results = [result for result in results if result not in own]
            yield {"role": turn["role"], "tool_calls": [call]}
            first = call
        yield from results


@lru_cache(maxsize=16)
def _call_form(tokenizer: Any, source: str) -> _CallForm:  # noqa: ARG001  # a template can be replaced
    """The form in which the template shows the most calls, else refuses the fewest chats; the first of several."""
    template = ChatTemplate(tokenizer)
    forms = [_CallForm(*form) for form in product((False, True), repeat=3)]
    tried = [form.tried(template) for form in forms]
    return max(tried, key=lambda form: (form.calls_shown, form.chats_taken))


def _rendered(template: ChatTemplate, turns: Sequence[Turn]) -> str | None:
    try:
        return template.render(turns, None)
    except RowError:
        return None
