"""The playground: its routes, its page, and the observer behind its gauges.

The scripts are ES modules, joined in the order of `_SCRIPTS` without their `import` lines and `export` keywords. The
libraries that they use come before them, as released. The Content-Security-Policy allows only this style and these
scripts, by their hashes, and only DOMPurify may turn text into markup.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from eyas.runtime import busy, machine_load
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

    def plus(self, outcome: RoundOutput) -> _Totals:
        tokens = sum(len(emitted) for emitted in outcome.tokens)
        rounds, accepted = list(self.row_rounds), list(self.accepted)
        for count, context in zip(outcome.accepted, outcome.contexts, strict=True):
            rounds[context_bucket(context)] += 1
            accepted[context_bucket(context)] += count
        return _Totals(self.tokens + tokens, tuple(rounds), tuple(accepted))


class Gauges(Observer):
    """Keeps the state after the engine's last step and the totals of all its rounds."""

    def __init__(self) -> None:
        self._totals = _Totals()
        self._state: EngineState | None = None
        self._controller: ControllerState | None = None

    def stepped(self, state: EngineState, controller: ControllerState | None, outcome: RoundOutput | None) -> None:
        """Keep the state and add the round to the totals."""
        self._state, self._controller = state, controller
        if outcome is not None:
            self._totals = self._totals.plus(outcome)

    def read(self) -> dict[str, Any]:
        """The JSON of `/stats`; the page computes rates from the totals and `seconds` of two readings.

        `busy` says why timings can't be trusted now, or is null.
        """
        totals, state, controller = self._totals, self._state, self._controller
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
            "by_context": {
                name: {"row_rounds_total": rounds, "accepted_total": accepted}
                for name, rounds, accepted in zip(CONTEXT_BUCKETS, totals.row_rounds, totals.accepted, strict=True)
                if rounds
            },
            "busy": busy(machine_load()),
            "tree": {"depth": controller.depth, "width": controller.width, "budget": controller.budget}
            if controller
            else None,
        }


_HERE = Path(__file__).parent
_LIBRARIES = ("purify.min", "marked.umd", "highlight.min")
_SCRIPTS = (
    "dom", "look", "stream", "settings", "markdown", "answer", "tree", "rounds", "turn", "history", "chat", "race",
    "gauges", "learning", "main",
)  # fmt: skip
_MODULE_WORDS = re.compile(r"^import .*;\n|^export (?=\w)", re.MULTILINE)


class Page(NamedTuple):
    """The document and its Content-Security-Policy."""

    html: str
    policy: str


@cache
def page() -> Page:
    """Build the page from its sources, once."""
    style = _read("style.css")
    libraries = [_read(f"libraries/{name}.js") for name in _LIBRARIES]
    script = "\n".join(_MODULE_WORDS.sub("", _read(f"script/{name}.js")) for name in _SCRIPTS)
    parts = {
        "{{style}}": style,
        "{{libraries}}": "\n".join(f"<script>{text}</script>" for text in libraries),
        "{{script}}": script,
    }
    html = re.sub("|".join(map(re.escape, parts)), lambda found: parts[found[0]], _read("page.html"))
    policy = {
        "default-src": "'none'",
        "style-src": _hash(style),
        "script-src": " ".join(map(_hash, (*libraries, script))),
        "require-trusted-types-for": "'script'",
        "trusted-types": "dompurify",
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return Page(html, "; ".join(" ".join(pair) for pair in policy.items()))


def _read(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def playground(
    gauges: Gauges, speculating: Callable[[], bool], learnt: Callable[[], dict[str, Any]] | None = None
) -> APIRouter:
    """Make the routes `/`, which is open and without secrets, `/stats` and `/learning`, which need the API's key.

    `speculating` says whether the engine has a drafter; it raises ApiError 503 unless the engine is ready. `learnt`
    returns what a learning server shows of its progress, read from disk; without it there is no `/learning`.
    """
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def show_page() -> HTMLResponse:
        document = page()
        headers = {
            "Content-Security-Policy": document.policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        }
        return HTMLResponse(document.html, headers=headers)

    @router.get("/stats")
    async def show_stats() -> dict[str, Any]:
        return {"speculating": speculating(), "learning": learnt is not None, **gauges.read()}

    if learnt is not None:

        @router.get("/learning")
        def show_learning() -> dict[str, Any]:  # not a coroutine: a slow disk blocks only a thread
            speculating()
            return learnt()

    return router
