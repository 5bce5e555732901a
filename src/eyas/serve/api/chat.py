"""The routes `POST /v1/chat/completions` and `POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from fastapi import APIRouter
from starlette.responses import Response

from eyas.serve.api.encode import (
    EncodingOptions,
    bad_word_ids,
    characters_in,
    chat_prompt,
    check_size,
    completion_prompt,
    encode_request,
    template_settings,
)
from eyas.serve.api.generation import ChoiceOutput, Generation
from eyas.serve.api.logprobs import Echo
from eyas.serve.api.response import ChatResponseWriter, CompletionResponseWriter
from eyas.serve.context import Context, Info, RequestInfo, ServerContext
from eyas.serve.errors import ApiError
from eyas.serve.http.request import JsonRoute
from eyas.serve.http.streaming import respond
from eyas.serve.schema.chat import (
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
    CompletionChunk,
    CompletionRequest,
    CompletionResponse,
)
from eyas.serve.schema.messages import tool_schemas
from eyas.serve.schema.request import UNLIMITED, GenerationRequest, ignored_fields
from eyas.serve.schema.response import generation_responses
from eyas.serve.tools.calling import Calling, after_thought, one_grammar, tool_calling
from eyas.serve.tools.structured import requested_grammar
from eyas.text.fill import encode_fill, fill_format
from eyas.text.reasoning import ThoughtSplitter, begins_inside
from eyas.text.template import encode_prediction, required

router = APIRouter(route_class=JsonRoute)
PATH = "/v1/chat/completions"


@router.post(PATH, responses=generation_responses(ChatCompletionResponse, ChatCompletionChunk))
async def create_chat_completion(body: ChatCompletionRequest, context: Context, info: Info) -> Response:
    """Answer a chat, all at once or as a stream."""
    context.log_ignored(ignored_fields(body))
    generation, tools = await start_chat(body, context, info, endpoint=PATH)
    writer = ChatResponseWriter(body, generation, f"chatcmpl-{info.id}", tools)
    return await respond(writer, stream=body.stream, write_seconds=context.settings.write_seconds)


async def read_bad_words(
    body: GenerationRequest, context: ServerContext, info: RequestInfo
) -> tuple[tuple[int, ...], ...]:
    """The body's bad words, tokenized by `bad_word_ids`."""
    words = body.bad_words or ()
    if not words:
        return ()
    size = 2 * characters_in(words)  # each is tokenized twice
    return await context.in_worker(bad_word_ids, context.engine.tokenizer, words, characters=size, info=info)


async def read_prediction(body: ChatCompletionRequest, context: ServerContext, info: RequestInfo) -> tuple[int, ...]:
    """Tokenize what the answer is expected to be. Raises ApiError 400 if it is far too long."""
    if body.prediction is None:
        return ()
    tokenizer, text = context.engine.tokenizer, body.prediction.text
    check_size(tokenizer, len(text), context.max_model_len)
    return await context.in_worker(encode_prediction, tokenizer, text, characters=len(text), info=info)


async def start_chat(
    body: ChatCompletionRequest, context: ServerContext, info: RequestInfo, *, endpoint: str, shorten: bool = False
) -> tuple[Generation, Calling | None]:
    """Encode a chat and hand it to the engine; return the answers being generated, and how they call tools.

    `shorten`: if `max_tokens` doesn't fit the context, lower it to what fits instead of raising.
    """
    context.check_model(body.model)
    tokenizer = required(context.engine.tokenizer)
    size_of(body, context)
    tools = tool_calling(body, tokenizer)
    grammar = one_grammar(tools, requested_grammar(body))
    prompt = await read_chat(body, context, info, tools)
    marks = context.reasoning if body.separates_thoughts else None
    inside = marks is not None and begins_inside(marks, tokenizer, prompt, body.begun_answer)
    grammar = after_thought(grammar, tools, marks, inside=inside, tokenizer=tokenizer)
    await context.check_grammar(grammar, info.client)
    bad_words = await read_bad_words(body, context, info)
    prediction = await read_prediction(body, context, info)
    wanted = EncodingOptions(
        max_tokens=_limit(body.max_completion_tokens or body.max_tokens),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        bad_words=bad_words,
        grammar=grammar,
        chat=True,
        prediction=prediction,
        shorten=shorten,
    )
    limit, seed = context.max_model_len, context.settings.seed
    request = encode_request(body, [prompt], wanted, request_id=info.id, context=limit, default_seed=seed)
    visible_specials = tools.special_tokens if tools else frozenset()
    if marks is not None:
        visible_specials |= marks.special_tokens(tokenizer)

    def new_output() -> ChoiceOutput:
        if marks is None:
            return ChoiceOutput(tokenizer, body, visible_specials)
        splitter = ThoughtSplitter(marks, inside=inside, interrupts=tools.opening if tools else ())
        return ChoiceOutput(tokenizer, body, visible_specials, splitter=splitter)

    generation = await Generation.start(
        context,
        request,
        new_output,
        endpoint=endpoint,
        stream=bool(body.stream),
        queue_key=info.queue_key(body.user or body.safety_identifier),
        info=info,
    )
    return generation, tools


