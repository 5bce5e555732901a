"""The routes `POST /v1/messages` and its `count_tokens`: Anthropic's form of a chat, answered as one."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from eyas.serve.api.blocks import BlocksWriter
from eyas.serve.api.chat import read_chat, size_of, start_chat
from eyas.serve.api.schema.anthropic import (
    AnthropicConversation,
    AnthropicErrorBody,
    MessageEvent,
    MessageResponse,
    MessagesRequest,
    TokenCount,
)
from eyas.serve.api.schema.request import ignored_fields
from eyas.serve.api.schema.response import WITH_BODY, error_responses, generation_responses
from eyas.serve.context import Context, Info
from eyas.serve.http.errors import ANTHROPIC, ApiError
from eyas.serve.http.request import JsonRoute
from eyas.serve.http.streaming import respond
from eyas.serve.tools.calling import tool_calling
from eyas.text.template import required

router = APIRouter(route_class=JsonRoute)


@router.post(ANTHROPIC, responses=generation_responses(MessageResponse, MessageEvent, AnthropicErrorBody))
async def create_message(body: MessagesRequest, context: Context, info: Info) -> Response:
    """Answer a conversation, all at once or as a stream."""
    context.log_ignored(ignored_fields(body))
    try:
        generation, tools = await start_chat(body.as_chat(), context, info, endpoint=ANTHROPIC, shorten=True)
    except ApiError as error:
        if error.code == "context_length_exceeded":  # the words by which agents know that they have to shorten it
            error.message = f"prompt is too long: {error.message}"
        raise
    writer = BlocksWriter(context, body, generation, f"msg_{info.id}", tools)
    return await respond(writer, stream=body.stream, write_seconds=context.settings.write_seconds, typed=True)


@router.post(
    f"{ANTHROPIC}/count_tokens",
    response_model=TokenCount,
    responses=error_responses(*WITH_BODY, body=AnthropicErrorBody),
)
async def count_tokens(body: AnthropicConversation, context: Context, info: Info) -> Any:
    """Count the tokens of a conversation, up to where the answer begins."""
    context.check_model(body.model)
    context.log_ignored(ignored_fields(body))
    chat = body.as_chat()
    size_of(chat, context)
    tools = tool_calling(chat, required(context.engine.tokenizer))
    return {"input_tokens": len(await read_chat(chat, context, info, tools))}
