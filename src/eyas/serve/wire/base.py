"""What every message on the wire has in common, and the extensions that carry this project's name."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from eyas.serve.refusals import without_nulls

Finite = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
"""Of millions that are wrong only the first is told."""


class Asked(BaseModel):
    """A request, or a part of one: an unknown field is an error, and so is text where a number belongs."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class AskedAtTop(Asked):
    """A whole request: fields that aren't served may be null."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, body: Any) -> Any:
        return without_nulls(body)


class Told(BaseModel):
    """An answer, or a part of one."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class EyasOptions(Asked):
    """Extension of requests."""

    speculate: bool = Field(default=True, description="false decodes this request without draft tokens")
    trace: bool = Field(default=False, description="tell of every round what was drafted and accepted")


class StreamOptions(Asked):
    """How a stream ends."""

    include_usage: bool | None = Field(default=None, description="a last chunk with the usage of all choices")


class Speculation(Told):
    """Extension of usage: what speculation did for this request, all choices pooled (docs/metrics.md)."""

    target_passes: int
    accept_length: float = Field(description="tokens per target pass")
    acceptance_rate: float = Field(description="accepted draft tokens / draft tokens on the offered depth")
    accepted_by_position: list[float]
    accepted_histogram: list[int] = Field(description="[i] = rounds that accepted exactly i draft tokens")
    prefill_seconds: float
    decode_seconds: float
    tokens_per_second: float


class PromptTokensDetails(Told):
    """Where prompt tokens came from."""

    cached_tokens: int = Field(description="were not read again: requests before began alike")


class Usage(Told):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    eyas: Speculation


class EyasTold(Told):
    """Extension of answers."""

    seed: int = Field(description="choice i was sampled with seed + i; send it again for the same answers")


class Head(Told):
    """What an answer and every chunk of a stream begin with."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class Whole(Head):
    """All choices of a request at once."""

    usage: Usage
    eyas: EyasTold


class Chunk(Head):
    """One event of a stream; the last is `[DONE]`."""

    usage: Usage | None = None
    eyas: EyasTold | None = None


class ErrorDetail(Told):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Told):
    """Every answer that is not a success."""

    error: ErrorDetail
