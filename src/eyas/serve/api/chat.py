"""`/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from eyas.serve import encode
from eyas.serve.answer import Answer, Scored
from eyas.serve.api.logprobs import chat_logprobs
from eyas.serve.api.reply import Json, Part, Reply
from eyas.serve.api.route import GENERATING, JsonRoute, Server, answered, documented, queue_key, request_id
from eyas.serve.api.schema.chat import ChatChunk, ChatCompletion, ChatRequest
from eyas.serve.context import Context
from eyas.serve.generation import Generation
from eyas.serve.http.streaming import send
from eyas.serve.tools.calling import Calling, calling, one_grammar
from eyas.serve.tools.parser import TextPiece, ToolCallParser
from eyas.serve.tools.structured import grammar_of

router = APIRouter(route_class=JsonRoute)
PATH = "/v1/chat/completions"


@router.post(PATH, responses={200: answered(ChatCompletion, ChatChunk), **documented(*GENERATING)})
async def create_chat_completion(request: Request, asked: ChatRequest, context: Server) -> Response:
    """Answer a chat."""
    return await send(request, asked, context, _begin)


async def _begin(request: Request, asked: ChatRequest, context: Context) -> ChatReply:
    tokenizer = context.engine.tokenizer
    tools = calling(asked, tokenizer)
    grammar = one_grammar(tools, grammar_of(asked))
    await context.check_grammar(grammar)
    size = sum(message.characters for message in asked.messages)
    encode.check_size(tokenizer, size, context.max_model_len)
    schemas = tools.schemas if tools else ()
    prompt = await context.in_worker(
        encode.chat_tokens, tokenizer, asked.messages, schemas, asked.chat_template_kwargs, characters=size
    )
    job = encode.job(
        asked,
        [prompt],
        request_id=request_id(request),
        context=context.max_model_len,
        max_tokens=asked.max_completion_tokens or asked.max_tokens,
        logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
        grammar=grammar,
    )
    generation = await context.generate(
        job,
        lambda: Answer(tokenizer, asked.stops, tools.kept if tools else frozenset()),
        endpoint=PATH,
        stream=bool(asked.stream),
        user=queue_key(request, asked.user or asked.safety_identifier),
        began=request.scope["state"]["began"],
    )
    return ChatReply(context, asked, generation, f"chatcmpl-{request_id(request)}", tools)


# Replies of the chat API.


class ChatReply(Reply):
    """Text and tool calls as messages and their deltas."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(
        self, context: Context, asked: ChatRequest, generation: Generation, reply_id: str, tools: Calling | None
    ) -> None:
        super().__init__(context, asked, generation, reply_id)
        self._tools = tools
        self._parsers = [] if tools is None else [ToolCallParser(tools.style) for _ in generation.answers]

    def first(self, place: int) -> Json | None:  # noqa: ARG002  # all begin alike
        return self._fields({"role": "assistant", "content": ""})

    def parse(self, place: int, text: str, last: bool) -> list[Part]:
        if self._tools is None:
            return super().parse(place, text, last)
        parser = self._parsers[place]
        parts = parser.feed(text) + (parser.finish() if last else [])
        if self._tools.parallel:
            return parts
        if parser.calls > 1:
            self.generation.stop(place)
        return [part for part in parts if isinstance(part, TextPiece) or part.index == 0]

    def pieces(self, parts: Sequence[Part], scored: Sequence[Scored]) -> list[Json]:
        deltas = [_delta(part) for part in parts]
        if scored and not deltas:
            deltas = [{}]
        found = [self._fields(delta) for delta in deltas]
        if scored:
            found[0]["logprobs"] = self._logprobs(scored)
        return found

    def empty(self) -> Json:
        return self._fields({})

    def end(self, place: int) -> Json:
        return self._fields({}) | {"finish_reason": self._reason(place)}

    def choice(self, place: int, parts: Sequence[Part], scored: Sequence[Scored]) -> Json:
        content, calls = "", list[Json]()
        for part in parts:
            if isinstance(part, TextPiece):
                content += part.text
            elif part.name is not None:
                function = {"name": part.name, "arguments": part.arguments}
                calls.append({"id": part.id, "type": "function", "function": function})
            else:
                calls[part.index]["function"]["arguments"] += part.arguments
        message: Json = {"role": "assistant", "content": None if calls and not content.strip() else content}
        message |= {"refusal": None} | ({"tool_calls": calls} if calls else {})
        return {"message": message, "logprobs": self._logprobs(scored), "finish_reason": self._reason(place)}

    def _reason(self, place: int) -> str | None:
        reason = self.generation.answers[place].finish_reason
        called = bool(self._parsers) and self._parsers[place].calls > 0
        return "tool_calls" if called and reason == "stop" else reason

    def _fields(self, delta: Json) -> Json:
        return {"delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, scored: Sequence[Scored]) -> Json | None:
        return chat_logprobs(self.names, scored) if self.generation.scored else None


def _delta(part: Part) -> Json:
    return {"content": part.text} if isinstance(part, TextPiece) else {"tool_calls": [part.delta()]}
