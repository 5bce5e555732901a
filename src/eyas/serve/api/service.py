"""The small routes and their bodies: models, tokenize and detokenize as in vLLM, health, version, metrics."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter
from pydantic import Field, model_validator
from starlette.responses import Response

import eyas
from eyas.serve.api.encode import characters_in, chat_prompt, check_token_ids
from eyas.serve.context import Context, Info, ServerContext
from eyas.serve.errors import ApiError
from eyas.serve.http.request import JsonRoute
from eyas.serve.observe.metrics import CONTENT_TYPE, Metrics
from eyas.serve.schema.messages import RequestMessage, Tool, tool_schemas
from eyas.serve.schema.request import Ignored, Name, OnlyFalse, RequestModel, TokenIds
from eyas.serve.schema.response import ERRORS_OF_READS, WITH_BODY, ResponseModel, error_responses
from eyas.text.template import required

MAX_TOKENIZE_LENGTH = 1 << 20
"""Maximum characters to tokenize, or tokens to detokenize, in one request: no context holds more."""


class ModelCard(ResponseModel):
    """A model name that requests may use, and the context it serves."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int | None


class ModelList(ResponseModel):
    """All model names that requests may use."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeRequest(RequestModel):
    """What to tokenize: a text, or a chat up to where the answer begins."""

    model: Name | None = None
    prompt: Annotated[str, Field(max_length=MAX_TOKENIZE_LENGTH)] | None = None
    content: Annotated[str, Field(max_length=MAX_TOKENIZE_LENGTH)] | None = Field(
        default=None, description="llama-server's name for a prompt, without special tokens unless add_special"
    )
    add_special: bool = False
    parse_special: Annotated[Any, Ignored("special tokens that a text spells out are read as such")] = None
    with_pieces: OnlyFalse | None = None
    messages: Annotated[list[RequestMessage], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool = Field(default=True, description="add the tokenizer's special tokens to a prompt")
    add_generation_prompt: bool = Field(default=True, description="begin the answer to a chat")
    continue_final_message: bool = Field(default=False, description="needs add_generation_prompt: false")
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _either_prompt_or_messages(self) -> TokenizeRequest:
        if (self.prompt, self.content, self.messages).count(None) != 2:
            raise ValueError("give either prompt or messages")
        if self.tools is not None and self.messages is None:
            raise ValueError("tools need messages")
        if self.messages is None and (self.continue_final_message or not self.add_generation_prompt):
            raise ValueError("add_generation_prompt and continue_final_message need messages")
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message needs add_generation_prompt: false")
        return self


class TokenizeResponse(ResponseModel):
    """The token ids, and their texts if they were requested."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(RequestModel):
    """The token ids to turn into text."""

    model: Name | None = None
    tokens: Annotated[TokenIds, Field(max_length=MAX_TOKENIZE_LENGTH)]


class DetokenizeResponse(ResponseModel):
    """The text of the tokens, special tokens included."""

    prompt: str
    content: str = Field(description="the same, as llama-server names it")


class HealthResponse(ResponseModel):
    """The status `ok`: requests are taken. Otherwise the response is an error 503."""

    status: Literal["ok"] = "ok"


class LoadResponse(ResponseModel):
    """How much work the server has."""

    server_load: int = Field(description="number of waiting and running sequences")


class VersionResponse(ResponseModel):
    """The running version of eyas."""

    version: str


router = APIRouter(route_class=JsonRoute)


@router.get("/v1/models", response_model=ModelList, responses=error_responses(*ERRORS_OF_READS, 503))
async def list_models(context: Context) -> Any:
    """List the model names that requests may use."""
    return {"data": [_model_card(context, name) for name in context.settings.model_names]}


@router.get("/v1/models/{model:path}", response_model=ModelCard, responses=error_responses(*ERRORS_OF_READS, 404, 503))
async def retrieve_model(model: str, context: Context) -> Any:
    """Describe the model of this name."""
    context.check_model(model)
    return _model_card(context, model)


