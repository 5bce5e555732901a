"""Server-sent events: sent as they come; over as soon as the client is gone or takes nothing for too long."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from eyas.serve.api.reply import Reply
from eyas.serve.api.schema.sampling import SamplingFields
from eyas.serve.context import Context
from eyas.serve.http.errors import ApiError, as_api_error

T = TypeVar("T")
DONE = b"data: [DONE]\n\n"


def event(value: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class EventStream(Response):
    """Sends what a generator yields and closes it, in whatever way the stream ends."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[dict[str, Any], None], write_seconds: float) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._write_seconds = events, write_seconds

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
                await self._send(send, event(value))
        except Exception as error:  # noqa: BLE001  # the status is sent already: errors are events now
            await self._send(send, event(as_api_error(error).body))
        await self._send(send, DONE, more=False)

    async def _send(self, send: Send, data: bytes, more: bool = True) -> None:
        """Waits while the client's buffers are full; cancels itself when that takes too long."""
        task = asyncio.current_task()
        assert task is not None
        watchdog = asyncio.get_running_loop().call_later(self._write_seconds, task.cancel)
        await send({"type": "http.response.body", "body": data, "more_body": more})
        watchdog.cancel()


async def disconnected(receive: Receive) -> None:
    """Until the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The work's result; it is cancelled as soon as the client is gone."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(request.receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(499, "the client is gone", code="client_gone")
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


# How a reply leaves: as one JSON document or as events, and not at all once its client is gone.


A = TypeVar("A", bound=SamplingFields)


async def send(
    request: Request, asked: A, context: Context, begin: Callable[[Request, A, Context], Coroutine[Any, Any, Reply]]
) -> Response:
    """`begin` hands the request to the engine: what goes wrong until then has a status of its own."""
    context.check_model(asked.model)
    beginning = begin(request, asked, context)
    if asked.stream:
        reply = await while_connected(request, beginning)
        return EventStream(reply.events(), context.settings.write_seconds)

    async def whole() -> dict[str, Any]:
        return await (await beginning).whole()

    return JSONResponse(await while_connected(request, whole()))
