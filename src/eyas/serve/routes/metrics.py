"""`/metrics`, for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from eyas.serve.metrics import CONTENT_TYPE, Metrics
from eyas.serve.routes.route import documented


def metrics_router(metrics: Metrics) -> APIRouter:
    """The route to these metrics."""
    router = APIRouter()
    content = {"text/plain": {"schema": {"type": "string"}}}

    @router.get("/metrics", response_class=Response, responses={200: {"content": content}, **documented(500)})
    async def show_metrics() -> Response:
        """Every metric as text (docs/serve_metrics.md)."""
        return Response(metrics.page(), headers={"Content-Type": CONTENT_TYPE})

    return router
