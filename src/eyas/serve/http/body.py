"""Reading request bodies: never more than so many bytes, JSON and nothing else."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from pydantic_core import from_json
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eyas.serve.http.errors import ApiError

_LINGER_BYTES, _LINGER_SECONDS = 128 << 20, 5.0
"""What is read and dropped of a body that is too large: a client that is cut off while it sends never sees why."""
_MOST_VALUES = 1 << 15
"""Megabytes of small values that are each wrong take minutes to refuse, one by one."""


class BodyLimit:
    """ASGI middleware: 413 for bodies over `limit` bytes, declared or found out while reading; 408 for slow ones.

    `seconds` may pass between two pieces.
    """

    def __init__(self, app: ASGIApp, limit: int, seconds: float) -> None:
        self._app, self._limit, self._seconds = app, limit, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        declared = headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared[:20]) > self._limit:
            if headers.get(b"expect", b"").lower() != b"100-continue":  # else it hasn't been sent yet
                await _drop(receive)
            await self._too_large().send(scope, receive, send)
            return
        got, complete = 0, False

        async def counted() -> Message:
            nonlocal got, complete
            if complete:  # nothing comes any more but the end of the connection
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), self._seconds)
            except asyncio.TimeoutError:
                text = f"the body stopped coming for {self._seconds:g} seconds"
                raise ApiError(408, text, code="body_too_slow", headers={"Connection": "close"}) from None
            if message["type"] == "http.request":
                got, complete = got + len(message.get("body", b"")), not message.get("more_body")
                if got > self._limit:
                    if not complete:
                        await _drop(receive)
                    raise self._too_large()
            return message

        await self._app(scope, counted, send)

    def _too_large(self) -> ApiError:
        message = f"the body is larger than {self._limit} bytes, the most this server reads"
        return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})


async def _drop(receive: Receive) -> None:
    """Read on for a while, so that the client can finish sending and read the answer."""
    dropped, until = 0, time.monotonic() + _LINGER_SECONDS
    while dropped < _LINGER_BYTES and time.monotonic() < until:
        message = await receive()
        dropped += len(message.get("body", b""))
        if message["type"] != "http.request" or not message.get("more_body"):
            return


class JsonRequest(Request):
    """A request whose JSON is bounded in depth and in values, strict UTF-8, and has no NaN."""

    async def json(self) -> Any:
        """The body's value; ApiError says what is wrong with it."""
        if not hasattr(self, "_json"):
            body = await self.body()
            try:
                self._json = from_json(body, allow_inf_nan=False)
            except ValueError as error:
                raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error
            _check_count(self._json)
        return self._json

    def check_content_type(self) -> None:
        """JSON must be declared, which also keeps other sites' forms out of a browser."""
        kind = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
            raise ApiError(415, "send the body as Content-Type: application/json", code="unsupported_media_type")


def _check_count(body: Any) -> None:
    """ApiError if there are too many values; prompts of nothing but token ids don't count."""
    given = [body.get(name) for name in ("prompt", "tokens")] if isinstance(body, dict) else []
    prompts = [*given, *(each for one in given if isinstance(one, list) for each in one[:_MOST_VALUES])]
    ids = {id(each) for each in prompts if isinstance(each, list) and set(map(type, each)) == {int}}
    count, left = 0, [body]
    while left:
        inside = left.pop()
        if not isinstance(inside, dict | list) or id(inside) in ids:
            continue
        count += len(inside)
        if count > _MOST_VALUES:
            message = f"the body has more than {_MOST_VALUES} values, token ids not counted: send less at a time"
            raise ApiError(400, message, code="too_many_values")
        left += inside.values() if isinstance(inside, dict) else inside
