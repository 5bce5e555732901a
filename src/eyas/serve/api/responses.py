"""The route `POST /v1/responses`: OpenAI's newer form of a chat, answered as one. Nothing is stored."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from eyas.serve.api.chat import start_chat
from eyas.serve.api.items import OutputItemsWriter
from eyas.serve.api.schema.request import ignored_fields
from eyas.serve.api.schema.response import generation_responses
from eyas.serve.api.schema.responses import ResponseEvent, ResponseObject, ResponsesRequest
from eyas.serve.context import Context, Info
from eyas.serve.http.errors import ApiError
from eyas.serve.http.request import JsonRoute
from eyas.serve.http.streaming import respond

router = APIRouter(route_class=JsonRoute)
PATH = "/v1/responses"
_PARAMS = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text"}
"""What fields of a chat are called here, for errors."""


@router.post(PATH, responses=generation_responses(ResponseObject, ResponseEvent))
async def create_response(body: ResponsesRequest, context: Context, info: Info) -> Response:
    """Answer a conversation, all at once or as a stream."""
    context.log_ignored(ignored_fields(body))
    try:
        generation, tools = await start_chat(body.as_chat(), context, info, endpoint=PATH)
    except ApiError as error:
        error.param = _PARAMS.get(error.param or "", error.param)
        raise
    writer = OutputItemsWriter(context, body, generation, f"resp_{info.id}", tools)
    return await respond(writer, stream=body.stream, write_seconds=context.settings.write_seconds, typed=True)
