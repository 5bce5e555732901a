"""The app: routes, the layers around them, and the one way errors are told."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

import eyas
from eyas.errors import EyasError
from eyas.serve.auth import Keys
from eyas.serve.body import BodyLimit
from eyas.serve.bridge import EngineThread
from eyas.serve.context import Context
from eyas.serve.errors import ApiError, handle
from eyas.serve.observer import Observer, Observers
from eyas.serve.request_ids import RequestIds
from eyas.serve.routes import chat, completions, models, status, tokens
from eyas.serve.settings import ServeSettings


def create_app(thread: EngineThread, settings: ServeSettings, observer: Observer | None = None) -> FastAPI:
    """The ASGI app over an engine's thread, which the caller starts and stops."""
    app = FastAPI(
        title="eyas",
        version=eyas.__version__,
        description="An OpenAI-compatible API that decodes speculatively, without changing a token.",
        docs_url=None,
        redoc_url=None,
    )
    app.state.context = Context(thread, settings, observer or Observers())
    for module in (chat, completions, tokens, models, status):
        app.include_router(module.router)
    for kind in (ApiError, EyasError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, handle)
    # the last one added is the outermost
    app.add_middleware(BodyLimit, limit=settings.max_body_bytes)
    app.add_middleware(Keys, keys=[key.get_secret_value() for key in settings.api_keys])
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    app.add_middleware(RequestIds)
    return app
