"""Logs of a server: a line for each request, and lines of statistics at intervals while the engine runs.

Prompts and answers are never logged. A repeated warning is written at most once a second.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import sys
import threading
import time
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any, Literal

from eyas.runtime import LOADING
from eyas.serve.observe.observer import FinishedSequence, Observer, ReceivedSequence
from eyas.types import Stats

if TYPE_CHECKING:
    from eyas.engine import Engine
    from eyas.engine.controller import ControllerState
    from eyas.engine.round import RoundOutput
    from eyas.types import EngineState

Form = Literal["text", "json"]
Level = Literal["debug", "info", "warning", "error"]

_LOGGER = logging.getLogger("eyas.serve")
_LONGEST_PATH = 200
"""Maximum characters logged of a path that isn't an endpoint: clients can make up any path."""
_MAX_SEEN = 1024
"""How many different warnings `RepeatFilter` remembers."""


def log_to(stream: IO[str] | io.TextIOBase, form: Form = "text", level: int = logging.INFO) -> None:
    """Make the loggers of the server, uvicorn and asyncio write to a stream; uvicorn needs `log_config=None` for it."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter(form))
    handler.addFilter(RepeatFilter())
    for logger in (_LOGGER, LOADING, logging.getLogger("uvicorn"), logging.getLogger("asyncio")):
        logger.handlers[:] = [handler]
        # the libraries' debug lines don't help with a request
        logger.setLevel(level if logger in (_LOGGER, LOADING) else max(level, logging.INFO))
        logger.propagate = False
    logging.getLogger("uvicorn.access").setLevel(logging.WARNING)  # requests have lines of their own


class RepeatFilter(logging.Filter):
    """Lets a warning or error through once a second; the next one says how many were held back.

    Lines with fields of their own, such as request lines, always pass.
    """

    def __init__(self, seconds: float = 1.0) -> None:
        super().__init__()
        self._seconds = seconds
        self._seen: dict[tuple[object, ...], tuple[float, int]] = {}  # (last written, number held back)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is to be written."""
        if record.levelno < logging.WARNING or hasattr(record, "fields"):
            return True
        key = (record.name, str(record.msg), record.exc_info and record.exc_info[0])
        written, held = self._seen.get(key, (-math.inf, 0))
        if record.created - written < self._seconds:
            self._seen[key] = written, held + 1
            return False
        if len(self._seen) >= _MAX_SEEN:
            self._seen.clear()
        self._seen[key] = record.created, 0
        if held:
            record.fields = {"repeated": held}
        return True


def log_loaded(engine: Engine, drafter: str | None, tree: str | None, seconds: float) -> None:
    """Log what was loaded in `seconds`: precision, device, drafter, cache, and what calibration measured."""
    from eyas.targets.native.products import describe_products
    from eyas.targets.parameters import parameter_count  # imports torch: as late as possible

    target, controller = engine.target, engine.controller
    fields: dict[str, Any] = {
        "seconds": round(seconds, 1),
        "model": type(target.model).__name__,
        "parameters": parameter_count(target.model),
        **target.precision,
        "device": str(target.device),
        "passes": "transformers" if target.decoder is None else target.decoder.name,
        "kernels": describe_products(target.model),
        "drafter": "none: plain decoding" if engine.speculation is None else drafter,
        "max_running": engine.limits.max_running,
        "cache_tokens": engine.limits.max_cached_tokens or "what memory allows",
        "context": target.max_length or "no limit",
    }
    if engine.speculation is not None:
        fields["tree"] = tree or "the drafter's own"
    if controller is not None:
        table = controller.costs.table
        fields |= {
            "pass_ms": round(1000 * float(table.pass_by_tokens.at(1)), 2),
            "pass_of_8_tokens_ms": round(1000 * float(table.pass_by_tokens.at(8)), 2),
            "draft_level_ms": round(1000 * float(table.level_by_positions.at(1)), 2),
        }
    _write(logging.INFO, "loaded", fields)


def log_listening(name: str, address: str, loading: str) -> None:
    """Log the addresses of the API, the page and the health check."""
    fields = {"api": f"{address}/v1", "page": f"{address}/", "health": f"{address}/health"}
    _write(logging.INFO, f"eyas serves {name}: {loading}", fields)


