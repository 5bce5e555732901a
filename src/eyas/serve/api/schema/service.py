"""Requests and responses of the small routes: models, tokenize and detokenize, health, version."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from eyas.serve.api.schema.messages import RequestMessage, Tool
from eyas.serve.api.schema.request import Name, RequestModel, TokenIds
from eyas.serve.api.schema.response import ResponseModel

MOST_TO_TOKENIZE = 1 << 20
"""Most characters to tokenize, or tokens to detokenize, in one request: no context holds more."""


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
    prompt: Annotated[str, Field(max_length=MOST_TO_TOKENIZE)] | None = None
    messages: Annotated[list[RequestMessage], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool = Field(default=True, description="add the tokenizer's special tokens to a prompt")
    add_generation_prompt: bool = Field(default=True, description="begin the answer to a chat")
    continue_final_message: bool = Field(default=False, description="needs add_generation_prompt: false")
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _either_prompt_or_messages(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
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
    tokens: Annotated[TokenIds, Field(max_length=MOST_TO_TOKENIZE)]


class DetokenizeResponse(ResponseModel):
    """The text of the tokens, special tokens included."""

    prompt: str


class HealthResponse(ResponseModel):
    """The status `ok`: requests are taken. Otherwise the response is an error 503."""

    status: Literal["ok"] = "ok"


class LoadResponse(ResponseModel):
    """How much work the server has."""

    server_load: int = Field(description="sequences that wait or run")


class VersionResponse(ResponseModel):
    """The version of eyas that serves."""

    version: str
