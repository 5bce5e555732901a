"""Keys: `Authorization: Bearer KEY`, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from eyas.serve.errors import ApiError

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
