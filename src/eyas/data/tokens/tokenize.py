"""Tokenizes chats and documents into token ids with a loss mask, which marks what the assistant generates.

A chat template is a program, so it is run rather than parsed: copies of the messages with private-use characters in
them are rendered, and these marks show where the words of each message went. Without the marks, the text must equal the
plain rendering. An answer begins where its prompt, rendered with `add_generation_prompt`, stops; it ends with the first
end token after its last word. This holds for templates that strip content, drop the reasoning of earlier turns, move
the system prompt or begin the answer in the prompt. `OffsetEncoder` then maps characters to tokens.

Legend: T tokens of a text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eyas.errors import DataError, ModelError, RowError
from eyas.text.chats import Chat, Message, before_first_question, greets, without_greeting
from eyas.text.template import REFUSED, ChatTemplate, Turn, control_tokens

UNMARKABLE = "answers can't be told from prompts"
_ADVICE = (
    "put {% generation %} and {% endgeneration %} around what the assistant writes in the chat template, "
    "its end mark included"
)
_MARK = re.compile("[\U000f0000-\U000ffffd]")
_THOUGHTS = re.compile(r"(</?think>)")  # templates split answers at these

Tools = Sequence[dict[str, Any]] | None


def unmarkable(why: str) -> RowError:
    """The error for a chat whose answers can't be found, with advice on how to change the template."""
    return RowError(UNMARKABLE, f"{why}; {_ADVICE}")


class MarkedChat:
    """A chat rendered plainly, and once more with marks that show where each message's words went."""

    def __init__(self, template: ChatTemplate, turns: Sequence[Turn], tools: Tools) -> None:
        """Render both; RowError if the template doesn't treat the marked text like the plain one."""
        self._template = template
        self._tools = tools
        self.turns = turns
        self.text = template.render(turns, tools)
        if _MARK.search(self.text):
            raise RowError(UNMARKABLE, "the chat holds private-use characters of plane 15, which marking needs")
        numbers = iter(range(0xF0000, 0xFFFFE))
        copies = [_marked(turn, numbers) for turn in turns]
        self._copies = [copy for copy, _ in copies]
        self._marks = [marks for _, marks in copies]  # of each turn, in reading order
        plain, self._offsets = _unmarked(template.render(self._copies, tools))
        if plain != self.text:
            raise unmarkable("the chat template changes the text of messages, or depends on it")
        found = [self._offsets[mark] for marks in self._marks for mark in marks if mark in self._offsets]
        if found != sorted(found):
            raise unmarkable("the chat template doesn't keep the messages in order")

    def offsets(self, turn: int) -> list[int]:
        """Offsets in the text at which the turn's marked words begin and end, without words the template omits."""
        return [self._offsets[mark] for mark in self._marks[turn] if mark in self._offsets]

    def following(self, turn: int) -> int:
        """The offset at which the words of the following turns begin; the text's length if there are none."""
        return next(
            (offsets[0] for i in range(turn + 1, len(self.turns)) if (offsets := self.offsets(i))), len(self.text)
        )

    def start(self, turn: int, tokens: re.Pattern[str]) -> int:
        """The offset at which the assistant's turn begins, after its prompt; `tokens` matches whole special tokens."""
        prompt_text, offsets = self._prompt(turn, prompt=True)
        before = [mark for marks in self._marks[:turn] for mark in marks]
        anchor = next((mark for mark in reversed(before) if mark in self._offsets and mark in offsets), None)
        here, there = (0, 0) if anchor is None else (self._offsets[anchor], offsets[anchor])
        mine = self.offsets(turn)
        shown = self.text[here : mine[0] if mine else self.following(turn)]
        common = _common(shown, prompt_text[there:])
        if there + common == len(prompt_text):
            return here + common
        # A prompt that begins the answer (`<think>`) may differ from a finished turn, but only after its own header.
        bare, _ = self._prompt(turn, prompt=False)
        if not prompt_text.startswith(bare) or there + common <= len(bare):
            raise unmarkable(f"the chat template renders the prompt of turn {turn + 1} differently once it is answered")
        cut = here + common
        whole = (found.start() for found in tokens.finditer(self.text, here) if found.start() < cut < found.end())
        return next(whole, cut)

    def unclosed(self, turn: int, last: int) -> int:
        """The end of a turn without an end token; after its last word, which ends at `last`, calls add brackets."""
        if "tool_calls" not in self.turns[turn]:
            return last
        text, offsets = self._prompt(turn + 1, prompt=False)
        mark = next((mark for mark in reversed(self._marks[turn]) if mark in offsets), None)
        if mark is None or mark not in self._offsets:
            raise unmarkable(f"no token ends the calls of turn {turn + 1}")
        closing = self.text[last : last + _common(self.text[last : self.following(turn)], text[offsets[mark] :])]
        return last + len(closing.rstrip())

    def _prompt(self, turn: int, prompt: bool) -> tuple[str, dict[str, int]]:
        return _unmarked(self._template.render(self._copies[:turn], self._tools, prompt=prompt))


