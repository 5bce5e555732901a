"""The routes `POST /v1/messages` and its `count_tokens`: Anthropic's form of a chat, answered as a chat."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from typing import Any, Literal

from fastapi import APIRouter
from jiter import from_json
from starlette.responses import Response

from eyas.serve.api.chat import read_chat, size_of, start_chat
from eyas.serve.api.generation import Generation
from eyas.serve.api.response import ChatResponseWriter, Json, Part, ThoughtPiece
from eyas.serve.context import Context, Info
from eyas.serve.errors import ANTHROPIC, ApiError, as_api_error
from eyas.serve.http.request import JsonRoute
from eyas.serve.http.streaming import respond
from eyas.serve.schema.anthropic import (
    AnthropicConversation,
    AnthropicErrorBody,
    MessageEvent,
    MessageResponse,
    MessagesRequest,
    TokenCount,
)
from eyas.serve.schema.request import ignored_fields
from eyas.serve.schema.response import WITH_BODY, error_responses, generation_responses
from eyas.serve.tools.calling import Calling, tool_calling
from eyas.serve.tools.parser import CallPiece
from eyas.text.template import required


class BlocksWriter(ChatResponseWriter):
    """Writes thoughts, text and tool calls as blocks, one after the other."""

    def __init__(self, body: MessagesRequest, generation: Generation, response_id: str, tools: Calling | None) -> None:
        super().__init__(body.as_chat(), generation, response_id, tools)
        self._max_tokens = body.max_tokens
        self._blocks: list[Json] = []
        self._written = ""  # the text, or the arguments, of the last block
        self._open = False  # whether it is still growing

    async def full(self) -> Json:
        """Generate everything and return the message."""
        try:
            async for _ in self._generate():
                pass
        finally:
            self.generation.close()
        return self._message() | {"content": self._blocks, "usage": self._usage(), **self._ending()}

    async def events(self) -> AsyncGenerator[Json, None]:
        """Yield the events of a stream as they are generated; a failure is an event, too."""
        try:
            usage = {"input_tokens": self.generation.request.prompt_tokens, "output_tokens": 0}
            yield {"type": "message_start", "message": self._message() | {"usage": usage}}
            yield {"type": "ping"}
            async for event in self._generate():
                yield event
            yield {"type": "message_delta", "delta": self._ending(), "usage": self._usage()}
            yield {"type": "message_stop"}
        except Exception as error:  # noqa: BLE001  # the status is sent already
            yield as_api_error(error).anthropic_body
        finally:
            self.generation.close()

    async def _generate(self) -> AsyncGenerator[Json, None]:
        """Yield the events of the blocks."""
        async for part in self.shown_parts():
            for event in self._part(part):
                yield event
        for event in self._close():
            yield event

    def _part(self, part: Part) -> Iterator[Json]:
        if isinstance(part, CallPiece):
            yield from self._call(part)
        elif isinstance(part, ThoughtPiece):
            yield from self._text("thinking", part.text, signature="")
        else:
            yield from self._text("text", part.text)

    def _text(self, kind: Literal["text", "thinking"], text: str, **more: str) -> Iterator[Json]:
        """Add to the open block of this kind, or to a new one with `more` fields."""
        if not (self._open and self._blocks[-1]["type"] == kind):
            yield from self._begin({"type": kind, kind: "", **more})
        self._written += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _call(self, piece: CallPiece) -> Iterator[Json]:
        """Begin a call, or add to the input of the open one."""
        if piece.name is not None:
            yield from self._begin({"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}})
        if piece.arguments:
            self._written += piece.arguments
            yield self._delta({"type": "input_json_delta", "partial_json": piece.arguments})

    def _begin(self, block: Json) -> Iterator[Json]:
        yield from self._close()
        self._blocks.append(block)
        self._written = ""
        self._open = True
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}

    def _close(self) -> Iterator[Json]:
        """End the open block, if there is one."""
        if not self._open:
            return
        block = self._blocks[-1]
        self._open = False
        if block["type"] == "tool_use":
            block["input"] = as_object(self._written)
        else:
            block[block["type"]] = self._written
        if block["type"] == "thinking":  # clients wait for a signature; nothing is signed here
            yield self._delta({"type": "signature_delta", "signature": ""})
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _message(self) -> Json:
        """The message as it begins."""
        return {
            "id": self._head["id"],
            "type": "message",
            "role": "assistant",
            "model": self._head["model"],
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "eyas": {"seed": self.generation.request.seed},
        }

    def _ending(self) -> Json:
        output = self.generation.outputs[0]
        reason = {"tool_calls": "tool_use", "stop": "end_turn", "length": "max_tokens"}[
            self._finish_reason(0) or "stop"
        ]
        if reason == "max_tokens" and len(output.token_ids) < self._max_tokens:
            reason = "model_context_window_exceeded"
        if output.stop_string is not None:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": output.stop_string}

    def _usage(self) -> Json:
        usage: Json = self.generation.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
            "eyas": usage["eyas"],
        }


def as_object(arguments: str) -> Json:
    """A call's arguments; if the call was cut off, the part that was written, as Anthropic's client parses it."""
    try:
        parsed = from_json(arguments.encode(), partial_mode="trailing-strings")
    except ValueError:
        parsed = None
    return parsed if isinstance(parsed, dict) else {}


router = APIRouter(route_class=JsonRoute)


@router.post(ANTHROPIC, responses=generation_responses(MessageResponse, MessageEvent, AnthropicErrorBody))
async def create_message(body: MessagesRequest, context: Context, info: Info) -> Response:
    """Answer a conversation, all at once or as a stream."""
    context.log_ignored(ignored_fields(body))
    try:
        generation, tools = await start_chat(body.as_chat(), context, info, endpoint=ANTHROPIC, shorten=True)
    except ApiError as error:
        if error.code == "context_length_exceeded":  # agents recognize these words and shorten the conversation
            error.message = f"prompt is too long: {error.message}"
        raise
    writer = BlocksWriter(body, generation, f"msg_{info.id}", tools)
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
