"""The route `POST /v1/completions`: prompts are encoded, handed to the engine, and continued as text is generated."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.responses import Response

from eyas.serve.api.chat import read_bad_words
from eyas.serve.api.encode import check_size, completion_prompt, encode_request
from eyas.serve.api.logprobs import Echo
from eyas.serve.api.response import CompletionResponseWriter
from eyas.serve.api.schema.completions import CompletionChunk, CompletionRequest, CompletionResponse
from eyas.serve.api.schema.request import ignored_fields
from eyas.serve.api.schema.response import generation_responses
from eyas.serve.choice_output import ChoiceOutput
from eyas.serve.context import Context, Info
from eyas.serve.generation import Generation
from eyas.serve.http.request import JsonRoute
from eyas.serve.http.streaming import respond
from eyas.serve.tools.structured import requested_grammar
from eyas.text.template import required

router = APIRouter(route_class=JsonRoute)
PATH = "/v1/completions"
DEFAULT_TOKENS = 16
"""OpenAI's default for `max_tokens` of completions; chats may use the rest of the context."""


@router.post(PATH, responses=generation_responses(CompletionResponse, CompletionChunk))
async def create_completion(body: CompletionRequest, context: Context, info: Info) -> Response:
    """Continue one prompt or several, all at once or as a stream."""
    context.check_model(body.model)
    context.log_ignored(ignored_fields(body))
    tokenizer = context.engine.tokenizer
    if body.echo or body.logprobs is not None or body.stop_strings or body.options.trace:
        required(tokenizer)
    grammar = requested_grammar(body)
    await context.check_grammar(grammar, info.client)
    prompts = []
    for prompt in body.prompts:
        size = len(prompt) if isinstance(prompt, str) else 0
        check_size(tokenizer, size, context.max_model_len)
        prompts.append(await context.in_worker(completion_prompt, tokenizer, prompt, characters=size, info=info))
    bad_words = await read_bad_words(body, context, info)
    request = encode_request(
        body,
        prompts,
        request_id=info.id,
        context=context.max_model_len,
        max_tokens=DEFAULT_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.scored_alternatives,
        bad_words=bad_words,
        default_seed=context.settings.seed,
        grammar=grammar,
    )
    echoes: list[Echo] = []
    score_all = bool(body.echo) and body.logprobs is not None
    for prompt, tokens in zip(body.prompts, prompts, strict=True) if body.echo else ():
        echo = await context.in_worker(
            Echo.of, tokenizer, prompt, tokens, score_all, characters=4 * len(tokens), info=info
        )
        echoes += [echo] * request.n
    generation = await Generation.start(
        context,
        request,
        lambda: ChoiceOutput(tokenizer, body, score_all=score_all),
        endpoint=PATH,
        stream=bool(body.stream),
        queue_key=info.queue_key(body.user),
        received=info.received,
    )
    writer = CompletionResponseWriter(context, body, generation, f"cmpl-{info.id}", echoes)
    return await respond(writer, stream=body.stream, write_seconds=context.settings.write_seconds)
