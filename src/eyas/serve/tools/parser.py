"""Parses tool calls out of an answer while it is generated: text becomes text and OpenAI's tool call deltas.

The calls don't depend on how the text is split into pieces. Text that may turn out to be a call is held back; a call
that is malformed before its name is known counts as text. `ToolCallParser` reads one character at a time and finds
calls with the patterns of the style (`markers_of`). White space around marks doesn't matter, and outer marks may be
missing, because models sometimes omit them. `CallScanner` reads a call that is an object, `ValueScanner` finds the end
of a value by its brackets and quotes, `ElementScanner` makes JSON of a value between marks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache
from typing import Any, NamedTuple

import regex

from eyas.serve.tools.styles import (
    CDATA,
    ID,
    KEY,
    NAME,
    NUMBER,
    TAGS,
    TYPE,
    ToolStyle,
    python_arguments,
    shared_start,
)

_SPACE = " \t\r\n"
_NAME = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")
_GAP = r"\s{0,64}"
_WILDCARDS = {
    NAME: r"[\w.-]{1,256}",
    ID: r"[\w.-]{0,64}",
    NUMBER: r"\d{0,6}",
    KEY: r"""[^<>"'\s/][^<>"'\s]{0,255}""",
    TYPE: r"(?P<type>\w{0,16})",
}
_NAMED = r"(?P<name>[\w.-]{1,256})"
_TAG = r"<[^<>]*>?|\[[^\[\]<>]*\]"
_HARMONY = (
    r"(?:<\|start\|>assistant)?\s?(?:<\|channel\|>(?:commentary|analysis))?\s?to=(?:functions\.)?"
    + _NAMED
    + r"\s?(?:<\|channel\|>(?:commentary|analysis))?\s?(?:<\|constrain\|>)?\s?(?:json)?\s?<\|message\|>\s{0,8}\{"
)


@dataclass(frozen=True)
class TextPiece:
    """Text of the answer that belongs to no call."""

    text: str


@dataclass(frozen=True)
class CallPiece:
    """A piece of the call with this index; `id` and `name` come with its first piece only."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None

    def delta(self) -> dict[str, Any]:
        """The piece as an element of a delta's `tool_calls`."""
        if self.name is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


class CallMarkers(NamedTuple):
    """The patterns with which the calls of a style are found; a match has the group `name` unless it is an object."""

    first: Any
    """The beginning of a call at the beginning of an answer."""
    opening: Any
    """The beginning of the first call in a text."""
    more: Any
    """What is between a call and the next one's arguments."""
    end: Any
    """What is after the last call."""
    tail: Any
    """What belongs to a call's end even if the rest of it is missing."""
    argument: Any
    """The beginning of an argument that is written as an element."""


@lru_cache(maxsize=16)
def markers_of(style: ToolStyle) -> CallMarkers:
    """The patterns of a style."""
    inside = _inside(style)
    begin = _pattern(style.begin, lenient=True) + (r"[\s\[]{0,16}" if style.form == "object" else "")
    opening = f"{_GAP}(?:{begin}{inside})"
    if style.harmony:
        opening = _GAP + _HARMONY
    between = _pattern(style.between)
    more = f"{_GAP}(?:{between}){inside}"
    if style.form == "object" and not style.begin.strip(" \n["):
        more = rf"[\s,;]{{0,16}}{inside}"
    elif style.harmony:
        more = rf"{_GAP}(?:<\|call\|>)?{_HARMONY}"
    element = style.element
    argument = (
        _GAP + _pattern(element.begin) + f"(?P<key>{_WILDCARDS[KEY]})" + _pattern(element.middle.rstrip())
        if element
        else ""
    )
    shared = shared_start(style.between, style.end)
    shared = regex.sub(r"<[^<>]*$", "", shared) if not style.end.startswith(style.between) else style.end
    listed = style.form == "object" and (style.bare or style.end.lstrip().startswith("]"))
    behind = style.end.lstrip(" \n]") if listed else style.end
    brackets = rf"(?:{_GAP}\]){{1,4}}" if listed else ""  # lists may be nested or not
    chunks = "".join(f"(?:{_GAP}{_pattern(chunk)})?" for chunk in _chunks(shared.lstrip() or behind))
    end = f"{brackets}{_GAP}{_pattern(behind)}" if behind.strip() else brackets
    tag = f"(?:{'|'.join(map(regex.escape, TAGS))})" if style.bare and style.form == "object" else ""
    first = f"{_GAP}(?:{begin})?{inside}" if style.begun else opening
    return CallMarkers(
        first=regex.compile(rf"{_GAP}(?:{tag})?{first}"),
        opening=regex.compile(rf"{_GAP}{tag}{opening}") if tag or not style.bare else _NO_MATCH,
        more=regex.compile(more),
        end=regex.compile(end) if end else _NO_MATCH,
        tail=regex.compile(f"(?:{brackets})?{chunks}"),
        argument=regex.compile(argument) if element else _NO_MATCH,
    )