def _model_card(context: ServerContext, name: str) -> dict[str, Any]:
    context.engine  # noqa: B018  # 503 while it is being loaded
    return {"id": name, "created": context.started, "owned_by": "eyas", "max_model_len": context.max_model_len}


@router.post(
    "/tokenize",
    response_model=TokenizeResponse,
    response_model_exclude_none=True,
    responses=error_responses(*WITH_BODY),
)
async def tokenize(body: TokenizeRequest, context: Context, info: Info) -> Any:
    """Tokenize a text, or a chat up to where the answer begins."""
    context.check_model(body.model)
    tokenizer = required(context.engine.tokenizer)

    def encode() -> tuple[list[int], list[str] | None]:
        if body.messages is not None:
            ids = list(
                chat_prompt(
                    tokenizer,
                    body.messages,
                    tool_schemas(body.tools),
                    parse_special_tokens=context.settings.parse_special_tokens,
                    add_generation_prompt=body.add_generation_prompt,
                    continue_final_message=body.continue_final_message,
                )
            )
        elif body.content is not None:
            ids = tokenizer(body.content, add_special_tokens=body.add_special)["input_ids"]
        else:
            ids = tokenizer(body.prompt, add_special_tokens=body.add_special_tokens)["input_ids"]
        return ids, tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None

    size = len(body.prompt or body.content or "") + sum(message.characters for message in body.messages or ())
    size += characters_in(tool_schemas(body.tools))
    if size > MAX_TOKENIZE_LENGTH:
        message = f"the messages have {size} characters, but one request can tokenize at most {MAX_TOKENIZE_LENGTH}"
        raise ApiError(400, message, code="too_long", param="messages")
    ids, texts = await context.in_worker(encode, characters=size, info=info)
    return {"count": len(ids), "max_model_len": context.max_model_len, "tokens": ids, "token_strs": texts}


@router.post("/detokenize", response_model=DetokenizeResponse, responses=error_responses(*WITH_BODY))
async def detokenize(body: DetokenizeRequest, context: Context, info: Info) -> Any:
    """Turn token ids into their text."""
    context.check_model(body.model)
    check_token_ids(body.tokens, context.engine.target.vocab_size, "tokens")
    decode = required(context.engine.tokenizer).decode
    size = 4 * len(body.tokens)
    text = await context.in_worker(decode, body.tokens, characters=size, info=info)
    return {"prompt": text, "content": text}


@router.head("/health", include_in_schema=False)
@router.head("/ping", include_in_schema=False)
@router.get("/ping", response_model=HealthResponse, responses=error_responses(500, 503))
@router.get("/health", response_model=HealthResponse, responses=error_responses(500, 503))
async def health(context: Context) -> Any:
    """200 when requests are taken; 503 while the model is loaded, while the server goes down, or when it failed."""
    context.engine  # noqa: B018  # raises
    return {"status": "ok"}


@router.get("/load", response_model=LoadResponse, responses=error_responses(500))
async def load(context: Context) -> Any:
    """How many sequences wait or run, in vLLM's form."""
    return {"server_load": context.thread.unfinished}


@router.get("/version", response_model=VersionResponse, responses=error_responses(500))
async def version() -> Any:
    """The running version of eyas."""
    return {"version": eyas.__version__}


def metrics_router(metrics: Metrics) -> APIRouter:
    """Make the route `/metrics`, which shows these metrics."""
    router = APIRouter()
    content = {"text/plain": {"schema": {"type": "string"}}}

    @router.get("/metrics", response_class=Response, responses={200: {"content": content}, **error_responses(500)})
    async def show_metrics() -> Response:
        """Every metric in Prometheus' text format (docs/serve_metrics.md)."""
        return Response(metrics.page(), headers={"Content-Type": CONTENT_TYPE})

    return router
