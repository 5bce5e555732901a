"""The playground's two routes: the page, open to all and without secrets, and the gauges behind the API's key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from fastapi.params import Depends
from fastapi.responses import HTMLResponse

from eyas.serve.playground.page import page
from eyas.serve.playground.stats import Gauges


def playground(gauges: Gauges, speculating: bool, dependencies: Sequence[Depends] = ()) -> APIRouter:
    """The router; `dependencies` guard `/stats` as they guard the API, `speculating` says that a drafter is loaded."""
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

    @router.get("/stats", dependencies=list(dependencies))
    async def show_stats() -> dict[str, Any]:
        return {"speculating": speculating, **gauges.read()}

    return router