_NO_MATCH = regex.compile(r"(?!)")


def _inside(style: ToolStyle) -> str:
    """The pattern of a call up to its arguments, or of an object's brace."""
    if style.form == "object":
        return r"\{"
    if style.form == "python":
        return rf"{_GAP}{_NAMED}\("
    between = _pattern(style.before_arguments)
    if style.form == "elements":
        plain = style.before_arguments.strip()
        return rf"{_GAP}{_NAMED}{between}{_GAP}" + ("" if plain else r"(?P<rest>[^\w\s.-])")
    name = rf"{_GAP}{_NAMED}{_GAP}{between.removesuffix(regex.escape('{'))}{_GAP}\{{"
    return name if style.form == "braces" or style.begin.endswith('"') else rf"(?:{name}|[\s\[]{{0,16}}\{{)"


def _chunks(text: str) -> list[str]:
    """A text's tags and what is between them, without white space."""
    return [chunk for part in regex.split(f"({_TAG})", text) for chunk in part.split()] if text else []


def _pattern(text: str, lenient: bool = False) -> str:
    """The pattern of a text of a style, any white space being like any other; `lenient`: outer marks may be missing."""
    if lenient:
        chunks = [part for part in regex.split(f"({_TAG})", text) if part]
        needed = max((at for at, chunk in enumerate(chunks) if regex.search(r"\w", chunk)), default=-1)
        tags = [at for at, chunk in enumerate(chunks) if regex.match(_TAG, chunk) and regex.search(r"\w", chunk)]
        if tags:
            needed = tags[-1]
            return "".join(
                _pattern(chunk) if at == needed else f"(?:{_pattern(chunk)})?" for at, chunk in enumerate(chunks)
            )
    parts = []
    for part in regex.split(f"(\\s+|[{NAME}-{TYPE}])", text):
        parts.append(_GAP if part.isspace() else _WILDCARDS.get(part) or regex.escape(part))
    found = "".join(parts).replace("><", f">{_GAP}<")
    # models write [CALL_ID] whether or not the template does
    return found.replace(r"\[CALL_ID\]" + _WILDCARDS[ID], "").replace(
        r"\[ARGS\]", r"(?:\[CALL_ID\][\w-]{0,64})?\[ARGS\]"
    )


def is_text(schema: Any) -> bool:
    """Whether an argument with this JSON schema is always a text; unknown ones aren't."""
    if not isinstance(schema, dict):
        return False
    kinds = schema.get("type")
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return all(isinstance(value, str) for value in values)
    return kinds in ("string", ["string"])


