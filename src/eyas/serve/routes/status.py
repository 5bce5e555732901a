"""`/health` and `/version`: open to everyone."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

import eyas
from eyas.serve.routes.needs import Server
from eyas.serve.routes.route import JsonRoute, documented
from eyas.serve.wire.other import Health, Version

router = APIRouter(route_class=JsonRoute)


@router.get("/health", response_model=Health, responses=documented(500, 503))
async def health(context: Server) -> Any:
    """200 when requests are taken; 503 while the model is loaded, while the server goes down, or when it failed."""
    context.engine  # noqa: B018  # raises
    return {"status": "ok"}


@router.get("/version", response_model=Version, responses=documented(500))
async def version() -> Any:
    """Of this server."""
    return {"version": eyas.__version__}
