"""`/v1/completions`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from eyas.serve import encode
from eyas.serve.answer import Answer
from eyas.serve.completion_reply import CompletionReply
from eyas.serve.constraining import grammar_of
from eyas.serve.context import Context
from eyas.serve.routes.needs import Server, queue_key, request_id
from eyas.serve.routes.route import GENERATING, JsonRoute, answered, documented
from eyas.serve.routes.sending import send
from eyas.serve.wire.completions import Completion, CompletionChunk, CompletionRequest

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
