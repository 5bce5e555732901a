"""A log record as one line: for people, or as a JSON object."""

from __future__ import annotations

import json
import logging
import time
from typing import Any, Literal

Form = Literal["text", "json"]


class Lines(logging.Formatter):
    """`time level message key=value ...` or JSON; the keys are the record's `fields` (`extra={"fields": {...}}`)."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self._json = form == "json"

    def format(self, record: logging.LogRecord) -> str:
        """The line. Only a traceback, in the form for people, takes more than one."""
        fields: dict[str, Any] = getattr(record, "fields", {})
        message, level = record.getMessage(), record.levelname.lower()
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        trace = self.formatException(record.exc_info) if record.exc_info else None
        if self._json:
            entry = {"time": moment, "level": level, "message": message, **fields}
            return json.dumps(entry if trace is None else entry | {"traceback": trace}, default=str)
        told = "".join(f" {name}={_readable(value)}" for name, value in fields.items())
        line = f"{moment} {level} {_one_line(message)}{told}"
        return line if trace is None else f"{line}\n{trace}"


def _readable(value: Any) -> str:
    if isinstance(value, list):
        return "/".join(str(each) for each in value)
    if isinstance(value, str):  # what clients send may hold spaces, line breaks and escapes
        return value if value.isprintable() and value and " " not in value else json.dumps(value)
    return json.dumps(value, default=str)


def _one_line(text: str) -> str:
    return text if text.isprintable() else json.dumps(text)
