"""`/v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from eyas.serve import encode
from eyas.serve.answer import Answer, Scored
from eyas.serve.context import Context, while_connected
from eyas.serve.events import EventStream
from eyas.serve.generation import Generation
from eyas.serve.logprobs import TokenNames, chat_logprobs
from eyas.serve.routes.needs import Server, queue_key, request_id
from eyas.serve.routes.route import GENERATING, JsonRoute, documented
from eyas.serve.trace import Tracer
from eyas.serve.wire.chat import ChatCompletion, ChatRequest

router = APIRouter(route_class=JsonRoute)
_STREAM = {"text/event-stream": {"schema": {"type": "string", "description": "events with a ChatChunk each"}}}


@router.post(
    "/v1/chat/completions",
    responses={200: {"model": ChatCompletion, "content": _STREAM}, **documented(*GENERATING)},
)
async def create_chat_completion(request: Request, asked: ChatRequest, context: Server) -> Response:
    """Answer a chat."""
    engine = context.engine
    context.check_model(asked.model)

    async def begin() -> Chatting:
        prompt = await context.in_worker(
            encode.chat_tokens, engine.tokenizer, asked.messages, asked.tools, asked.chat_template_kwargs
        )
        job = encode.job(
            asked,
            [prompt],
            request_id=request_id(request),
            context=context.max_model_len,
            max_tokens=asked.max_completion_tokens or asked.max_tokens,
            logprobs=(asked.top_logprobs or 0) if asked.logprobs else None,
        )
        generation = await context.generate(
            job,
            lambda: Answer(engine.tokenizer, asked.stops),
            endpoint="/v1/chat/completions",
            stream=bool(asked.stream),
            user=queue_key(request, asked.user or asked.safety_identifier),
        )
        return Chatting(context, asked, generation, request_id(request))

    if asked.stream:
        chatting = await while_connected(request, begin())
        return EventStream(chatting.events(), context.settings.write_seconds)

    async def all_of_it() -> dict[str, Any]:
        return await (await begin()).whole()

    return JSONResponse(await while_connected(request, all_of_it()))


class Chatting:
    """A generation in the words of the chat API."""

    def __init__(self, context: Context, asked: ChatRequest, generation: Generation, request_id: str) -> None:
        self._asked, self._generation = asked, generation
        self._names = TokenNames(context.engine.tokenizer) if asked.logprobs else None
        places = range(len(generation.answers))
        self._tracers = [Tracer(context.engine.tokenizer) for _ in places] if asked.options.trace else None
        self._head = {
            "id": f"chatcmpl-{request_id}",
            "created": int(time.time()),
            "model": asked.model,
            "system_fingerprint": context.fingerprint,
        }

    async def whole(self) -> dict[str, Any]:
        """All at once."""
        count = len(self._generation.answers)
        texts, scored = [""] * count, [list[Scored]() for _ in range(count)]
        traces: list[list[dict[str, Any]]] = [[] for _ in range(count)]
        try:
            async for step in self._generation:
                texts[step.place] += step.delta.text
                scored[step.place] += step.delta.scored
                if self._tracers is not None:
                    traces[step.place].append(self._tracers[step.place].fields(step.chunk))
        finally:
            self._generation.close()
        choices = []
        for place, answer in enumerate(self._generation.answers):
            choice: dict[str, Any] = {
                "index": place,
                "message": {"role": "assistant", "content": texts[place], "refusal": None},
                "logprobs": self._logprobs(scored[place]),
                "finish_reason": answer.finish_reason,
            }
            if self._tracers is not None:
                choice["eyas"] = {"rounds": traces[place]}
            choices.append(choice)
        return self._head | {
            "object": "chat.completion",
            "choices": choices,
            "usage": self._generation.usage(),
            "eyas": {"seed": self._generation.job.seed},
        }

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Piece by piece."""
        try:
            for place in range(len(self._generation.answers)):
                first = self._chunk(place, {"role": "assistant", "content": ""})
                yield first | {"eyas": {"seed": self._generation.job.seed}}
            ended: set[int] = set()
            async for step in self._generation:
                place = step.place
                delta = {"content": step.delta.text} if step.delta.text else {}
                scored = self._logprobs(step.delta.scored) if step.delta.scored else None
                trace = self._tracers[place].fields(step.chunk) if self._tracers is not None else None
                if delta or scored or (trace and place not in ended):
                    yield self._chunk(place, delta, scored, trace=trace)
                reason = self._generation.answers[place].finish_reason
                if reason is not None and place not in ended:
                    ended.add(place)
                    yield self._chunk(place, {}, reason=reason)
            if self._asked.wants_usage:
                yield self._outer([]) | {"usage": self._generation.usage()}
        finally:
            self._generation.close()

    def _chunk(
        self,
        place: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        reason: str | None = None,
        trace: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": place, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        if trace is not None:
            choice["eyas"] = trace
        return self._outer([choice])

    def _outer(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        outer = self._head | {"object": "chat.completion.chunk", "choices": choices}
        return outer | {"usage": None} if self._asked.wants_usage else outer

    def _logprobs(self, scored: list[Scored]) -> dict[str, Any] | None:
        return None if self._names is None else chat_logprobs(self._names, scored)
