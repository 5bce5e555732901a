"""The playground's two routes: the page, which is open and without secrets, and its gauges, behind the API's key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from eyas.serve.playground.page import page
from eyas.serve.playground.stats import Gauges


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
