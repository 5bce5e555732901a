"""The ASGI app: its routes, and the middleware around them for request ids, errors, hosts and API keys."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Callable, Sequence
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import eyas
from eyas.errors import EyasError
from eyas.serve.api import chat, llama, messages, ollama, responses, service
from eyas.serve.context import ServerContext, ServeSettings
from eyas.serve.engine_thread import EngineThread
from eyas.serve.errors import ApiError, as_api_error, error_code, handle
from eyas.serve.http.request import BodyLimitMiddleware
from eyas.serve.observe.metrics import Metrics
from eyas.serve.observe.observer import Observer, Observers
from eyas.serve.playground.page import PAGE_PATHS, Gauges, playground

_ROUTERS = (chat.router, responses.router, messages.router, llama.router, ollama.router, service.router)
ENDPOINTS = frozenset(route.path for router in _ROUTERS for route in router.routes if isinstance(route, APIRoute))
"""Paths of the API, the only ones used as metric labels."""
OPEN = PAGE_PATHS | {"/health", "/load", "/metrics", "/ping", "/version", "/api/version"}
"""Paths that need no key: for probes, scrapers and the playground's page. Everything that uses the model needs one."""

_HARMLESS_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
log = logging.getLogger(__name__)


def create_app(
    thread: EngineThread,
    settings: ServeSettings,
    observer: Observer | None = None,
    gauges: Gauges | None = None,
    metrics: Metrics | None = None,
    learned: Callable[[], dict[str, Any]] | None = None,
) -> FastAPI:
    """Make the app on top of an engine thread, which the caller starts and stops.

    `observer` should be the one given to the thread, and should include `gauges` and `metrics`. `gauges` adds the
    playground at `/`, `metrics` adds `/metrics`. `learned`: see `playground`.
    """
    app = FastAPI(
        title="eyas",
        version=eyas.__version__,
        description="An OpenAI-compatible API that decodes speculatively, without changing a token.",
        docs_url=None,
        redoc_url=None,
        servers=[{"url": settings.root_path}] if settings.root_path else None,
    )
    observer = observer or Observers()
    context = app.state.context = ServerContext(thread, settings, observer)
    for router in _ROUTERS:
        app.include_router(router)
    if gauges is not None:

        def speculating() -> bool:
            return context.engine.speculation is not None

        app.include_router(playground(gauges, speculating, learned, with_keys=bool(settings.api_keys)))
    if metrics is not None:
        app.include_router(service.metrics_router(metrics))
    for kind in (ApiError, EyasError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, handle)
    # the last one added is the outermost
    app.add_middleware(BodyLimitMiddleware, limit=settings.max_body_bytes, seconds=settings.read_seconds)
    app.add_middleware(ApiKeyMiddleware, keys=[key.get_secret_value() for key in settings.api_keys])
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(RequestHeadMiddleware, bound=settings.host, allowed=settings.allowed_hosts)
    app.add_middleware(RequestIdMiddleware, refused=observer.refused, known=ENDPOINTS.__contains__)
    if settings.root_path:
        app.add_middleware(RootPathMiddleware, root_path=settings.root_path)
    return app


class RootPathMiddleware:
    """ASGI middleware for a proxy that doesn't strip its path prefix: inner layers see the path after the prefix.

    The prefix itself becomes a folder: what the playground's page loads is found from there.
    """

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        folder = f"{self._root_path}/"
        if path == self._root_path and scope["type"] == "http":
            query = scope["query_string"].decode("latin-1")
            await RedirectResponse(f"{folder}?{query}" if query else folder)(scope, receive, send)
            return
        if path.startswith(folder):
            scope = {**scope, "path": path.removeprefix(self._root_path)}
        await self._app(scope, receive, send)


class RequestIdMiddleware:
    """ASGI middleware: every response gets `X-Request-Id`, every error is reported, exceptions become error responses.

    The client's own id is kept if it is harmless.
    """

    def __init__(
        self, app: ASGIApp, refused: Callable[[str, int, str, str], None], known: Callable[[str], bool]
    ) -> None:
        """`refused(endpoint, status, code, path)` is called for every error response, except on `OPEN` paths.

        `known(path)` says whether a path is an endpoint; others are reported as "", since clients can make them up.
        """
        self._app = app
        self._refused = refused
        self._known = known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent_id = dict(scope["headers"]).get(b"x-request-id", b"")
        request_id = sent_id.decode() if _HARMLESS_ID.fullmatch(sent_id) else uuid.uuid4().hex
        scope.setdefault("state", {}).update(request_id=request_id, received=time.monotonic())
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = request_id
                if message["status"] >= 400 and scope["path"] not in OPEN:
                    endpoint = scope["path"] if self._known(scope["path"]) else ""
                    self._refused(endpoint, message["status"], error_code(scope), scope["path"])
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:  # the log has the details; the client only learns that it failed
            log.exception("request %s failed", request_id)
            if started:
                raise
            await as_api_error(error).send(scope, receive, send_with_id)


