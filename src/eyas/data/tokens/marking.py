"""Finds which characters of a rendered chat the assistant generates, without generation marks in the template.

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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eyas.errors import ModelError, RowError
from eyas.text.template import ChatTemplate, Turn

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
        self._template, self._tools = template, tools
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
        """The end of a turn that no end token closes and whose last word ends at `last`: tool calls add brackets."""
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


def find_answers(chat: MarkedChat, end_tokens: re.Pattern[str], tokens: re.Pattern[str]) -> list[Span]:
    """The spans of the assistant's turns. `end_tokens` matches tokens that end a turn, `tokens` all special tokens."""
    spans: list[Span] = []
    for i, turn in enumerate(chat.turns):
        if turn["role"] != "assistant":
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

        The end of a closed span is no such edge: the end token belongs to it whatever it covers.
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
