"""`/tokenize` and `/detokenize`, as vLLM has them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from eyas.serve.encode import chat_tokens, check_ids
from eyas.serve.errors import ApiError
from eyas.serve.routes.needs import Server
from eyas.serve.routes.route import ASKING, JsonRoute, documented
from eyas.serve.wire.other import MOST_AT_ONCE, Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest

router = APIRouter(route_class=JsonRoute)


@router.post("/tokenize", response_model=Tokenized, response_model_exclude_none=True, responses=documented(*ASKING))
async def tokenize(asked: TokenizeRequest, context: Server) -> Any:
    """The tokens of a text, or of a chat up to where the answer begins."""
    context.check_model(asked.model)
    tokenizer = context.engine.tokenizer

    def encode() -> tuple[list[int], list[str] | None]:
        if asked.messages is not None:
            schemas = [tool.model_dump(mode="json", exclude_none=True) for tool in asked.tools or ()]
            ids = list(chat_tokens(tokenizer, asked.messages, schemas))
        else:
            ids = tokenizer(asked.prompt, add_special_tokens=asked.add_special_tokens)["input_ids"]
        return ids, tokenizer.convert_ids_to_tokens(ids) if asked.return_token_strs else None

    size = len(asked.prompt or "") + sum(message.characters for message in asked.messages or ())
    if size > MOST_AT_ONCE:
        message = f"the messages have {size} characters, at most {MOST_AT_ONCE} are cut into tokens at once"
        raise ApiError(400, message, code="too_long", param="messages")
    ids, texts = await context.in_worker(encode, characters=size)
    return {"count": len(ids), "max_model_len": context.max_model_len, "tokens": ids, "token_strs": texts}


@router.post("/detokenize", response_model=Detokenized, responses=documented(*ASKING))
async def detokenize(asked: DetokenizeRequest, context: Server) -> Any:
    """The text of tokens."""
    context.check_model(asked.model)
    check_ids(asked.tokens, context.engine.target.vocab_size, "tokens")
    return {"prompt": await context.in_worker(context.engine.tokenizer.decode, asked.tokens)}