class Logs(Observer):
    """Logs finished requests, errors and statistics; `close` stops its timer."""

    def __init__(self, every: float = 10.0) -> None:
        """`every`: seconds between lines of statistics; 0 = no such lines."""
        self._every = every
        self._interval = StatisticsInterval()
        self._timer: threading.Timer | None = None
        self._closed = False
        self._lock = threading.Lock()

    def request_received(self, sequence: ReceivedSequence) -> None:
        """Log its id and sizes at debug level."""
        _write(logging.DEBUG, "received", dict(vars(sequence)))

    def finished(self, finished: FinishedSequence) -> None:
        """Log how the sequence ended, how long it took and what speculation gained."""
        stats, first = finished.stats, finished.first_token_seconds
        fields: dict[str, Any] = {
            "id": finished.sequence.id,
            "endpoint": finished.sequence.endpoint,
            "reason": finished.reason,
            "prompt_tokens": finished.sequence.prompt_tokens,
            "tokens": stats.tokens,
            "seconds": round(finished.seconds, 3),
        }
        if stats.queue_seconds:
            fields["queue_seconds"] = round(stats.queue_seconds, 3)
        if first is not None:
            fields["first_token_seconds"] = round(first, 3)
        if stats.drafted_depth:
            fields["accept_length"] = round(stats.accept_length, 2)
        _write(logging.WARNING if finished.reason == "error" else logging.INFO, "finished", fields)

    def refused(self, endpoint: str, status: int, code: str, path: str) -> None:
        """Log an error response, at error level if the server is at fault."""
        fields = {"endpoint": endpoint or path[:_LONGEST_PATH], "status": status, "code": code}
        _write(logging.ERROR if status >= 500 else logging.INFO, "refused", fields)

    def stepped(self, state: EngineState, controller: ControllerState | None, outcome: RoundOutput | None) -> None:
        """Count a step; the first one after a pause starts the timer of the statistics."""
        if not self._every:
            return
        with self._lock:
            self._interval.add(state, controller, outcome)
            if self._timer is None and not self._closed:
                self._start()

    def close(self) -> None:
        """Log the statistics since the last line, and stop logging them."""
        with self._lock:
            self._closed = True
            timer = self._timer
            self._timer = None
        if timer is not None:
            timer.cancel()
            self._write_statistics()

    def _start(self) -> None:
        self._began = time.monotonic()
        self._timer = threading.Timer(self._every, self._tick)
        self._timer.daemon = True
        self._timer.start()

    def _tick(self) -> None:
        """Log the interval that is over; restart the timer unless the engine was idle."""
        written = self._write_statistics()
        with self._lock:
            if self._closed:
                return
            self._timer = None
            if written:
                self._start()

    def _write_statistics(self) -> bool:
        with self._lock:
            fields = self._interval.fields(max(time.monotonic() - self._began, 1e-6))
            self._interval = self._interval.next()
        if fields is not None:
            _write(logging.INFO, "statistics", fields)
        return fields is not None


def _write(level: int, message: str, fields: dict[str, Any]) -> None:
    if _LOGGER.isEnabledFor(level):
        _LOGGER.log(level, message, extra={"fields": fields})


