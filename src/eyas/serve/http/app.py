"""The app: routes, the layers around them, and the one way errors are told."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import eyas
from eyas.errors import EyasError
from eyas.serve.api import chat, completions, service
from eyas.serve.api.service import metrics_router
from eyas.serve.context import Context, ServeSettings
from eyas.serve.engine_thread import EngineThread
from eyas.serve.http.body import BodyLimit
from eyas.serve.http.errors import ApiError, as_api_error, error_code, handle
from eyas.serve.observe.metrics import Metrics
from eyas.serve.observe.observer import Observer, Observers
from eyas.serve.playground.gauges import Gauges
from eyas.serve.playground.page import playground

_ROUTERS = (chat.router, completions.router, service.router)
ENDPOINTS = frozenset(route.path for router in _ROUTERS for route in router.routes if isinstance(route, APIRoute))
"""Their paths."""


def create_app(
    thread: EngineThread,
    settings: ServeSettings,
    observer: Observer | None = None,
    gauges: Gauges | None = None,
    metrics: Metrics | None = None,
) -> FastAPI:
    """The ASGI app over an engine's thread, which the caller starts and stops.

    The thread tells the observer of its steps; among what it is should be `gauges`, with which there is a playground at
    `/`, and `metrics`, which are shown at `/metrics`.
    """
    app = FastAPI(
        title="eyas",
        version=eyas.__version__,
        description="An OpenAI-compatible API that decodes speculatively, without changing a token.",
        docs_url=None,
        redoc_url=None,
    )
    observer = observer or Observers()
    context = app.state.context = Context(thread, settings, observer)
    for router in _ROUTERS:
        app.include_router(router)
    if gauges is not None:
        app.include_router(playground(gauges, lambda: context.engine.speculation is not None))
    if metrics is not None:
        app.include_router(metrics_router(metrics))
    for kind in (ApiError, EyasError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, handle)
    # the last one added is the outermost
    app.add_middleware(BodyLimit, limit=settings.max_body_bytes, seconds=settings.read_seconds)
    app.add_middleware(Keys, keys=[key.get_secret_value() for key in settings.api_keys])
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(Envelope, refused=observer.refused, known=ENDPOINTS.__contains__)
    return app


# The outermost layer: every answer has a request id, every error is told to the observer, no exception gets out.


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


# Keys: `Authorization: Bearer KEY`, compared in constant time.


OPEN = frozenset({"/", "/health", "/metrics", "/version"})
"""Probes, scrapers and the playground's page need no key; whatever touches the model does."""


class Keys:
    """ASGI middleware: 401 without a key that is known. Leaves in the scope's state which key it was (its digest)."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._digests or scope["path"] in OPEN:
            await self._app(scope, receive, send)
            return
        kind, _, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
        given = _digest(key.strip())
        known = [hmac.compare_digest(given, digest) for digest in self._digests]
        if kind.lower() != b"bearer" or not any(known):
            message = "the API key is wrong" if key else "an API key is needed: Authorization: Bearer KEY"
            error = ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
            await error.send(scope, receive, send)
            return
        scope["state"]["key"] = given.hex()[:16]
        await self._app(scope, receive, send)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
