"""How every endpoint reads its body, and which errors it documents."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import Depends
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from eyas.serve.api.schema.base import ErrorBody
from eyas.serve.context import Context
from eyas.serve.http.body import JsonRequest

_TEXT = {
    400: "a field is wrong, unknown or not supported, or the context is too small",
    401: "the key is missing or wrong",
    404: "no such model",
    408: "the body stopped coming",
    413: "the body is too large",
    415: "the body is not JSON",
    429: "too many requests wait: try again after Retry-After seconds",
    500: "the server failed",
    503: "the model is being loaded, or the server is going down",
    504: "the request took longer than this server allows",
}
READING = (401, 500)
ASKING = (400, 401, 404, 408, 413, 415, 500, 503)
GENERATING = (*ASKING, 429, 504)


def answered(whole: type[BaseModel], chunk: type[BaseModel]) -> dict[str, Any]:
    """The success of a route that may stream, for `/openapi.json`."""
    data = {"type": "string", "description": f"the JSON of a {chunk.__name__}; the last event's is `[DONE]`"}
    event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    return {"model": whole, "content": {"text/event-stream": {"itemSchema": event}}}


def documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The error responses of a route, for `/openapi.json`."""
    return {status: {"model": ErrorBody, "description": _TEXT[status]} for status in sorted(statuses)}


class JsonRoute(APIRoute):
    """Reads bodies through JsonRequest."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Wraps FastAPI's."""
        handler = super().get_route_handler()

        async def read_first(request: Request) -> Response:
            ours = JsonRequest(request.scope, request.receive)
            if self.body_field is not None:
                await ours.body()
                ours.check_content_type()
                await ours.json()
            return await handler(ours)

        return read_first


# What routes ask of a request.


def context_of(request: Request) -> Context:
    """The server's context."""
    context: Context = request.app.state.context
    return context


Server = Annotated[Context, Depends(context_of)]
"""What route functions take."""


def request_id(request: Request) -> str:
    """The request's id, which the answer's headers carry too."""
    name: str = request.scope["state"]["request_id"]
    return name


def queue_key(request: Request, user: str | None) -> str:
    """Whose queue the request waits in: the user it names, within the client's key or address."""
    client = request.scope["state"].get("key") or (request.client.host if request.client else "")
    return f"{client}/{user or ''}"