class RequestHeadMiddleware:
    """ASGI middleware: 403 for a `Host` that isn't this server, 400 for a body whose length is declared twice.

    A web page can have its own name resolve to this machine (DNS rebinding). The browser then treats the server as part
    of that page's site, but still sends the page's name as `Host`. A body with both `Content-Length` and
    `Transfer-Encoding` can look like different requests to different proxies (request smuggling).
    """

    def __init__(self, app: ASGIApp, bound: str, allowed: Sequence[str]) -> None:
        """`bound` is the listening address, `allowed` are additional names: `NAME`, `*.DOMAIN`, or `*` for any."""
        self._app = app
        self._bound = _host_name(bound) or bound
        self._allowed = [_host_name(name) or name for name in allowed]
        self._loopback = _is_loopback(self._bound)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        host = headers.get(b"host")  # only HTTP/1.0, which no browser speaks, may omit it
        if b"content-length" in headers and b"transfer-encoding" in headers:
            message = "the body has both Content-Length and Transfer-Encoding: send only one of the two"
            error = ApiError(400, message, code="ambiguous_length", headers={"Connection": "close"})
            await error.send(scope, receive, send)
        elif host is not None and not self._knows(name := _host_name(host.decode("latin-1"))):
            message = f"the Host header {host.decode('latin-1')[:100]!r} isn't a name of this server"
            advice = f"start it with --allow-host {name[:100]}" if name else "it must be NAME or NAME:PORT"
            await ApiError(403, f"{message}: {advice}", code="host_not_allowed").send(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _knows(self, name: str) -> bool:
        """Whether a request for this host may be meant for this server.

        An attacker can't make an IP address or a name without a dot resolve to this machine, so both are accepted. A
        server that listens on a loopback address accepts only loopback names and addresses.
        """
        if name and (name == self._bound or any(_matches(name, pattern) for pattern in self._allowed)):
            return True
        if self._loopback:
            return _is_loopback(name)
        return bool(name) and (_is_address(name) or "." not in name or _is_loopback(name))


def _host_name(host: str) -> str:
    """The name or address of `NAME`, `NAME:PORT`, `[ADDRESS]:PORT` or an IPv6 address, in lower case; else ""."""
    try:
        return ip_address(host).compressed
    except ValueError:
        pass
    try:
        parts = urlsplit(f"//{host}")
        name = parts.hostname or ""
        parts.port  # noqa: B018  # raises
    except ValueError:
        return ""
    return name.removesuffix(".") if parts.netloc == host and "@" not in host else ""


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(name: str) -> bool:
    if _is_address(name):
        return ip_address(name).is_loopback
    return name == "localhost" or name.endswith(".localhost")


def _matches(name: str, pattern: str) -> bool:
    return pattern in ("*", name) or (pattern.startswith("*.") and name.endswith(pattern[1:]))


class ApiKeyMiddleware:
    """ASGI middleware: 401 without a known key in `Authorization: Bearer KEY` or `x-api-key`.

    Without keys it is open to everyone. Keys are compared in constant time. The beginning of the key's digest is stored
    in the scope's state as `key`.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._digests or scope["path"] in OPEN:
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if b"x-api-key" in headers and b"authorization" not in headers:  # as Anthropic's clients send it
            scheme = b"bearer"
            key = headers[b"x-api-key"]
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != b"bearer" or not any(matches):
            message = "the API key is wrong" if key else "an API key is needed: Authorization: Bearer KEY"
            error = ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
            await error.send(scope, receive, send)
            return
        scope["state"]["key"] = client_of_key(key)
        await self._app(scope, receive, send)


def client_of_key(key: bytes) -> str:
    """Internal id of the client with this API key: the beginning of the key's digest."""
    return _digest(key.strip()).hex()[:16]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
