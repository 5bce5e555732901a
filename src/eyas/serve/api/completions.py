"""`/v1/completions`."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from eyas.serve import encode
from eyas.serve.answer import Answer, Scored
from eyas.serve.api.logprobs import completion_logprobs
from eyas.serve.api.reply import Json, Part, Reply
from eyas.serve.api.route import GENERATING, JsonRoute, Server, answered, documented, queue_key, request_id
from eyas.serve.api.schema.completions import Completion, CompletionChunk, CompletionRequest
from eyas.serve.context import Context
from eyas.serve.http.streaming import send
from eyas.serve.tools.parser import TextPiece
from eyas.serve.tools.structured import grammar_of

router = APIRouter(route_class=JsonRoute)
PATH = "/v1/completions"
DEFAULT_TOKENS = 16
"""OpenAI's default for completions; chats may use the rest of the context."""


@router.post(PATH, responses={200: answered(Completion, CompletionChunk), **documented(*GENERATING)})
async def create_completion(request: Request, asked: CompletionRequest, context: Server) -> Response:
    """Continue one prompt or several."""
    return await send(request, asked, context, _begin)


async def _begin(request: Request, asked: CompletionRequest, context: Context) -> CompletionReply:
    tokenizer = context.engine.tokenizer
    grammar = grammar_of(asked)
    await context.check_grammar(grammar)
    prompts = []
    for prompt in asked.prompts:
        size = len(prompt) if isinstance(prompt, str) else 0
        encode.check_size(tokenizer, size, context.max_model_len)
        prompts.append(await context.in_worker(encode.prompt_tokens, tokenizer, prompt, characters=size))
    job = encode.job(
        asked,
        prompts,
        request_id=request_id(request),
        context=context.max_model_len,
        max_tokens=DEFAULT_TOKENS if asked.max_tokens is None else asked.max_tokens,
        logprobs=asked.logprobs,
        grammar=grammar,
    )
    generation = await context.generate(
        job,
        lambda: Answer(tokenizer, asked.stops),
        endpoint=PATH,
        stream=bool(asked.stream),
        user=queue_key(request, asked.user),
        began=request.scope["state"]["began"],
    )
    reply = CompletionReply(context, asked, generation, f"cmpl-{request_id(request)}")
    if asked.echo:
        texts = [prompt if isinstance(prompt, str) else tokenizer.decode(prompt) for prompt in asked.prompts]
        reply.echoes = [text for text in texts for _ in range(asked.n or 1)]
    return reply


# Replies of the completions API.


class CompletionReply(Reply):
    """Plain text; `echoes` has what each choice's text begins with."""

    object_name = "text_completion"
    chunk_name = "text_completion"
    echoes: Sequence[str] = ()

    def first(self, place: int) -> Json | None:
        return self._fields(self.echoes[place]) if self.echoes else None

    def pieces(self, parts: Sequence[Part], scored: Sequence[Scored]) -> list[Json]:
        return [self._fields(_text(parts), self._logprobs(scored))] if parts or scored else []

    def empty(self) -> Json:
        return self._fields("")

    def end(self, place: int) -> Json:
        return self._fields("") | {"finish_reason": self.generation.answers[place].finish_reason}

    def choice(self, place: int, parts: Sequence[Part], scored: Sequence[Scored]) -> Json:
        return {
            "text": (self.echoes[place] if self.echoes else "") + _text(parts),
            "logprobs": self._logprobs(scored),
            "finish_reason": self.generation.answers[place].finish_reason,
        }

    def _fields(self, text: str, logprobs: Json | None = None) -> Json:
        return {"text": text, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, scored: Sequence[Scored]) -> Json | None:
        return completion_logprobs(self.names, scored) if self.generation.scored else None


def _text(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, TextPiece))
