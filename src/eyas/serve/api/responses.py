"""The route `POST /v1/responses`: OpenAI's newer form of a chat, answered as a chat. Nothing is stored."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

from eyas.serve.api.chat import start_chat
from eyas.serve.api.generation import Generation
from eyas.serve.api.logprobs import chat_logprobs
from eyas.serve.api.response import ChatResponseWriter, Json, Part, ThoughtPiece
from eyas.serve.context import Context, Info
from eyas.serve.errors import ApiError, as_api_error
from eyas.serve.http.request import JsonRoute
from eyas.serve.http.streaming import respond
from eyas.serve.schema.request import ignored_fields
from eyas.serve.schema.response import generation_responses
from eyas.serve.schema.responses import ResponseEvent, ResponseObject, ResponsesRequest
from eyas.serve.tools.calling import Calling
from eyas.serve.tools.parser import CallPiece


class OutputItemsWriter(ChatResponseWriter):
    """Writes thoughts, text and tool calls as items."""

    def __init__(self, body: ResponsesRequest, generation: Generation, response_id: str, tools: Calling | None) -> None:
        super().__init__(body.as_chat(), generation, response_id, tools)
        self._body = body
        self._items: list[Json] = []
        self._open = False  # whether the last item is still growing
        self._events = 0

    async def full(self) -> Json:
        """Generate everything and return the response."""
        response: Json = {}
        async for event in self._generate():
            response = event.get("response", response)
        return response

    async def events(self) -> AsyncGenerator[Json, None]:
        """Yield the events of a stream as they are generated; a failure is an event, too."""
        try:
            async for event in self._generate():
                yield event
        except Exception as error:  # noqa: BLE001  # the status is sent already
            failure = as_api_error(error)
            code = "server_error" if failure.status >= 500 else "invalid_prompt"
            response = self._response("failed") | {"error": {"code": code, "message": failure.message}}
            yield self._event("response.failed", response=response)

    async def _generate(self) -> AsyncGenerator[Json, None]:
        try:
            for kind in ("response.created", "response.in_progress"):
                yield self._event(kind, response=self._response("in_progress"))
            async for part in self.shown_parts():
                for event in self._part(part):
                    yield event
            reason = self.generation.outputs[0].finish_reason
            status = "incomplete" if reason == "length" else "completed"
            for event in self._end(status):
                yield event
            details = {"reason": "max_output_tokens"} if status == "incomplete" else None
            response = self._response(status) | {"incomplete_details": details, "usage": self._usage()}
            yield self._event(f"response.{status}", response=response)
        finally:
            self.generation.close()

    def _part(self, part: Part) -> Iterator[Json]:
        if isinstance(part, CallPiece):
            yield from self._call(part)
        elif isinstance(part, ThoughtPiece):
            yield from self._thought(part.text)
        else:
            yield from self._text(part.text)

    def _thought(self, text: str) -> Iterator[Json]:
        """Add to the open reasoning, or to a new one."""
        if not (self._open and self._items[-1]["type"] == "reasoning"):
            part: Json = {"type": "reasoning_text", "text": ""}
            yield from self._begin({"id": self._id("rs"), "type": "reasoning", "summary": []}, content=[])
            yield self._item_event("response.content_part.added", content_index=0, part=dict(part))
            self._items[-1]["content"].append(part)
        self._items[-1]["content"][0]["text"] += text
        yield self._item_event("response.reasoning_text.delta", content_index=0, delta=text)

    def _text(self, text: str) -> Iterator[Json]:
        """Add text to the open message, or to a new one."""
        if not (self._open and self._items[-1]["type"] == "message"):
            yield from self._begin_message()
        logprobs = self._take_logprobs()
        part = self._items[-1]["content"][0]
        part["text"] += text
        part["logprobs"] += logprobs
        yield self._item_event("response.output_text.delta", content_index=0, delta=text, logprobs=logprobs)

    def _begin_message(self) -> Iterator[Json]:
        part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield from self._begin({"id": self._id("msg"), "type": "message", "role": "assistant"}, content=[])
        yield self._item_event("response.content_part.added", content_index=0, part=part | {"logprobs": []})
        self._items[-1]["content"].append(part)

    def _call(self, piece: CallPiece) -> Iterator[Json]:
        """Begin a call, or add to the arguments of the open one."""
        self.unwritten = []
        if piece.name is not None:
            call = {"id": self._id("fc"), "type": "function_call", "call_id": piece.id, "name": piece.name}
            yield from self._begin(call, arguments="")
        if piece.arguments:
            self._items[-1]["arguments"] += piece.arguments
            yield self._item_event("response.function_call_arguments.delta", delta=piece.arguments)

    def _begin(self, item: Json, **empty: Any) -> Iterator[Json]:
        """End the open item and begin another one, with `empty` content so far."""
        yield from self._close("completed")
        self._items.append(item | {"status": "in_progress"} | empty)
        self._open = True
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=self._items[-1])

    def _end(self, status: str) -> Iterator[Json]:
        """End the last item; an answer has at least one."""
        if not self._items:
            yield from self._begin_message()
        yield from self._close(status)

    def _close(self, status: str) -> Iterator[Json]:
        """End the open item, if there is one."""
        if not self._open:
            return
        item = self._items[-1]
        self._open = False
        if item["type"] == "reasoning":
            part = item["content"][0]
            yield self._item_event("response.reasoning_text.done", content_index=0, text=part["text"])
            yield self._item_event("response.content_part.done", content_index=0, part=part)
        elif item["type"] == "message":
            part = item["content"][0]
            part["logprobs"] += self._take_logprobs()
            text = {"text": part["text"], "logprobs": part["logprobs"]}
            yield self._item_event("response.output_text.done", content_index=0, **text)
            yield self._item_event("response.content_part.done", content_index=0, part=part)
        else:
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield self._item_event("response.function_call_arguments.done", **done)
        item["status"] = status
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _take_logprobs(self) -> list[Json]:
        first = self.generation.outputs[0].thought_end
        scored = [token for token in self.unwritten if token.offset >= first]
        self.unwritten = []
        entries: list[Json] = chat_logprobs(self.token_texts, scored)["content"] if scored else []
        return entries

    def _id(self, kind: str) -> str:
        return f"{kind}_{str(self._head['id']).removeprefix('resp_')}-{len(self._items)}"

    def _item_event(self, kind: str, **fields: Any) -> Json:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> Json:
        self._events += 1
        return {"type": kind, "sequence_number": self._events - 1} | fields

    def _response(self, status: str) -> Json:
        """The response as far as it is known."""
        body = self._body
        choice = body.tool_choice or "auto"
        wanted = body.text and body.text.format
        return {
            "id": self._head["id"],
            "object": "response",
            "created_at": self._head["created"],
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._head["model"],
            "output": list(self._items),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": wanted.model_dump(exclude_none=True, by_alias=True) if wanted else {"type": "text"}},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "background": False,
            "metadata": {},
            "service_tier": "default",
            "user": body.user,
            "usage": None,
            "eyas": {"seed": self.generation.request.seed},
        }

    def _usage(self) -> Json:
        usage: Json = self.generation.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
            "total_tokens": usage["total_tokens"],
            "eyas": usage["eyas"],
        }


router = APIRouter(route_class=JsonRoute)
PATH = "/v1/responses"
_PARAMS = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text"}
"""Fields of a chat -> their names in this API, for errors."""


@router.post(PATH, responses=generation_responses(ResponseObject, ResponseEvent))
async def create_response(body: ResponsesRequest, context: Context, info: Info) -> Response:
    """Answer a conversation, all at once or as a stream."""
    context.log_ignored(ignored_fields(body))
    try:
        generation, tools = await start_chat(body.as_chat(), context, info, endpoint=PATH)
    except ApiError as error:
        error.param = _PARAMS.get(error.param or "", error.param)
        raise
    writer = OutputItemsWriter(body, generation, f"resp_{info.id}", tools)
    return await respond(writer, stream=body.stream, write_seconds=context.settings.write_seconds, typed=True)
