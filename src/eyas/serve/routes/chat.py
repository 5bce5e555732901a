"""`/v1/chat/completions`."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from eyas.serve import encode
from eyas.serve.answer import Answer
from eyas.serve.calling import calling, one_grammar
from eyas.serve.chat_reply import ChatReply
from eyas.serve.constraining import grammar_of
from eyas.serve.context import Context
from eyas.serve.routes.needs import Server, queue_key, request_id
from eyas.serve.routes.route import GENERATING, JsonRoute, answered, documented
from eyas.serve.routes.sending import send
from eyas.serve.wire.chat import ChatChunk, ChatCompletion, ChatRequest

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
