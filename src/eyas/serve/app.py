"""The app: routes, the layers around them, and the one way errors are told."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

import eyas
from eyas.errors import EyasError
from eyas.serve.auth import Keys
from eyas.serve.body import BodyLimit
from eyas.serve.bridge import EngineThread
from eyas.serve.context import Context
from eyas.serve.envelope import Envelope
from eyas.serve.errors import ApiError, handle
from eyas.serve.metrics import Metrics
from eyas.serve.observer import Observer, Observers
from eyas.serve.playground.routes import playground
from eyas.serve.playground.stats import Gauges
from eyas.serve.routes import chat, completions, models, status, tokens
from eyas.serve.routes.metrics import metrics_router
from eyas.serve.settings import ServeSettings

_ROUTERS = (chat.router, completions.router, tokens.router, models.router, status.router)
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