class LineFormatter(logging.Formatter):
    """Formats a record as `time level message key=value ...` or as JSON, with the record's `fields` as keys."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self._json = form == "json"

    def format(self, record: logging.LogRecord) -> str:
        """Format one line; in text form, a traceback follows on lines of its own."""
        fields: dict[str, Any] = getattr(record, "fields", {})
        message = record.getMessage()
        level = record.levelname.lower()
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        trace = self.formatException(record.exc_info) if record.exc_info else None
        if self._json:
            entry = {"time": moment, "level": level, "message": message, **fields}
            return json.dumps(entry if trace is None else entry | {"traceback": trace}, default=str)
        pairs = "".join(f" {name}={_readable(value)}" for name, value in fields.items())
        line = f"{moment} {level} {_one_line(message)}{pairs}"
        return line if trace is None else f"{line}\n{trace}"


def _readable(value: Any) -> str:
    if isinstance(value, list):
        return "/".join(str(each) for each in value)
    if isinstance(value, str):  # what clients send may contain spaces, line breaks and escapes
        return value if value.isprintable() and value and " " not in value else json.dumps(value)
    return json.dumps(value, default=str)


def _one_line(text: str) -> str:
    return text if text.isprintable() else json.dumps(text)


class StatisticsInterval:
    """What the engine did between two lines of statistics."""

    def __init__(self, since: EngineState | None = None) -> None:
        """`since`: the engine's state at the beginning of the interval; None = a new engine."""
        self._since = since
        self._state: EngineState | None = None
        self._controller: ControllerState | None = None
        self._drafts = Stats()  # of sequences with a draft tree
        self._rows = self._rounds = self._plain = 0

    def add(self, state: EngineState, controller: ControllerState | None, outcome: RoundOutput | None) -> None:
        """Count a step, with its decoding round if it had one."""
        self._state = state
        self._controller = controller
        if outcome is None:
            return
        self._rounds += 1
        self._plain += outcome.draft is None
        self._rows += len(outcome.accepted)
        rows = zip(outcome.accepted, outcome.offered, outcome.nodes, outcome.contexts, strict=True)
        for accepted, offered, nodes, context in rows:
            if nodes:
                self._drafts.record(accepted, offered, context)

    def next(self) -> StatisticsInterval:
        """Return the interval that follows this one."""
        return StatisticsInterval(self._state or self._since)

    def fields(self, seconds: float) -> dict[str, Any] | None:
        """The fields of the line for an interval of `seconds`; None if the engine made no step."""
        state = self._state
        since = self._since
        controller = self._controller
        if state is None:
            return None
        generated = state.generated_tokens_total - (since.generated_tokens_total if since else 0)
        prompt = state.prompt_tokens_total - (since.prompt_tokens_total if since else 0)
        reused = state.prefix_hit_tokens_total - (since.prefix_hit_tokens_total if since else 0)
        preempted = state.preempted_total - (since.preempted_total if since else 0)
        fields: dict[str, Any] = {
            "running": state.running + state.prefilling,
            "waiting": state.waiting,
            "tokens_per_second": round(generated / seconds, 1),
            "prompt_tokens_per_second": round(prompt / seconds, 1),
            "cached_tokens": state.cached_tokens,
        }
        if reused:
            fields["prefix_hit_rate"] = round(reused / prompt, 3) if prompt else 1.0
        if preempted:
            fields["preempted"] = preempted
        if self._drafts.target_passes:
            fields["accept_length"] = round(1 + self._drafts.walked / self._rows, 2)
            fields["acceptance_by_position"] = [round(rate, 2) for rate in self._drafts.accepted_by_position]
            fields["accepted_histogram"] = self._drafts.accepted_histogram
            fields["plain_rounds"] = round(self._plain / self._rounds, 3)
        if controller is not None:
            fields["tree"] = f"{controller.depth},{controller.width},{controller.budget}"
        return fields


def open_stderr(form: Form, level: Level = "info") -> None:
    """From now on, write the log, from a level up, and everything else that goes to standard error in this form."""
    stderr = DurableStream(sys.stderr)
    levels = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
    log_to(stderr, form, levels[level])
    sys.stderr = JsonLineStream(stderr) if form == "json" else stderr


class DurableStream(io.TextIOBase):
    """A stream around another one that survives a full disk or a reader that is gone: only the written text is lost.

    It keeps no buffer that would have to be flushed at exit.
    """

    errors = "backslashreplace"

    def __init__(self, stream: IO[str] | io.TextIOBase) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the output."""
        return "utf-8"

    def fileno(self) -> int:
        """The file descriptor, if the underlying stream has one."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """Whether the underlying stream is a terminal."""
        return self._stream.isatty()

    def writable(self) -> bool:
        """True."""
        return True

    def write(self, text: str) -> int:
        """Write text, or as much of it as possible."""
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
    """Writes each line as a JSON log line, for output that isn't logged: notes, warnings, tracebacks."""

    def __init__(self, stream: DurableStream) -> None:
        super().__init__(stream)
        self._formatter = LineFormatter("json")
        self._begun = ""

    def isatty(self) -> bool:
        """False, so that no progress bars are shown."""
        return False

    def write(self, text: str) -> int:
        """Write the complete lines; the rest waits for its line break."""
        with self._lock:
            *lines, self._begun = (self._begun + text).replace("\r", "\n").split("\n")
            for line in filter(str.strip, lines):
                record = logging.LogRecord("stderr", logging.INFO, "", 0, line, None, None)
                self._stream.write(self._formatter.format(record) + "\n")
        return len(text)
