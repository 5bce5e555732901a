"""How a reply leaves: as one JSON document or as events, and not at all once its client is gone."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from eyas.serve.context import Context
from eyas.serve.events import EventStream, while_connected
from eyas.serve.reply import Reply
from eyas.serve.wire.sampling import SamplingFields


async def send(
    request: Request, context: Context, asked: SamplingFields, begin: Coroutine[Any, Any, Reply]
) -> Response:
    """`begin` hands the request to the engine: what goes wrong until then has a status of its own."""
    if asked.stream:
        reply = await while_connected(request, begin)
        return EventStream(reply.events(), context.settings.write_seconds)

    async def whole() -> dict[str, Any]:
        return await (await begin).whole()

    return JSONResponse(await while_connected(request, whole()))
