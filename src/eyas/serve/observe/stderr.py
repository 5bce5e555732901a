"""Standard error of a server: one JSON object a line if asked, also for libraries, and never a reason to fail."""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
from contextlib import suppress
from typing import IO

from eyas.serve.observe.logs import Form, LineFormatter, log_to


def open_stderr(form: Form) -> None:
    """From now on the process writes its log and everything else that goes to standard error in this form."""
    stderr = DurableStream(sys.stderr)
    log_to(stderr, form)
    sys.stderr = JsonLineStream(stderr) if form == "json" else stderr


class DurableStream(io.TextIOBase):
    """A stream over another one, where a full disk, or a reader that is gone, costs what was written and nothing else.

    It keeps nothing in a buffer that would have to be written at the end.
    """

    errors = "backslashreplace"

    def __init__(self, stream: IO[str] | io.TextIOBase) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of what is written."""
        return "utf-8"

    def fileno(self) -> int:
        """The file descriptor, if the stream below has one."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """Whether somebody is watching."""
        return self._stream.isatty()

    def writable(self) -> bool:
        """True."""
        return True

    def write(self, text: str) -> int:
        """Write text, or as much of it as can be."""
        with self._lock, suppress(OSError, ValueError):  # ValueError: the stream is closed
            try:
                number = self._stream.fileno()
            except OSError:  # a stream in memory
                self._stream.write(text)
                self._stream.flush()
                return len(text)
            data = text.encode(self.encoding, self.errors)
            while data:
                data = data[os.write(number, data) :]
        return len(text)


class JsonLineStream(DurableStream):
    """Writes each line as the JSON object of a log line, for what isn't logged: notes, warnings, tracebacks."""

    def __init__(self, stream: DurableStream) -> None:
        super().__init__(stream)
        self._formatter = LineFormatter("json")
        self._begun = ""

    def isatty(self) -> bool:
        """False: nobody wants to watch progress in JSON."""
        return False

    def write(self, text: str) -> int:
        """Write the lines that are complete; the rest waits for its end."""
        with self._lock:
            *lines, self._begun = (self._begun + text).replace("\r", "\n").split("\n")
            for line in filter(str.strip, lines):
                record = logging.LogRecord("stderr", logging.INFO, "", 0, line, None, None)
                self._stream.write(self._formatter.format(record) + "\n")
        return len(text)
