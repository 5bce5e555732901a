"""Parses tool calls out of an answer while it is generated: text becomes text and OpenAI's tool call deltas.

The calls don't depend on how the text is split into pieces. Text that may turn out to be a call is held back; a call
that is malformed before its name is known counts as text. Three layers read one character at a time: `ToolCallParser`
finds calls in the answer, `CallScanner` reads a call that is an object, `ValueScanner` finds the end of a JSON value.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from eyas.serve.tools.calling import ToolStyle

_SPACE = " \t\r\n"
_LONGEST_NAME = 256
_NAME = "name"
_ARGUMENTS = ("arguments", "parameters")


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


class ToolCallParser:
    """Parses one answer, decoded with the special tokens of its calls and without its end token."""

    def __init__(self, style: ToolStyle, new_id: Callable[[], str] | None = None) -> None:
        self.style = style
        self.calls = 0
        """How many calls have begun so far."""
        self._new_id = new_id or style.new_id
        self._mode: Callable[[str], None] = self._in_text
        self._held = ""  # read, but neither emitted nor dropped
        self._out: list[TextPiece | CallPiece] = []
        self._untouched = True  # only whitespace came so far
        self._in_list = False
        self._call = CallScanner()
        self._value = ValueScanner()

    def feed(self, text: str) -> list[TextPiece | CallPiece]:
        """Parse the next piece of the answer and return what it adds."""
        for character in text:
            self._held += character
            self._mode(character)
        return self._drain()

    def finish(self) -> list[TextPiece | CallPiece]:
        """Return what was held back, at the end of the answer."""
        held, self._held = self._held, ""
        if self._mode != self._after_call and (not self.calls or held.strip()):
            self._text(held)
        return self._drain()

    def _drain(self) -> list[TextPiece | CallPiece]:
        out, self._out = self._out, []
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
        marker, start = self.style.marker, self._held.lstrip(_SPACE)
        if start == marker:
            self._mode = self._after_marker
        elif self.style.bare and self._untouched and start == "{":
            self._open("{")
        elif not marker.startswith(start):
            self._untouched = False
            keep = next(i for i in range(1, len(self._held) + 1) if marker.startswith(self._held[i:].lstrip(_SPACE)))
            self._text(self._held[:keep])
            self._held = self._held[keep:]

    def _after_marker(self, character: str) -> None:
        self._in_list = False
        if character == "{":
            self._open(character)
        elif character == "[" and self.style.listed:
            self._in_list, self._mode = True, self._in_list_item
        elif character not in _SPACE:
            if self.style.named and character.isidentifier():
                self._name, self._mode = character, self._in_name
            else:
                self._fail(character)

    def _in_list_item(self, character: str) -> None:
        if character == "{":
            self._open(character)
        elif character == "]":
            self._held, self._mode = "", self._in_text
        elif character not in _SPACE:
            self._fail(character)

    def _open(self, character: str) -> None:
        self._call, self._mode = CallScanner(), self._in_call
        self._call.feed(character)

    def _in_call(self, character: str) -> None:
        call, named = self._call, self._call.name is not None
        call.feed(character)
        if call.name is not None and not named:
            self._begin_call(call.name)
        if call.name is not None:
            self._arguments(call.take())
            self._held = ""
        if call.state is CallState.DONE:
            self._mode = self._after_call
        elif call.state is CallState.BROKEN and call.name is not None:
            self._held, self._mode = character, self._in_text
            self._in_text(character)
        elif call.state is CallState.BROKEN:
            self._fail(character)

    def _in_name(self, character: str) -> None:
        if character == "{":
            self._begin_call(self._name.split("[")[0].strip())  # `[ARGS]`, or `[CALL_ID]...[ARGS]`, is in between
            self._value, self._mode = ValueScanner(), self._in_value
            self._in_value(character)
        elif character == "\n" or len(self._name) == _LONGEST_NAME:
            self._fail(character)
        else:
            self._name += character

    def _in_value(self, character: str) -> None:
        self._value.feed(character)
        self._arguments(character)
        self._held = ""
        if self._value.done:
            self._mode = self._after_call

    def _after_call(self, character: str) -> None:
        """After a call: its end mark, the next call, or text."""
        rest = self._held.lstrip(_SPACE + ";" if self.style.bare else _SPACE)
        if self._in_list and rest:
            self._held, self._mode = "", self._in_list_item if rest == "," else self._in_text
            if rest not in ",]":
                self._held = character
                self._in_text(character)
        elif self.style.bare and rest == "{":
            self._held = rest
            self._open(rest)
        elif rest and rest == self.style.end:
            self._held, self._mode = "", self._in_text
        elif rest and not self.style.end.startswith(rest):
            self._mode = self._in_text
            self._in_text(character)

    def _fail(self, character: str) -> None:
        """Emit the held-back text, which is no call; the character that shows this may begin another call."""
        self._text(self._held[:-1])
        self._held, self._mode, self._untouched = character, self._in_text, False
        self._in_text(character)


class ValueScanner:
    """Finds the end of a JSON value by its brackets and quotes, without checking what is between them."""

    def __init__(self) -> None:
        self.done = False
        self.text = ""
        self._depth = 0
        self._in_text = self._escaped = False

    def feed(self, character: str) -> bool:
        """Add a character; returns False if the value ended before it."""
        if self.done:
            return False
        if self._in_text:
            self._in_text = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
            self.done = not self._in_text and self._depth == 0
        elif character == '"':
            self._in_text = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]" and self._depth:
            self._depth -= 1
            self.done = self._depth == 0
        elif self._depth == 0 and character in ",}]" + _SPACE:
            self.done = True
            return False
        self.text += character
        return True


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

    def take(self) -> str:
        """Return the arguments, as the model wrote them, that arrived since the last `take`."""
        taken, self._pending = self._pending, ""
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
            (CallState.NEXT, "}"): CallState.DONE,
        }
        if self.state is CallState.VALUE:
            self.state = CallState.BROKEN if character in ",}]:" else CallState.IN_VALUE
            self._begin(character)
            return
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
            self._key, self.state = _text(self._value.text) or "", CallState.COLON
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
        if self._key == _NAME:
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
