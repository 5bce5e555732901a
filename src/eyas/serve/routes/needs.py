"""What routes ask of a request."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends
from starlette.requests import Request

from eyas.serve.context import Context


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