def _limit(max_tokens: int | None) -> int | None:
    """A length limit; None for none."""
    return None if max_tokens == UNLIMITED else max_tokens


def size_of(body: ChatCompletionRequest, context: ServerContext) -> int:
    """Count the characters of a chat and its tools. Raises ApiError 400 if they are far too many."""
    size = sum(message.characters for message in body.messages)
    size += characters_in(tool_schemas(body.tools), body.chat_template_kwargs)
    check_size(required(context.engine.tokenizer), size, context.max_model_len)
    return size


async def read_chat(
    body: ChatCompletionRequest, context: ServerContext, info: RequestInfo, tools: Calling | None
) -> tuple[int, ...]:
    """Tokenize a chat up to where the answer begins. Raises ApiError 400 if it is far too long."""
    tokenizer = required(context.engine.tokenizer)
    variables, unread = template_settings(tokenizer, body, tools.schemas if tools else ())
    context.log_ignored(unread)
    return await context.in_worker(
        partial(
            chat_prompt,
            tokenizer,
            body.messages,
            tools.schemas if tools else (),
            variables,
            parse_special_tokens=context.settings.parse_special_tokens,
            add_generation_prompt=body.add_generation_prompt is not False and not body.messages[-1].continues,
            continue_final_message=body.continues,
        ),
        characters=size_of(body, context),
        info=info,
    )


COMPLETIONS_PATH = "/v1/completions"
DEFAULT_TOKENS = 16
"""OpenAI's default for `max_tokens` of completions; chats may use the rest of the context."""


@router.post(COMPLETIONS_PATH, responses=generation_responses(CompletionResponse, CompletionChunk))
async def create_completion(body: CompletionRequest, context: Context, info: Info) -> Response:
    """Continue one prompt or several, or fill the gap before `suffix`, all at once or as a stream."""
    context.check_model(body.model)
    context.log_ignored(ignored_fields(body))
    if body.max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        message = "max_tokens is 0, which generates nothing: send echo or prompt_logprobs, or raise it"
        raise ApiError(400, message, code="invalid_value", param="max_tokens")
    tokenizer = context.engine.tokenizer
    prompts = await read_prompts(body, context, info)
    generation = await start_completion(body, prompts, context, info, endpoint=COMPLETIONS_PATH)
    echoes: list[Echo] = []
    for prompt, tokens in zip(body.prompts, prompts, strict=True) if body.echo else ():
        echo = await context.in_worker(
            Echo.of, tokenizer, prompt, tokens, body.scores_all, characters=4 * len(tokens), info=info
        )
        echoes += [echo] * (body.n or 1)
    writer = CompletionResponseWriter(body, generation, f"cmpl-{info.id}", echoes)
    return await respond(writer, stream=body.stream, write_seconds=context.settings.write_seconds)


async def read_prompts(body: CompletionRequest, context: ServerContext, info: RequestInfo) -> list[tuple[int, ...]]:
    """Tokenize the prompts, each with the gap before `suffix` if there is one."""
    tokenizer = context.engine.tokenizer
    encode: Callable[[str | tuple[int, ...]], tuple[int, ...]] = partial(completion_prompt, tokenizer)
    if body.suffix:
        form = fill_format(tokenizer, context.settings.fim_tokens)
        encode = partial(encode_fill, tokenizer, form, suffix=body.suffix)
    prompts = []
    for prompt in body.prompts:
        size = (len(prompt) if isinstance(prompt, str) else 0) + len(body.suffix or "")
        check_size(tokenizer, size, context.max_model_len)
        prompts.append(await context.in_worker(encode, prompt, characters=size, info=info))
    return prompts


async def start_completion(
    body: CompletionRequest,
    prompts: Sequence[tuple[int, ...]],
    context: ServerContext,
    info: RequestInfo,
    *,
    endpoint: str,
    shorten: bool = False,
) -> Generation:
    """Hand tokenized prompts to the engine; return the answers being generated. `shorten`: as in `start_chat`."""
    tokenizer = context.engine.tokenizer
    if body.echo or body.logprobs is not None or body.stop_strings or body.options.trace:
        required(tokenizer)
    grammar = requested_grammar(body)
    await context.check_grammar(grammar, info.client)
    bad_words = await read_bad_words(body, context, info)
    wanted = EncodingOptions(
        max_tokens=DEFAULT_TOKENS if body.max_tokens is None else _limit(body.max_tokens),
        logprobs=body.logprobs,
        prompt_logprobs=body.scored_alternatives,
        bad_words=bad_words,
        grammar=grammar,
        shorten=shorten,
    )
    limit, seed = context.max_model_len, context.settings.seed
    request = encode_request(body, prompts, wanted, request_id=info.id, context=limit, default_seed=seed)
    return await Generation.start(
        context,
        request,
        lambda: ChoiceOutput(tokenizer, body, score_all=body.scores_all),
        endpoint=endpoint,
        stream=bool(body.stream),
        queue_key=info.queue_key(body.user),
        info=info,
    )