class ToolCallParser:
    """Parses one answer, decoded with the special tokens of its calls and without its end token.

    `tools`, in OpenAI's form, say which arguments are text where a style writes text without quotes.
    """

    def __init__(
        self,
        style: ToolStyle,
        new_id: Callable[[], str] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.style = style
        self.calls = 0
        """How many calls have begun so far."""
        self._new_id = new_id or style.new_id
        self._markers = markers_of(style)
        self._schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
        self._mode: Callable[[str], None] = self._in_text
        self._held = ""  # read, but neither emitted nor dropped
        self._out: list[TextPiece | CallPiece] = []
        self._untouched = True  # only whitespace came so far
        self._call = CallScanner()
        self._value = ValueScanner()
        self._element = ElementScanner("", "", False)
        self._properties: dict[str, Any] = {}
        self._any_arguments = False
        self._name = ""

    def feed(self, text: str) -> list[TextPiece | CallPiece]:
        """Parse the next piece of the answer and return what it adds."""
        for character in text:
            self._held += character
            self._mode(character)
        return self._drain()

    def finish(self) -> list[TextPiece | CallPiece]:
        """Return what was held back, at the end of the answer."""
        held = self._held
        self._held = ""
        if self._mode == self._in_element:
            self._arguments(self._element.finish())
        elif self._mode not in (self._after_call, self._in_arguments) and (not self.calls or held.strip()):
            self._text(held)
        return self._drain()

    def _drain(self) -> list[TextPiece | CallPiece]:
        out = self._out
        self._out = []
        return out

    def _text(self, text: str) -> None:
        if text and self._out and isinstance(self._out[-1], TextPiece):
            text = self._out.pop().text + text  # type: ignore[union-attr]
        if text:
            self._out.append(TextPiece(text))

    def _arguments(self, text: str) -> None:
        last = self._out[-1] if self._out else None
        if text and isinstance(last, CallPiece):
            self._out[-1] = CallPiece(last.index, last.arguments + text, last.id, last.name)
        elif text:
            self._out.append(CallPiece(self.calls - 1, text))

    def _begin_call(self, name: str) -> None:
        """Begin a call: the text that was held back was its beginning."""
        self._out.append(CallPiece(self.calls, "", self._new_id(), name))
        self.calls += 1
        self._held = ""

    def _in_text(self, character: str) -> None:  # noqa: ARG002
        """Emit text as far as no call can begin in it."""
        while self._held:
            opening = self._markers.first if self._untouched else self._markers.opening
            found = opening.fullmatch(self._held, partial=True)
            if found is not None:
                if not found.partial:
                    self._open(found)
                return
            self._untouched = self._untouched and not self._held[0].strip()
            self._text(self._held[0])
            self._held = self._held[1:]

    def _open(self, found: Any) -> None:
        """Begin to read a call whose beginning was found."""
        groups = found.groupdict()
        name = groups.get("name")
        form = self.style.form
        self._untouched = False
        if name is None:
            self._call = CallScanner()
            self._mode = self._in_call
            self._call.feed("{")
        elif form == "named":
            self._begin_call(name)
            self._value = ValueScanner()
            self._mode = self._in_value
            self._in_value("{")
        elif form == "elements":
            self._begin_call(name)
            self._held = groups.get("rest") or ""
            self._any_arguments = False
            self._mode = self._in_arguments
            self._properties = self._schemas.get(name, {}).get("properties") or {}
        else:
            self._name, self._value, self._mode = name, ValueScanner(self.style.quote), self._in_unquoted
            self._value.feed("(" if form == "python" else "{")

    def _in_call(self, character: str) -> None:
        call = self._call
        named = self._call.name is not None
        call.feed(character)
        if call.name is not None and not named:
            self._begin_call(call.name)
        if call.name is not None:
            self._arguments(call.take())
            self._held = ""
        if call.state is CallState.DONE:
            self._mode = self._after_call
        elif call.state is CallState.BROKEN and call.name is not None:
            self._held = character
            self._mode = self._in_text
            self._in_text(character)
        elif call.state is CallState.BROKEN:
            self._fail(character)

    def _in_value(self, character: str) -> None:
        self._value.feed(character)
        self._arguments(character)
        self._held = ""
        if self._value.done:
            self._mode = self._after_call

    def _in_unquoted(self, character: str) -> None:
        """Inside arguments that become JSON only when they are complete."""
        self._value.feed(character)
        if not self._value.done:
            return
        written = self._value.text[1:-1]
        arguments = python_arguments(written) if self.style.form == "python" else braces(written, self.style.quote)
        if arguments is None:
            self._fail(character)
            return
        self._begin_call(self._name)
        self._arguments(json.dumps(arguments, ensure_ascii=False))
        self._mode = self._after_call

    def _in_arguments(self, character: str) -> None:
        """Between the arguments of a call that is written as elements."""
        found = self._markers.argument.fullmatch(self._held, partial=True)
        if found is not None and not found.partial:
            key = found["key"]
            kind = found.groupdict().get("type")
            self._arguments(f"{', ' if self._any_arguments else '{'}{json.dumps(key, ensure_ascii=False)}: ")
            self._any_arguments = True
            self._held = ""
            element = self.style.element
            assert element is not None
            text = is_text(self._properties.get(key)) if kind is None else kind == element.text_type
            nested = element.begin if KEY in element.end else ""
            end = element.end.replace(KEY, key)
            self._element = ElementScanner(end, element.middle, text, nested, element.cdata)
            self._mode = self._in_element
        elif found is None:
            self._arguments("}" if self._any_arguments else "{}")
            self._mode = self._after_call
            self._after_call(character)

    def _in_element(self, character: str) -> None:
        self._arguments(self._element.feed(character))
        self._held = ""
        if self._element.done:
            self._mode = self._in_arguments

    def _after_call(self, character: str) -> None:  # noqa: ARG002
        """After a call: its end mark, the next call, or text."""
        found = self._markers.more.fullmatch(self._held, partial=True)
        if found is not None and not found.partial:
            self._open(found)
            return
        ended = self._markers.end.fullmatch(self._held, partial=True)
        if ended is not None and not ended.partial:
            self._held = ""
            self._mode = self._in_text
        elif ended is None and found is None:
            self._held = self._held[self._markers.tail.match(self._held).end() :]
            self._mode = self._in_text
            self._in_text(self._held[-1:])

    def _fail(self, character: str) -> None:
        """Emit the held-back text, which isn't a call after all; the last character may begin another one."""
        self._text(self._held[:-1])
        self._held = character
        self._mode = self._in_text
        self._untouched = False
        self._in_text(character)


class ValueScanner:
    """Finds the end of a value by its brackets and quotes, without checking what is between them.

    Texts stand between `"`, or between `quote`; in Python's form, also between `'`.
    """

    def __init__(self, quote: str = "") -> None:
        self.done = False
        self.text = ""
        self._quote = quote
        self._depth = 0
        self._in_text = ""  # the quote that ends it
        self._escaped = False

    def feed(self, character: str) -> bool:
        """Add a character; returns False if the value ended before it."""
        if self.done:
            return False
        if self._quote:
            self.text += character
            self._between_quotes(character)
            return True
        if self._in_text:
            ended = character == self._in_text and not self._escaped
            self._in_text = "" if ended else self._in_text
            self._escaped = character == "\\" and not self._escaped
            self.done = ended and self._depth == 0
        elif character == '"' or (character == "'" and self.text.startswith("(")):
            self._in_text = character
        elif character in "{[(":
            self._depth += 1
        elif character in "}])" and self._depth:
            self._depth -= 1
            self.done = self._depth == 0
        elif self._depth == 0 and character in ",}]" + _SPACE:
            self.done = True
            return False
        self.text += character
        return True

    def _between_quotes(self, character: str) -> None:
        if self.text.endswith(self._quote):
            self._in_text = "" if self._in_text else self._quote
        elif not self._in_text and character in "{[":
            self._depth += 1
        elif not self._in_text and character in "}]":
            self._depth -= 1
            self.done = self._depth == 0


class ElementScanner:
    """Reads a value up to the mark behind it, and makes JSON of it.

    A text is passed on as it comes; anything else when it is complete, as it was written if it is JSON.
    """

    def __init__(self, end: str, middle: str, text: bool, nested: str = "", cdata: bool = False) -> None:
        """`end`: the mark; `middle`: what stands before the value; `nested`: the mark of elements within elements.

        `cdata`: a text may stand between `CDATA`.
        """
        self.done = False
        self._opening = CDATA[0] if cdata else ""
        self._ends = (
            regex.compile(("\n?" if end.startswith("\n") else "") + _pattern(end.strip())) if end else _NO_MATCH
        )
        self._text = text
        self._nested = nested
        self._skips = middle.endswith("\n")
        self._held = self._value = ""
        self._begun = False

    def feed(self, character: str) -> str:
        """Add a character and return the JSON that it completes."""
        if self._skips:
            self._skips = False
            if character == "\n":
                return ""
        self._held += character
        out = ""
        if self._opening.startswith(self._held):
            if self._opening == self._held:
                closed = regex.escape(CDATA[1]) + _GAP + self._ends.pattern
                self._ends = regex.compile(closed)
                self._text = True
                self._held = self._opening = ""
            return out
        self._opening = ""
        while self._held:
            found = self._ends.fullmatch(self._held, partial=True)
            if found is not None and found.partial:
                return out
            if found is not None:
                self.done = True
                self._held = ""
                return out + self._complete()
            out += self._take(self._held[0])
            self._held = self._held[1:]
        return out

    def finish(self) -> str:
        """The JSON of what was held back, at the end of the answer."""
        return self._take(self._held) if self._text and not self._ends.fullmatch(self._held, partial=True) else ""

    def _take(self, text: str) -> str:
        if not self._text:
            self._value += text
            return ""
        quote = "" if self._begun else '"'
        self._begun = True
        return quote + json.dumps(text, ensure_ascii=False)[1:-1]

    def _complete(self) -> str:
        if self._text:
            return '"' if self._begun else '""'
        written = self._value.strip()
        try:
            json.loads(written)
        except (ValueError, RecursionError):
            return json.dumps(self._other(written), ensure_ascii=False)
        return written

    def _other(self, written: str) -> Any:
        """A value that isn't JSON: elements within elements, Python's form, or a text."""
        if self._nested and written.startswith(self._nested):
            return _tree(written.replace(self._nested, "<").replace(f"{self._nested[:-1]}</", "</"))
        found = python_arguments(f"value={written}")
        return self._value if found is None else found["value"]


def _tree(text: str) -> Any:
    """The value of `<key>value</key>...`: an object, or a list if all keys are `item`; of other text, its own value."""
    text = text.strip()
    parts = regex.findall(r"<([^<>/\s]+)>((?:(?!</?\1>).|(?R))*)</\1>", text, flags=regex.DOTALL)
    if not parts:
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    if all(key == "item" for key, _ in parts):
        return [_tree(inside) for _, inside in parts]
    return {key: _tree(inside) for key, inside in parts}


def braces(text: str, quote: str) -> dict[str, Any] | None:
    """The arguments `key:value,...` whose texts stand between quotes of their own; None if they are something else."""
    written = "{"
    for number, part in enumerate(text.split(quote)):
        if number % 2:
            written += json.dumps(part, ensure_ascii=False)
        else:
            written += regex.sub(r"([{,]|^)\s*([^\s{}\[\],:]+)\s*:", r'\1"\2":', part)
    found = python_arguments(f"value={written}}}")  # templates write `None` there, and `true`
    return found["value"] if found and isinstance(found["value"], dict) else None


class CallState(Enum):
    """What a `CallScanner` expects next."""

    OPEN = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_VALUE = auto()
    NEXT = auto()
    DONE = auto()
    BROKEN = auto()


class CallScanner:
    """Reads a call `{"name": ..., "arguments": ...}`; once `name` is known, arguments can be taken as they arrive."""

    def __init__(self) -> None:
        self.state = CallState.OPEN
        self.name: str | None = None
        self._pending = ""
        self._key = ""
        self._value = ValueScanner()
        self._any_arguments = False
        self._nested = False

    def take(self) -> str:
        """Return the arguments, as the model wrote them, that arrived since the last `take`."""
        taken = self._pending
        self._pending = ""
        return taken

    def feed(self, character: str) -> None:
        """Add a character; no more may follow once `state` is DONE or BROKEN."""
        if self.state is CallState.IN_KEY or self.state is CallState.IN_VALUE:
            self._inside(character)
            return
        if character in _SPACE:
            return
        expected = {
            (CallState.OPEN, "{"): CallState.KEY,
            (CallState.KEY, '"'): CallState.IN_KEY,
            (CallState.KEY, "}"): CallState.DONE,
            (CallState.COLON, ":"): CallState.VALUE,
            (CallState.NEXT, ","): CallState.KEY,
            (CallState.NEXT, "}"): CallState.NEXT if self._nested else CallState.DONE,
        }
        if self.state is CallState.VALUE and self._key == "function" and character == "{" and not self._nested:
            self.state = CallState.KEY
            self._nested = True
            return
        if self.state is CallState.VALUE:
            self.state = CallState.BROKEN if character in ",}]:" else CallState.IN_VALUE
            self._begin(character)
            return
        self._nested = self._nested and (self.state, character) != (CallState.NEXT, "}")
        self.state = expected.get((self.state, character), CallState.BROKEN)
        if self.state is CallState.IN_KEY:
            self._begin(character)
        elif self.state is CallState.DONE:
            self._close()

    def _begin(self, character: str) -> None:
        self._value = ValueScanner()
        self._value.feed(character)
        self._stream(character)

    def _inside(self, character: str) -> None:
        taken = self._value.feed(character)
        if taken:
            self._stream(character)
        if not self._value.done:
            return
        if self.state is CallState.IN_KEY:
            self._key = _text(self._value.text) or ""
            self.state = CallState.COLON
        else:
            self._finish_value()
            self.state = CallState.NEXT
        if not taken:
            self.feed(character)

    @property
    def _is_arguments(self) -> bool:
        return self.state is CallState.IN_VALUE and self._key in _ARGUMENTS

    def _stream(self, character: str) -> None:
        if self._is_arguments and not self._value.text.startswith('"'):
            self._pending += character

    def _finish_value(self) -> None:
        if self._key in _NAME:
            self.name = _text(self._value.text)
        elif self._is_arguments:
            self._any_arguments = True
            if self._value.text.startswith('"'):  # JSON within a JSON string
                self._pending += _text(self._value.text) or "{}"

    def _close(self) -> None:
        if not self.name:
            self.state = CallState.BROKEN
        elif not self._any_arguments:
            self._pending += "{}"


def _text(literal: str) -> str | None:
    """The value of a JSON string; None if the literal isn't one."""
    try:
        value = json.loads(literal)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