def find_answers(chat: MarkedChat, first: int, end_tokens: re.Pattern[str], tokens: re.Pattern[str]) -> list[Span]:
    """The spans of the assistant's turns from turn `first` on: those before it have no prompt, so they are context.

    `end_tokens` matches tokens that end a turn, `tokens` all special tokens.
    """
    spans: list[Span] = []
    for i, turn in enumerate(chat.turns):
        if turn["role"] != "assistant" or i < first:
            continue
        start = chat.start(i, tokens)
        last = max([start, *chat.offsets(i)])
        end = end_tokens.search(chat.text, last, chat.following(i))
        span = Span(start, chat.unclosed(i, last), closed=False) if end is None else Span(start, end.end(), closed=True)
        if spans and span.start < spans[-1].stop:
            raise unmarkable(f"turn {i + 1} begins before the previous answer ends")
        if span.stop > span.start:
            spans.append(span)
    return spans


def trim_generated(generated: Sequence[tuple[int, int]], answers: Sequence[Span]) -> list[Span]:
    """The template's generation spans without headers before answers and line breaks after end tokens."""
    spans = []
    for start, stop in generated:
        inside = [span for span in answers if start < span.stop and span.start < stop]
        spans += [Span(max(start, s.start), min(stop, s.stop), s.closed and s.stop <= stop) for s in inside]
    return spans


def check_generated(chat: MarkedChat, spans: Sequence[tuple[int, int]]) -> None:
    """Raise RowError if generation marks cut through messages, as they do inside a Jinja macro."""
    for i, turn in enumerate(chat.turns):
        answered = turn["role"] == "assistant"
        for start, stop in spans:
            inside = [start <= offset <= stop if answered else start < offset < stop for offset in chat.offsets(i)]
            if any(inside) and not (answered and all(inside)):
                raise unmarkable("the generation marks of the chat template don't follow the messages")


def _common(a: str, b: str) -> int:
    """The length of the common prefix of two texts."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _marked(turn: Turn, numbers: Iterator[int]) -> tuple[Turn, list[str]]:
    """A copy of the turn with marks in its texts, and these marks in reading order."""
    marks: list[str] = []

    def mark() -> str:
        marks.append(chr(next(numbers)))
        return marks[-1]

    copy = dict(turn)
    if turn["role"] == "assistant":
        for field in ("reasoning_content", "content"):
            if turn.get(field):
                copy[field] = "".join(_edged(part, mark) for part in _THOUGHTS.split(turn[field]))
        if "tool_calls" in turn:
            copy["tool_calls"] = _ended(turn["tool_calls"], mark)
    elif turn["role"] in ("user", "tool") and (words := turn.get("content", "").strip()):
        # In the middle, because templates may test how a message begins or ends. System prompts get no mark: some
        # templates move them.
        middle = turn["content"].index(words) + len(words) // 2
        copy["content"] = turn["content"][:middle] + mark() + turn["content"][middle:]
    return copy, marks


def _edged(text: str, mark: Callable[[], str]) -> str:
    """The text with marks around its words, inside the whitespace that templates strip."""
    words = text.strip()
    if not words or _THOUGHTS.fullmatch(text):
        return text
    at = text.index(words)
    return text[:at] + mark() + words + mark() + text[at + len(words) :]


def _ended(calls: list[dict[str, Any]], mark: Callable[[], str]) -> list[dict[str, Any]]:
    """The calls with a mark after every string argument, so that an end token quoted there doesn't end the turn."""

    def walk(value: Any) -> Any:
        if isinstance(value, str):
            return value + mark() if value else value
        if isinstance(value, dict):
            return {key: walk(item) for key, item in value.items()}
        return [walk(item) for item in value] if isinstance(value, list) else value

    functions = ((call, call["function"]) for call in calls)
    return [call | {"function": function | {"arguments": walk(function["arguments"])}} for call, function in functions]


def _unmarked(text: str) -> tuple[str, dict[str, int]]:
    """The text without marks, and the offset of each mark in it; RowError if a mark occurs twice."""
    offsets: dict[str, int] = {}
    for count, found in enumerate(_MARK.finditer(text)):
        if offsets.setdefault(found.group(), found.start() - count) != found.start() - count:
            raise unmarkable("the chat template renders a message twice")
    return _MARK.sub("", text), offsets


class Span(NamedTuple):
    """Characters [start, stop) that the assistant wrote."""

    start: int
    stop: int
    closed: bool
    """Whether it ends with an end token, which belongs to it even if the token also covers whitespace after it."""


class TokenOffsets(NamedTuple):
    """The tokens of a text with the characters that each one covers."""

    tokens: NDArray[np.int64]  # [T]
    starts: NDArray[np.int64]  # [T] first character of each; tokens that are bytes of one character share it
    stops: NDArray[np.int64]  # [T] one after the last character of each

    def inside(self, spans: Sequence[Span]) -> list[tuple[int, int]]:
        """The ranges of tokens that lie in the spans; a token that crosses the edge of a span is left out.

        The end of a closed span isn't such an edge: its end token belongs to it, whatever else the token covers.
        """
        ranges = []
        for span in spans:
            first = int(np.searchsorted(self.starts, span.start, side="left"))
            last = int(np.searchsorted(self.starts, span.stop, side="left"))
            while not span.closed and last > first and self.stops[last - 1] > span.stop:
                last -= 1
            if last > first:
                ranges.append((first, last))
        return ranges


