"""`/tokenize` and `/detokenize`, as vLLM has them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from eyas.serve.encode import chat_tokens, check_ids
from eyas.serve.routes.needs import Server
from eyas.serve.routes.route import ASKING, JsonRoute, documented
from eyas.serve.wire.other import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest

router = APIRouter(route_class=JsonRoute)


@router.post("/tokenize", response_model=Tokenized, response_model_exclude_none=True, responses=documented(*ASKING))
async def tokenize(asked: TokenizeRequest, context: Server) -> Any:
    """The tokens of a text, or of a chat up to where the answer begins."""
    context.check_model(asked.model)
    tokenizer = context.engine.tokenizer

    def encode() -> list[int]:
        if asked.messages is not None:
            schemas = [tool.model_dump(mode="json", exclude_none=True) for tool in asked.tools or ()]
            return list(chat_tokens(tokenizer, asked.messages, schemas))
        ids: list[int] = tokenizer(asked.prompt, add_special_tokens=asked.add_special_tokens)["input_ids"]
        return ids

    size = len(asked.prompt or "") + sum(message.characters for message in asked.messages or ())
    ids = await context.in_worker(encode, characters=size)
    return {
        "count": len(ids),
        "max_model_len": context.max_model_len,
        "tokens": ids,
        "token_strs": tokenizer.convert_ids_to_tokens(ids) if asked.return_token_strs else None,
    }


@router.post("/detokenize", response_model=Detokenized, responses=documented(*ASKING))
async def detokenize(asked: DetokenizeRequest, context: Server) -> Any:
    """The text of tokens."""
    context.check_model(asked.model)
    check_ids(asked.tokens, context.engine.target.vocab_size, "tokens")
    return {"prompt": await context.in_worker(context.engine.tokenizer.decode, asked.tokens)}
