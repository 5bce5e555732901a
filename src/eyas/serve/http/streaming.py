"""Sending generated responses: one JSON document, or server-sent events, or lines, as they are generated.

A stream ends, and its generator with it, as soon as the client is gone or has read nothing for too long.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from itertools import chain, repeat
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from eyas.serve.errors import ApiError, as_api_error
from eyas.serve.http.request import disconnected

DONE = b"data: [DONE]\n\n"
"""The event that ends a stream."""
_SECONDS_AT_ONCE = 0.005
"""How long JSON is encoded on the event loop before other tasks get a turn."""
_LEVELS, _VALUES_AT_ONCE = 4, 32
"""Outer levels of a document that are encoded value by value, and values per piece in the lists below them."""


class GeneratedResponse(Protocol):
    """A response that is being generated. Only one of the two methods is called, once."""

    async def full(self) -> dict[str, Any]:
        """The body of a response that isn't streamed, once everything is generated."""

    def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of a streamed response, as they are generated."""


async def respond(
    generated: GeneratedResponse,
    *,
    stream: bool | None,
    write_seconds: float,
    typed: bool = False,
    ends_itself: bool = False,
    lines: bool = False,
) -> Response:
    """Make the HTTP response: a stream immediately, a JSON document once it is complete.

    `typed`: events are named by their `type`, as in the Responses API. `ends_itself`: the last event says that it is
    the last, and none follows. `lines`: each chunk is a line of JSON instead of an event, as in Ollama's API.
    """
    if stream and lines:
        return LineStream(generated.events(), write_seconds)
    if stream:
        return EventStream(generated.events(), write_seconds, typed, b"" if typed or ends_itself else DONE)
    return Response(await encoded(await generated.full()), media_type="application/json")


async def encoded(value: Any) -> bytes:
    """Encode a value as JSON, in pieces between which other requests get a turn."""
    pieces = []
    loop = asyncio.get_running_loop()
    until = loop.time() + _SECONDS_AT_ONCE
    for piece in _json_pieces(value):
        pieces.append(piece)
        if loop.time() > until:
            await asyncio.sleep(0)
            until = loop.time() + _SECONDS_AT_ONCE
    return "".join(pieces).encode()


def _json_pieces(value: Any, depth: int = 0) -> Iterator[str]:
    """Yield the JSON of a value in pieces: outer levels value by value, long lists below them a few at a time."""
    if isinstance(value, dict) and value and depth < _LEVELS:
        for start, (name, each) in zip(chain("{", repeat(",")), value.items(), strict=False):
            yield f"{start}{_json(name)}:"
            yield from _json_pieces(each, depth + 1)
        yield "}"
    elif isinstance(value, list) and value and depth < _LEVELS:
        for start, each in zip(chain("[", repeat(",")), value, strict=False):
            yield start
            yield from _json_pieces(each, depth + 1)
        yield "]"
    elif isinstance(value, list) and len(value) > _VALUES_AT_ONCE:
        for at in range(0, len(value), _VALUES_AT_ONCE):
            yield ("," if at else "[") + _json(value[at : at + _VALUES_AT_ONCE])[1:-1]
        yield "]"
    else:
        yield _json(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class EventStream(Response):
    """Sends what a generator yields as events, and closes the generator however the stream ends."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[dict[str, Any], None],
        write_seconds: float,
        typed: bool = False,
        end: bytes = DONE,
    ) -> None:
        """`write_seconds`: how long the client may read nothing before it is cut off. `end` follows the events."""
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._write_seconds = write_seconds
        self._typed = typed
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  # ASGI
        sender = asyncio.ensure_future(self._send_all(send))
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({sender, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sender, gone):
                task.cancel()
            await asyncio.gather(sender, gone, return_exceptions=True)
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for value in self._events:
                await self._send(send, self._written(value))
        except Exception as error:  # noqa: BLE001  # the status is sent already: errors are events now
            await self._send(send, self._failure(as_api_error(error)))
        await self._send(send, self._end, more=False)

    def _written(self, value: dict[str, Any]) -> bytes:
        name = b"event: " + value["type"].encode() + b"\n" if self._typed else b""
        return name + _event(value)

    def _failure(self, error: ApiError) -> bytes:
        return _event(error.body)

    async def _send(self, send: Send, data: bytes, more: bool = True) -> None:
        """Send one event, waiting while the client's buffers are full; cancels this task if that takes too long."""
        task = asyncio.current_task()
        assert task is not None
        watchdog = asyncio.get_running_loop().call_later(self._write_seconds, task.cancel)
        await send({"type": "http.response.body", "body": data, "more_body": more})
        watchdog.cancel()


class LineStream(EventStream):
    """Sends what a generator yields as lines of JSON; the generator's last line says that it is the last."""

    media_type = "application/x-ndjson"

    def __init__(self, events: AsyncGenerator[dict[str, Any], None], write_seconds: float) -> None:
        super().__init__(events, write_seconds, end=b"")

    def _written(self, value: dict[str, Any]) -> bytes:
        return _json(value).encode() + b"\n"

    def _failure(self, error: ApiError) -> bytes:
        return self._written(error.ollama_body)


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + _json(value).encode() + b"\n\n"
