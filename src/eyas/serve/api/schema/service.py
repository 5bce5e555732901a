"""Models, tokens, health, version."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from eyas.serve.api.schema.base import Asked, TokenIds, Told
from eyas.serve.api.schema.messages import AskedMessage, Tool
from eyas.serve.api.schema.sampling import Name

MOST_AT_ONCE = 1 << 20
"""Characters of a text, or tokens: more are a second's work for nothing, since no context holds them."""


class Model(Told):
    """A name that requests may use."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    max_model_len: int | None


class ModelList(Told):
    """All names."""

    object: Literal["list"] = "list"
    data: list[Model]


class TokenizeRequest(Asked):
    """Text, or a chat as its template renders it."""

    model: Name | None = None
    prompt: Annotated[str, Field(max_length=MOST_AT_ONCE)] | None = None
    messages: Annotated[list[AskedMessage], Field(min_length=1)] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool = Field(default=True, description="of prompts: the tokens that the tokenizer adds itself")
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_them(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        if self.tools is not None and self.messages is None:
            raise ValueError("tools need messages")
        return self


class Tokenized(Told):
    """The ids."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Asked):
    """Token ids."""

    model: Name | None = None
    tokens: Annotated[TokenIds, Field(max_length=MOST_AT_ONCE)]


class Detokenized(Told):
    """The text, special tokens included."""

    prompt: str


class Health(Told):
    """`ok`; any other status comes as an error with status 503."""

    status: Literal["ok"] = "ok"


class Version(Told):
    """Of this server."""

    version: str
