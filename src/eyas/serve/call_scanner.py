"""Reading one call, `{"name": ..., "arguments": ...}`, a character at a time.

The arguments are handed out as they come, as the model wrote them, once the name is known.
"""

from __future__ import annotations

import json
from enum import Enum, auto

_NAME = "name"
_ARGUMENTS = ("arguments", "parameters")
_SPACE = " \t\r\n"


class ValueScanner:
    """Finds where a JSON value ends. It trusts the model with what lies within."""

    def __init__(self) -> None:
        self.done = False
        self.text = ""
        self._depth = 0
        self._in_text = self._escaped = False

    def feed(self, character: str) -> bool:
        """Take a character; False if the value ended before it."""
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


class State(Enum):
    """What is expected next."""

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
    """One call. `name` is None until it is known; `pending` are arguments that nobody has taken yet."""

    def __init__(self) -> None:
        self.state = State.OPEN
        self.name: str | None = None
        self.pending = ""
        self._key = ""
        self._value = ValueScanner()
        self._any_arguments = False

    def take(self) -> str:
        """The arguments since the last time."""
        taken, self.pending = self.pending, ""
        return taken

    def feed(self, character: str) -> None:
        """Take a character, until `state` is DONE or BROKEN."""
        if self.state is State.IN_KEY or self.state is State.IN_VALUE:
            self._inside(character)
            return
        if character in _SPACE:
            return
        expected = {
            (State.OPEN, "{"): State.KEY,
            (State.KEY, '"'): State.IN_KEY,
            (State.KEY, "}"): State.DONE,
            (State.COLON, ":"): State.VALUE,
            (State.NEXT, ","): State.KEY,
            (State.NEXT, "}"): State.DONE,
        }
        if self.state is State.VALUE:
            self.state = State.BROKEN if character in ",}]:" else State.IN_VALUE
            self._begin(character)
            return
        self.state = expected.get((self.state, character), State.BROKEN)
        if self.state is State.IN_KEY:
            self._begin(character)
        elif self.state is State.DONE:
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
        if self.state is State.IN_KEY:
            self._key, self.state = _text(self._value.text) or "", State.COLON
        else:
            self._finish_value()
            self.state = State.NEXT
        if not taken:
            self.feed(character)

    @property
    def _is_arguments(self) -> bool:
        return self.state is State.IN_VALUE and self._key in _ARGUMENTS

    def _stream(self, character: str) -> None:
        if self._is_arguments and not self._value.text.startswith('"'):
            self.pending += character

    def _finish_value(self) -> None:
        if self._key == _NAME:
            self.name = _text(self._value.text)
        elif self._is_arguments:
            self._any_arguments = True
            if self._value.text.startswith('"'):  # JSON within a JSON string
                self.pending += _text(self._value.text) or "{}"

    def _close(self) -> None:
        if not self.name:
            self.state = State.BROKEN
        elif not self._any_arguments:
            self.pending += "{}"


def _text(literal: str) -> str | None:
    """What a JSON string says; None if it is none."""
    try:
        value = json.loads(literal)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
