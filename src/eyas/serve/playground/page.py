"""The playground's routes, and its page: style and scripts in one document that loads nothing else.

The scripts are ES modules, joined into one in the order of `_SCRIPTS`: their `import` lines and `export` words are
removed. The libraries that they use come before them, as released. The Content-Security-Policy allows this style and
these scripts by their hashes, and no other; markup can be made of text only by DOMPurify.
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
_LIBRARIES = ("purify.min", "marked.umd", "highlight.min")
_SCRIPTS = (
    "dom", "look", "stream", "settings", "markdown", "answer", "tree", "rounds", "turn", "history", "chat", "race",
    "gauges", "main",
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


def playground(gauges: Gauges, speculating: Callable[[], bool]) -> APIRouter:
    """Make the routes `/`, which is open and without secrets, and `/stats`, which needs the API's key.

    `speculating` says whether the engine has a drafter; it raises ApiError 503 unless the engine is ready.
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
        return {"speculating": speculating(), **gauges.read()}

    return router
