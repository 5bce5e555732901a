"""The outermost layer: every answer has a request id, every error is told to the observer, no exception gets out."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from eyas.serve.auth import OPEN
from eyas.serve.errors import as_api_error, error_code

_HARMLESS = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
log = logging.getLogger(__name__)


class Envelope:
    """ASGI middleware. The client's own `X-Request-Id` is kept if it is harmless.

    `refused(endpoint, status, code)` is called for every error but those of probes. `known(path)` says which paths are
    endpoints, since what clients make up must not become labels of metrics.
    """

    def __init__(self, app: ASGIApp, refused: Callable[[str, int, str], None], known: Callable[[str], bool]) -> None:
        self._app, self._refused, self._known = app, refused, known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        name = given.decode() if _HARMLESS.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {}).update(request_id=name, began=time.monotonic())
        started = False

        async def named(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = name
                if message["status"] >= 400 and scope["path"] not in OPEN:
                    endpoint = scope["path"] if self._known(scope["path"]) else ""
                    self._refused(endpoint, message["status"], error_code(scope))
            await send(message)

        try:
            await self._app(scope, receive, named)
        except Exception as error:  # the log says what, the client that
            log.exception("request %s failed", name)
            if started:
                raise
            await as_api_error(error).send(scope, receive, named)