class OffsetEncoder:
    """A fast tokenizer without its post-processing, which in some tokenizers trims whitespace from the offsets."""

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ModelError(
                f"the tokenizer {tokenizer.name_or_path} is a slow one ({type(tokenizer).__name__}), which has no "
                "character offsets: save it as a fast tokenizer (tokenizer.json)"
            )
        from tokenizers import Tokenizer

        own = tokenizer.backend_tokenizer
        settings = json.loads(own.to_str()) | {"post_processor": None, "truncation": None, "padding": None}
        self._backend = Tokenizer.from_str(json.dumps(settings))
        self._backend.encode_special_tokens = own.encode_special_tokens
        self._tokenizer = tokenizer

    def encode(self, text: str) -> TokenOffsets:
        """The tokens of a rendered chat; no special tokens are added."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        offsets = np.asarray(encoding.offsets, dtype=np.int64).reshape(-1, 2)
        return TokenOffsets(np.asarray(encoding.ids, dtype=np.int64), offsets[:, 0], offsets[:, 1])

    def check(self, text: str) -> None:
        """Raise ModelError if the tokenizer itself tokenizes `text` differently."""
        if self._tokenizer(text, add_special_tokens=False)["input_ids"] != self.encode(text).tokens.tolist():
            raise ModelError(
                f"the tokenizer {self._tokenizer.name_or_path} doesn't agree with its tokenizer.json, so tokens can't "
                "be mapped to characters: save it with save_pretrained and use the saved one"
            )


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
    id: str = ""  # the chat's id


class ChatTokenizer:
    """Renders chats with a tokenizer's chat template and finds exactly which tokens the assistant generates.

    Answers come from the template's `{% generation %}` marks, without headers and without what follows the end token.
    For templates that have no such marks they are found by rendering marked copies (see `MarkedChat`). The text is
    tokenized once, and the characters of an answer decide which tokens belong to it.
    """

    def __init__(self, tokenizer: Any, stop_ids: Sequence[int] = ()) -> None:
        """`stop_ids` are tokens that end an answer, in addition to the tokenizer's EOS and the template's end token.

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
        """The chat with its tokens and the token ranges of its answers; RowError if it can't be rendered or marked.

        A greeting before the first question isn't an answer. It is left out if the template refuses such chats.
        """
        if chat.tokens is not None:
            return chat
        try:
            tokens, answers = self._tokenized(chat)
        except RowError as error:
            if error.reason != REFUSED or not greets(chat.messages):
                raise
            chat = without_greeting(chat)
            tokens, answers = self._tokenized(chat)
        return chat.model_copy(update={"tokens": tuple(tokens.tolist()), "answers": tuple(answers)})

    def _tokenized(self, chat: Chat) -> tuple[NDArray[np.int64], list[tuple[int, int]]]:
        """The tokens, and the ranges of those that the assistant generates.

        As in the server's prompts, the contents of messages and tools are text, even if they look like control tokens.
        """
        if any(message.tool_calls for message in chat.messages) and not self.template.shows_calls():
            raise RowError(HIDDEN_CALLS, "the chat calls tools, but the target's chat template doesn't render calls")
        turns = self.template.turns(chat.messages)
        tools = list(chat.tools) if chat.tools else None
        first = before_first_question(chat.messages)
        texts = self._control.break_up_turns(turns), self._control.break_up(tools)
        if texts == (turns, tools):
            text, spans = self._spans(turns, tools, first)
            encoded = self._encoder.encode(text)
            return encoded.tokens, encoded.inside(spans)
        text, spans = self._spans(*texts, first)
        encoded = self._control_encoder.encode(text)
        kept = encoded.tokens != self._control.mark_id  # [T]
        positions = [0, *kept.cumsum().tolist()]
        return encoded.tokens[kept], [(positions[first], positions[last]) for first, last in encoded.inside(spans)]

    @cached_property
    def _control_encoder(self) -> OffsetEncoder:
        return OffsetEncoder(self._control.tokenizer)

    def _spans(self, turns: list[Turn], tools: Tools, first: int) -> tuple[str, list[Span]]:
        """The rendered chat, and the spans of characters that the assistant generates from turn `first` on."""
        if not self.template.has_generation_marks(tools):
            marked = MarkedChat(self.template, turns, tools)
            return marked.text, find_answers(marked, first, self._end_tokens, self._tokens)
        text, generated = self.template.generated(turns, tools)
        if self._marks_are_exact and all(turn["role"] != "assistant" for turn in turns[:first]):
            return text, [Span(start, stop, closed=True) for start, stop in generated]
        marked = MarkedChat(self.template, turns, tools)
        return text, trim_generated(generated, find_answers(marked, first, self._end_tokens, self._tokens))

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
            answers = find_answers(chat, 0, self._end_tokens, self._tokens)
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
