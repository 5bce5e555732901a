"""Tokenizes chats and documents into token ids with a loss mask."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eyas.data.tokens.marking import (
    MarkedChat,
    OffsetEncoder,
    Span,
    Tools,
    check_generated,
    find_answers,
    trim_generated,
    unmarkable,
)
from eyas.errors import DataError, ModelError, RowError
from eyas.text.chats import Chat, Message
from eyas.text.template import ChatTemplate, Turn, control_tokens

HIDDEN_CALLS = "the template shows no tool calls"

_PROBE = (
    Message(role="user", content="Is this a question?"),
    Message(role="assistant", content="This is an answer."),
    Message(role="user", content="And this?"),
    Message(role="assistant", content="Another one."),
)


@dataclass(frozen=True)
class TokenRow:
    """The T tokens of one chat or document, and which of them count in the loss."""

    tokens: NDArray[np.int64]  # [T]
    loss_mask: NDArray[np.bool_]  # [T] true where the assistant wrote the token, end tokens included
    id: str = ""  # the chat's


class ChatTokenizer:
    """Renders chats with a tokenizer's chat template and finds exactly which tokens the assistant generates.

    Answers come from the template's `{% generation %}` marks, without headers and without what follows the end token.
    For templates that have no such marks they are found by rendering marked copies (see `marking`). The text is
    tokenized once, and the characters of an answer decide which tokens belong to it.
    """

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int] = ()) -> None:
        """`stop_ids` are tokens that end an answer, besides the tokenizer's EOS and the template's end token.

        Raises ModelError if the tokenizer has no template or no offsets, or if even a plain chat can't be marked.
        """
        self.template = ChatTemplate(tokenizer)
        self._encoder = OffsetEncoder(tokenizer)
        self._control = control_tokens(tokenizer, str(tokenizer.chat_template))
        self._tokens = _any_of(tokenizer.get_added_vocab())
        self._marks_are_exact = False
        self.end_mark: str | None = None
        """The token that the template puts after an answer; None if it puts none."""
        stops = {str(tokenizer.convert_ids_to_tokens(int(i))) for i in stop_ids} | {tokenizer.eos_token or ""}
        try:
            self._try_template(stops)
        except RowError as error:
            raise ModelError(f"{tokenizer.name_or_path}: {error.detail}") from error

    def row(self, chat: Chat) -> TokenRow:
        """The tokens and loss mask of a chat; RowError if it can't be rendered or marked."""
        return _row(self.exact(chat))

    def exact(self, chat: Chat) -> Chat:
        """The chat with its tokens and the token ranges of its answers; RowError if it can't be rendered or marked."""
        if chat.tokens is not None:
            return chat
        tokens, answers = self._tokenized(chat)
        return chat.model_copy(update={"tokens": tuple(tokens.tolist()), "answers": tuple(answers)})

    def _tokenized(self, chat: Chat) -> tuple[NDArray[np.int64], list[tuple[int, int]]]:
        """The tokens, and the ranges of those that the assistant generates.

        What messages and tools say is text, as in the server's prompts, also where it reads like a control token.
        """
        if any(message.tool_calls for message in chat.messages) and not self.template.shows_calls():
            raise RowError(HIDDEN_CALLS, "the chat calls tools, but the target's chat template doesn't render calls")
        turns, tools = self.template.turns(chat.messages), list(chat.tools) if chat.tools else None
        texts = self._control.break_up_turns(turns), self._control.break_up(tools)
        if texts == (turns, tools):
            text, spans = self._spans(turns, tools)
            encoded = self._encoder.encode(text)
            return encoded.tokens, encoded.inside(spans)
        text, spans = self._spans(*texts)
        encoded = self._control_encoder.encode(text)
        kept = encoded.tokens != self._control.mark_id  # [T]
        positions = [0, *kept.cumsum().tolist()]
        return encoded.tokens[kept], [(positions[first], positions[last]) for first, last in encoded.inside(spans)]

    @cached_property
    def _control_encoder(self) -> OffsetEncoder:
        return OffsetEncoder(self._control.tokenizer)

    def _spans(self, turns: list[Turn], tools: Tools) -> tuple[str, list[Span]]:
        """The rendered chat, and the spans of characters that the assistant generates."""
        if not self.template.has_generation_marks(tools):
            marked = MarkedChat(self.template, turns, tools)
            return marked.text, find_answers(marked, self._end_tokens, self._tokens)
        text, generated = self.template.generated(turns, tools)
        if self._marks_are_exact:
            return text, [Span(start, stop, closed=True) for start, stop in generated]
        marked = MarkedChat(self.template, turns, tools)
        return text, trim_generated(generated, find_answers(marked, self._end_tokens, self._tokens))

    def _try_template(self, stops: set[str]) -> None:
        """Render four plain turns to find the template's end token and whether its generation marks are exact."""
        turns = self.template.turns(_PROBE)
        chat = MarkedChat(self.template, turns, None)
        self._encoder.check(chat.text)
        last = chat.offsets(len(turns) - 1)
        if not last:
            raise unmarkable("the chat template doesn't render the assistant's messages")
        closing = self._tokens.search(chat.text, last[-1])
        self.end_mark = None if closing is None else closing.group()
        self._end_tokens = _any_of({*stops, self.end_mark or ""})
        if self.template.has_generation_marks(None):
            generated = self.template.generated(turns, None)[1]
            check_generated(chat, generated)
            answers = find_answers(chat, self._end_tokens, self._tokens)
            self._marks_are_exact = generated == [(span.start, span.stop) for span in answers]


def tokenize_chat(tokenizer: Any, chat: Chat) -> TokenRow:
    """The tokens that the chat carries, or else those of its rendering with the tokenizer's chat template."""
    if chat.tokens is not None:
        return _row(chat)
    try:
        return _chat_tokenizer(tokenizer, str(tokenizer.chat_template)).row(chat)
    except RowError as error:
        raise RowError(error.reason, f"chat {chat.id}: {error.detail}") from error


def _row(chat: Chat) -> TokenRow:
    """The row of a chat that carries its tokens and answers."""
    assert chat.tokens is not None
    mask = np.zeros(len(chat.tokens), dtype=np.bool_)
    for start, stop in chat.answers or ():
        mask[start:stop] = True
    return TokenRow(np.asarray(chat.tokens, dtype=np.int64), mask, chat.id)


@lru_cache(maxsize=8)
def _chat_tokenizer(tokenizer: Any, template: str) -> ChatTokenizer:  # noqa: ARG001  # a template can be replaced
    return ChatTokenizer(tokenizer)


def _any_of(words: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches the longest of the words at a position; without words it never matches."""
    longest_first = sorted(filter(None, words), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def tokenize_document(tokenizer: Any, text: str, end_id: int) -> TokenRow:
    """The row of a plain text followed by `end_id`; all of its tokens count in the loss."""
    tokens = np.asarray([*tokenizer(text, add_special_tokens=False)["input_ids"], end_id], dtype=np.int64)
    return TokenRow(tokens, np.ones(len(tokens), dtype=np.bool_))


def pack(rows: Iterable[TokenRow], length: int) -> NDArray[np.int64]:
    """Concatenate rows and cut them into blocks [N, length]; a last, incomplete block is dropped."""
    streams = [row.tokens for row in rows]
    stream = np.concatenate(streams) if streams else np.zeros(0, dtype=np.int64)
    count = len(stream) // length
    if count == 0:
        raise DataError(f"{len(stream)} tokens don't fill one block of {length}; add data or shorten the blocks")
    return stream[: count * length].reshape(count, length)
