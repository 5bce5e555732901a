"""Logs of a server: a line a request and a line of statistics an interval; silent when idle.

Prompts and answers are never written.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import IO, TYPE_CHECKING, Any

from eyas.serve.interval import Interval
from eyas.serve.log_lines import Form, Lines
from eyas.serve.observer import Finished, Observer, Received

if TYPE_CHECKING:
    from eyas.engine.controller import ControllerState
    from eyas.engine.round import Outcome
    from eyas.engine.state import EngineState

_LOGGER = logging.getLogger("eyas.serve")


def log_to(stream: IO[str], form: Form = "text", level: int = logging.INFO) -> None:
    """Let the server's loggers and uvicorn's write lines to a stream (run uvicorn with `log_config=None`)."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(Lines(form))
    for logger in (_LOGGER, logging.getLogger("uvicorn")):
        logger.handlers[:] = [handler]
        logger.setLevel(level)
        logger.propagate = False
    logging.getLogger("uvicorn.access").setLevel(logging.WARNING)  # a request has lines of its own


class Logs(Observer):
    """Writes lines; of tokens the line of their request's end tells. `close()` ends its timer."""

    def __init__(self, every: float = 10.0) -> None:
        """A line of statistics every so many seconds while the engine makes steps; 0 = none."""
        self._every = every
        self._interval = Interval()
        self._timer: threading.Timer | None = None
        self._closed = False
        self._lock = threading.Lock()

    def request_received(self, request: Received) -> None:
        """Its id and size; seen at level debug, the line of its end tells the rest."""
        fields = {
            "id": request.id,
            "endpoint": request.endpoint,
            "prompt_tokens": request.prompt_tokens,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "stream": request.stream,
            "speculate": request.speculate,
        }
        _write(logging.DEBUG, "received", fields)

    def finished(self, finished: Finished) -> None:
        """How it went."""
        stats, first = finished.stats, finished.first_token_seconds
        fields: dict[str, Any] = {
            "id": finished.request.id,
            "endpoint": finished.request.endpoint,
            "reason": finished.reason,
            "prompt_tokens": finished.request.prompt_tokens,
            "tokens": stats.tokens,
            "seconds": round(finished.seconds, 3),
            "queue_seconds": round(stats.queue_seconds, 3),
        }
        if first is not None:
            fields["first_token_seconds"] = round(first, 3)
        if stats.drafted_depth:
            fields["accept_length"] = round(stats.accept_length, 2)
        _write(logging.WARNING if finished.reason == "error" else logging.INFO, "finished", fields)

    def refused(self, endpoint: str, status: int, code: str) -> None:
        """What was answered."""
        fields = {"endpoint": endpoint, "status": status, "code": code}
        _write(logging.ERROR if status >= 500 else logging.INFO, "refused", fields)

    def stepped(self, state: EngineState, controller: ControllerState | None, outcome: Outcome | None) -> None:
        """Count; the first step after a pause starts the clock."""
        if not self._every:
            return
        with self._lock:
            self._interval.add(state, controller, outcome)
            if self._timer is None and not self._closed:
                self._start()

    def close(self) -> None:
        """Write what was counted since the last line, and no more."""
        with self._lock:
            self._closed = True
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
            self._tell()

    def _start(self) -> None:
        self._began = time.monotonic()
        self._timer = threading.Timer(self._every, self._tick)
        self._timer.daemon = True
        self._timer.start()

    def _tick(self) -> None:
        """The interval is over: tell, and go on unless nothing happened."""
        told = self._tell()
        with self._lock:
            if self._closed:
                return
            self._timer = None
            if told:
                self._start()

    def _tell(self) -> bool:
        with self._lock:
            fields = self._interval.fields(max(time.monotonic() - self._began, 1e-6))
            self._interval = self._interval.next()
        if fields is not None:
            _write(logging.INFO, "statistics", fields)
        return fields is not None


def _write(level: int, message: str, fields: dict[str, Any]) -> None:
    if _LOGGER.isEnabledFor(level):
        _LOGGER.log(level, message, extra={"fields": fields})
