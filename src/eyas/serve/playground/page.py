"""The playground: its routes, its page, and the observer behind its gauges.

The page, its style and its scripts are served unchanged from this folder. The scripts are ES modules, and the libraries
are unmodified releases. The Content-Security-Policy runs only what the document names, by a nonce
that is new in every response and that modules pass on to their imports; only DOMPurify may turn text into markup.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fastapi import APIRouter
from fastapi.responses import HTMLResponse
from starlette.requests import Request
from starlette.responses import Response

from eyas.runtime import busy, machine_load
from eyas.serve.errors import ApiError
from eyas.serve.observe.observer import Observer
from eyas.types import CONTEXT_BUCKETS, context_bucket

if TYPE_CHECKING:
    from eyas.engine.controller import ControllerState
    from eyas.engine.round import RoundOutput
    from eyas.types import EngineState


@dataclass(frozen=True)
class _Totals:
    """Sums since the server started, replaced as a whole: one thread writes them and another reads."""

    tokens: int = 0
    row_rounds: tuple[int, ...] = (0,) * len(CONTEXT_BUCKETS)
    """By context: entry i belongs to bucket i, as in `accepted`."""
    accepted: tuple[int, ...] = (0,) * len(CONTEXT_BUCKETS)
    nodes: int = 0
    """Of all draft trees."""

    def plus(self, outcome: RoundOutput) -> _Totals:
        tokens = sum(len(emitted) for emitted in outcome.tokens)
        rounds = list(self.row_rounds)
        accepted = list(self.accepted)
        for count, context in zip(outcome.accepted, outcome.contexts, strict=True):
            rounds[context_bucket(context)] += 1
            accepted[context_bucket(context)] += count
        return _Totals(self.tokens + tokens, tuple(rounds), tuple(accepted), self.nodes + sum(outcome.nodes))


class Gauges(Observer):
    """Keeps the state after the engine's last step and the totals of all its rounds."""

    def __init__(self) -> None:
        self._totals = _Totals()
        self._state: EngineState | None = None

    def stepped(self, state: EngineState, _: ControllerState | None, outcome: RoundOutput | None) -> None:
        """Keep the state and add the round to the totals."""
        self._state = state
        if outcome is not None:
            self._totals = self._totals.plus(outcome)

    def read(self) -> dict[str, Any]:
        """The JSON of `/stats`; the page computes rates from the totals and `seconds` of two readings.

        `busy` says why timings can't be trusted now, or is null, as it is before the first step.
        """
        totals, state = self._totals, self._state
        return {
            "seconds": time.monotonic(),
            "running": state.running if state else 0,
            "waiting": state.waiting if state else 0,
            "prefilling": state.prefilling if state else 0,
            "cached_tokens": state.cached_tokens if state else 0,
            "cache_limit": state.cache_limit if state else None,
            "tokens_total": totals.tokens,
            "row_rounds_total": sum(totals.row_rounds),
            "accepted_total": sum(totals.accepted),
            "nodes_total": totals.nodes,
            "by_context": {
                name: {"row_rounds_total": rounds, "accepted_total": accepted}
                for name, rounds, accepted in zip(CONTEXT_BUCKETS, totals.row_rounds, totals.accepted, strict=True)
                if rounds
            },
            "busy": busy(machine_load()) if state else None,
        }


_HERE = Path(__file__).parent
_TYPES = {".css": "text/css", ".js": "text/javascript"}  # the system's table may call scripts plain text
_FILES = {
    f"/playground/{path.relative_to(_HERE).as_posix()}": path
    for path in sorted(_HERE.rglob("*"))
    if path.suffix in _TYPES
}
PAGE_PATHS = frozenset({"/", *_FILES})
"""What a browser loads of the page, which needs no key because it contains no secrets; it asks for the API's key."""


class File(NamedTuple):
    """A file of the page as it was when the server first sent it, so that a page is never made of two versions."""

    content: bytes
    media_type: str
    etag: str


@cache
def _file(path: Path) -> File:
    content = path.read_bytes()
    return File(content, _TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()}"')


@cache
def _document() -> str:
    return (_HERE / "page.html").read_text(encoding="utf-8")


def content_policy(nonce: str) -> str:
    """The Content-Security-Policy of a document whose style and scripts carry this nonce."""
    policy = {
        "default-src": "'none'",
        "style-src": f"'nonce-{nonce}'",
        "script-src": f"'nonce-{nonce}'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "dompurify",
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return "; ".join(" ".join(pair) for pair in policy.items())


def playground(
    gauges: Gauges,
    speculating: Callable[[], bool],
    learned: Callable[[], dict[str, Any]] | None = None,
    *,
    with_keys: bool = False,
) -> APIRouter:
    """Make the routes of `PAGE_PATHS`, which are open, and `/stats` and `/learning`, which need the API's key.

    `speculating` says whether the engine has a drafter; it raises ApiError 503 unless the engine is ready. `learned`
    returns what a learning server shows of its progress, read from disk; without it there is no `/learning`.
    `with_keys`: the API wants a key, which the page then asks for before it sends anything.
    """
    router = APIRouter(include_in_schema=False)

    @router.head("/")  # Ollama's clients ask whether a server is there
    @router.get("/")
    async def show_page() -> HTMLResponse:
        nonce = secrets.token_urlsafe(16)
        html = _document().replace("{{nonce}}", nonce).replace("{{keys}}", "needed" if with_keys else "none")
        headers = {
            "Content-Security-Policy": content_policy(nonce),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",  # a nonce is used once
        }
        return HTMLResponse(html, headers=headers)

    def add(url: str, path: Path) -> None:
        @router.get(url)
        async def send_file(request: Request) -> Response:
            file = _file(path)
            headers = {"ETag": file.etag, "Cache-Control": "no-cache", "X-Content-Type-Options": "nosniff"}
            if file.etag in request.headers.get("if-none-match", ""):
                return Response(status_code=304, headers=headers)
            return Response(file.content, media_type=file.media_type, headers=headers)

    for url, path in _FILES.items():
        add(url, path)

    @router.get("/stats")
    async def show_stats() -> dict[str, Any]:
        try:
            drafts = speculating()
            unavailable = None
        except ApiError as error:  # not an error for the page, which shows why it waits
            drafts = False
            unavailable = str(error)
        return {"unavailable": unavailable, "speculating": drafts, "learning": learned is not None, **gauges.read()}

    if learned is not None:

        @router.get("/learning")
        def show_learning() -> dict[str, Any]:  # not a coroutine: a slow disk blocks only a thread
            speculating()
            return learned()

    return router
