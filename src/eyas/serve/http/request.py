"""Reading requests: bodies of limited size, strict JSON, and clients that leave before they are answered."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from fastapi.routing import APIRoute
from jiter import from_json
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eyas.serve.context import client_id
from eyas.serve.errors import ApiError

T = TypeVar("T")
_LINGER_BYTES = 128 << 20
_LINGER_SECONDS = 5.0
"""Seconds for which an oversized body is read and dropped, because a client cut off while sending never sees the
error."""
_UNDECLARED = ("", "application/x-www-form-urlencoded")
_MAX_VALUES = 1 << 15
"""Maximum values in a JSON body, because megabytes of small invalid ones would take minutes to refuse."""


class BodyLimitMiddleware:
    """ASGI middleware: 413 for bodies over `limit` bytes, declared or noticed while reading; 408 for slow ones.

    Bodies with `Content-Encoding: gzip` are decompressed, to at most `limit` bytes; 415 for other encodings.
    """

    def __init__(self, app: ASGIApp, limit: int, seconds: float) -> None:
        """`seconds`: how long a client may pause between two pieces of a body."""
        self._app = app
        self._limit = limit
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        declared = headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared[:20]) > self._limit:
            if headers.get(b"expect", b"").lower() != b"100-continue":  # otherwise the body hasn't been sent yet
                await _drop(receive)
            await self._too_large().send(scope, receive, send)
            return
        coding = headers.get(b"content-encoding", b"").strip().lower()
        if coding not in (b"", b"identity", b"gzip", b"x-gzip"):
            message = f"the body is encoded as {coding.decode('latin-1')[:50]!r}: send it uncompressed or as gzip"
            error = ApiError(415, message, code="unsupported_encoding", headers={"Accept-Encoding": "gzip, identity"})
            await error.send(scope, receive, send)
            return
        gzip = _Gunzip(self._limit) if coding.endswith(b"gzip") else None
        got, complete = 0, False

        async def limited_receive() -> Message:
            nonlocal got, complete
            if complete:  # only the end of the connection can follow
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), self._seconds)
            except asyncio.TimeoutError:
                text = f"no more of the body arrived for {self._seconds:g} seconds"
                raise ApiError(408, text, code="body_too_slow", headers={"Connection": "close"}) from None
            if message["type"] == "http.request":
                got += len(message.get("body", b""))
                complete = not message.get("more_body")
                if gzip is not None:
                    message = {**message, "body": gzip.decompress(message.get("body", b""), complete)}
                if got > self._limit or (gzip is not None and gzip.too_large):
                    if not complete:
                        await _drop(receive)
                    raise self._too_large()
            return message

        await self._app(scope, limited_receive, send)

    def _too_large(self) -> ApiError:
        message = f"the body is larger than {self._limit} bytes, the limit of this server"
        return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})


class _Gunzip:
    """Decompresses one gzip body, piece by piece, and stops once it exceeds `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._left = limit
        self._stream = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)

    @property
    def too_large(self) -> bool:
        """Whether more than `limit` bytes have come out."""
        return self._left < 0

    def decompress(self, data: bytes, last: bool) -> bytes:
        """Decompress a piece of the body, maybe the `last`. Raises ApiError 400 unless the whole body is valid gzip."""
        try:
            piece = self._stream.decompress(data, self._left + 1)
        except zlib.error as error:
            raise ApiError(400, f"the body is not gzip: {error}", code="invalid_encoding") from error
        self._left -= len(piece)
        if self._stream.unused_data or (last and not self._stream.eof and not self.too_large):
            problem = "continues after its end" if self._stream.unused_data else "is cut off"
            raise ApiError(400, f"the gzip body {problem}", code="invalid_encoding")
        return piece


async def _drop(receive: Receive) -> None:
    """Keep reading for a while, so that the client can finish sending and read the response."""

    async def read_on() -> None:
        dropped, more = 0, True
        while more and dropped < _LINGER_BYTES:
            message = await receive()
            dropped += len(message.get("body", b""))
            more = message["type"] == "http.request" and message.get("more_body", False)

    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(read_on(), _LINGER_SECONDS)


class JsonRoute(APIRoute):
    """A route that reads its body as a `JsonRequest` and cancels its work when the client leaves."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wrap FastAPI's handler, so that the body is read and parsed before it runs."""
        handler = super().get_route_handler()

        async def read_then_handle(request: Request) -> Response:
            if self.body_field is None:
                return await handler(request)
            json_request = JsonRequest(_declared(request.scope), request.receive)
            try:
                await json_request.body()
            except ClientDisconnect:
                raise _client_gone() from None
            json_request.check_content_type()
            await request.app.state.context.turn_to_read(client_id(request), len(await json_request.body()))
            await json_request.json()
            return await _while_connected(json_request.receive, handler(json_request))

        return read_then_handle


class JsonRequest(Request):
    """A request whose JSON has limited depth and values, strict UTF-8, and neither NaN nor duplicate keys."""

    async def json(self) -> Any:
        """Parse the body. Raises ApiError 400 if it is not such JSON."""
        if not hasattr(self, "_json"):
            body = await self.body()
            try:
                self._json = from_json(body, allow_inf_nan=False, catch_duplicate_keys=True)
            except ValueError as error:
                raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error
            _check_count(self._json)
        return self._json

    def check_content_type(self) -> None:
        """Raise ApiError 415 unless the body is declared as JSON, which a form on another site can't do."""
        kind = _content_type(self.headers)
        if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
            raise ApiError(415, "send the body as Content-Type: application/json", code="unsupported_media_type")


def _content_type(headers: Headers) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def _declared(scope: Scope) -> Scope:
    """The same request with its body declared as JSON, if a program sent it without a content type.

    Ollama's clients may declare no type, or that of curl's `-d`, which is also that of forms. Browsers can be told
    apart, because they send an `Origin` with what they post.
    """
    headers = Headers(scope=scope)
    if _content_type(headers) not in _UNDECLARED or "origin" in headers or "sec-fetch-site" in headers:
        return scope
    others = [(name, value) for name, value in headers.raw if name != b"content-type"]
    return {**scope, "headers": [*others, (b"content-type", b"application/json")]}


def _check_count(body: Any) -> None:
    """Raise ApiError 400 if there are too many values; prompts made only of token ids don't count."""
    given = [body.get(name) for name in ("prompt", "tokens")] if isinstance(body, dict) else []
    prompts = [*given, *(each for one in given if isinstance(one, list) for each in one[:_MAX_VALUES])]
    ids = {id(each) for each in prompts if isinstance(each, list) and set(map(type, each)) == {int}}
    count = 0
    left = [body]
    while left:
        inside = left.pop()
        if not isinstance(inside, dict | list) or id(inside) in ids:
            continue
        count += len(inside)
        if count > _MAX_VALUES:
            message = f"the body has more than {_MAX_VALUES} values, token ids not counted: send less at a time"
            raise ApiError(400, message, code="too_many_values")
        left += inside.values() if isinstance(inside, dict) else inside


async def disconnected(receive: Receive) -> None:
    """Wait until the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await work and return its result; cancel it as soon as the client is gone."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise _client_gone()
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


def _client_gone() -> ApiError:
    """The error that is logged and counted for a client that left; it is never read."""
    return ApiError(499, "the client is gone", code="client_gone")
