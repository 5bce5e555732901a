"""How a reply leaves: as one JSON document or as events, and not at all once its client is gone."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from eyas.serve.context import Context
from eyas.serve.events import EventStream, while_connected
from eyas.serve.reply import Reply
from eyas.serve.wire.sampling import SamplingFields

A = TypeVar("A", bound=SamplingFields)


async def send(
    request: Request, asked: A, context: Context, begin: Callable[[Request, A, Context], Coroutine[Any, Any, Reply]]
) -> Response:
    """`begin` hands the request to the engine: what goes wrong until then has a status of its own."""
    context.check_model(asked.model)
    beginning = begin(request, asked, context)
    if asked.stream:
        reply = await while_connected(request, beginning)
        return EventStream(reply.events(), context.settings.write_seconds)

    async def whole() -> dict[str, Any]:
        return await (await beginning).whole()

    return JSONResponse(await while_connected(request, whole()))
