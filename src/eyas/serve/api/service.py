"""`/v1/models`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.responses import Response

import eyas
from eyas.serve.api.route import ASKING, READING, JsonRoute, Server, documented
from eyas.serve.api.schema.service import (
    MOST_AT_ONCE,
    Detokenized,
    DetokenizeRequest,
    Health,
    Model,
    ModelList,
    Tokenized,
    TokenizeRequest,
    Version,
)
from eyas.serve.context import Context
from eyas.serve.encode import chat_tokens, check_ids
from eyas.serve.http.errors import ApiError
from eyas.serve.observe.metrics import CONTENT_TYPE, Metrics

router = APIRouter(route_class=JsonRoute)


@router.get("/v1/models", response_model=ModelList, responses=documented(*READING, 503))
async def list_models(context: Server) -> Any:
    """The names that requests may use."""
    return {"data": [_model(context, name) for name in context.settings.model_names]}


@router.get("/v1/models/{model:path}", response_model=Model, responses=documented(*READING, 404, 503))
async def retrieve_model(model: str, context: Server) -> Any:
    """One of them."""
    context.check_model(model)
    return _model(context, model)


def _model(context: Context, name: str) -> dict[str, Any]:
    context.engine  # noqa: B018  # 503 while it is being loaded
    return {"id": name, "created": context.started, "owned_by": "eyas", "max_model_len": context.max_model_len}


# `/health` and `/version`: open to everyone.


@router.get("/health", response_model=Health, responses=documented(500, 503))
async def health(context: Server) -> Any:
    """200 when requests are taken; 503 while the model is loaded, while the server goes down, or when it failed."""
    context.engine  # noqa: B018  # raises
    return {"status": "ok"}


@router.get("/version", response_model=Version, responses=documented(500))
async def version() -> Any:
    """Of this server."""
    return {"version": eyas.__version__}


# `/tokenize` and `/detokenize`, as vLLM has them.


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


# `/metrics`, for Prometheus.


def metrics_router(metrics: Metrics) -> APIRouter:
    """The route to these metrics."""
    router = APIRouter()
    content = {"text/plain": {"schema": {"type": "string"}}}

    @router.get("/metrics", response_class=Response, responses={200: {"content": content}, **documented(500)})
    async def show_metrics() -> Response:
        """Every metric as text (docs/serve_metrics.md)."""
        return Response(metrics.page(), headers={"Content-Type": CONTENT_TYPE})

    return router
