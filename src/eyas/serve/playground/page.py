"""The page: its sources put together into one document that loads nothing else.

The scripts are ES modules in the order of `_SCRIPTS`; here they become one, so their import and export words, each on
a line of its own, are taken out. The policy lets only this style and this script run, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from eyas.serve.playground.gauges import Gauges

_HERE = Path(__file__).parent
_SCRIPTS = ("dom", "stream", "settings", "answer", "tree", "rounds", "chat", "race", "gauges", "main")
_MODULE_WORDS = re.compile(r"^import .*;\n|^export (?=\w)", re.MULTILINE)


class Page(NamedTuple):
    """What `/` answers with."""

    html: str
    policy: str
    """The value of `Content-Security-Policy`."""


@cache
def page() -> Page:
    """The document, made once."""
    style = (_HERE / "style.css").read_text(encoding="utf-8")
    script = "\n".join(
        _MODULE_WORDS.sub("", (_HERE / "script" / f"{name}.js").read_text(encoding="utf-8")) for name in _SCRIPTS
    )
    frame = (_HERE / "page.html").read_text(encoding="utf-8")
    before, after_style = frame.split("{{style}}")
    between, after = after_style.split("{{script}}")
    policy = {
        "default-src": "'none'",
        "style-src": _hash(style),
        "script-src": _hash(script),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return Page(before + style + between + script + after, "; ".join(" ".join(pair) for pair in policy.items()))


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


# The playground's two routes: the page, which is open and without secrets, and its gauges, behind the API's key.


def playground(gauges: Gauges, speculating: Callable[[], bool]) -> APIRouter:
    """The router; `speculating` says whether a drafter is loaded, or raises while nothing is."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def show_page() -> HTMLResponse:
        made = page()
        headers = {
            "Content-Security-Policy": made.policy,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        }
        return HTMLResponse(made.html, headers=headers)

    @router.get("/stats")
    async def show_stats() -> dict[str, Any]:
        return {"speculating": speculating(), **gauges.read()}

    return router
