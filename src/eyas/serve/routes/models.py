"""`/v1/models`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from eyas.serve.context import Context
from eyas.serve.routes.needs import Server
from eyas.serve.routes.route import READING, JsonRoute, documented
from eyas.serve.wire.other import Model, ModelList

router = APIRouter(route_class=JsonRoute)


@router.get("/v1/models", response_model=ModelList, responses=documented(*READING, 503))
async def list_models(context: Server) -> Any:
    """The names that requests may use."""
    return {"data": [_model(context, name) for name in context.settings.model_names]}


@router.get("/v1/models/{model:path}", response_model=Model, responses=documented(*READING, 404, 503))
async def retrieve_model(model: str, context: Server) -> Any:
    """One of them."""
    context.check_model(model)
    return _model(context, model)


def _model(context: Context, name: str) -> dict[str, Any]:
    context.engine  # noqa: B018  # 503 while it is being loaded
    return {"id": name, "created": context.started, "owned_by": "eyas", "max_model_len": context.max_model_len}
