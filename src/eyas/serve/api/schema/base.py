"""What every message on the wire has in common, and the extensions that carry this project's name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

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


# Fields of OpenAI's API that this server does not serve, and why. Null, their default, says nothing and is taken.


_TEXT_ONLY = "eyas serves text"
_TOOLS = "write tools and tool_choice instead"

REFUSED: dict[str, str] = {
    "audio": _TEXT_ONLY,
    "modalities": f'{_TEXT_ONLY}: leave it out or send ["text"]',
    "best_of": "answers aren't ranked: ask for n of them",
    "suffix": "text is only continued, never filled in",
    "function_call": _TOOLS,
    "functions": _TOOLS,
    "metadata": "nothing is stored: leave it out or send {}",
    "moderation": "nothing is moderated",
    "prediction": "a drafter guesses ahead already",
    "prompt_cache_key": "shared prefixes are found by themselves",
    "prompt_cache_retention": "shared prefixes are found by themselves",
    "prompt_cache_options": "shared prefixes are found by themselves",
    "reasoning_effort": "the chat template decides, through chat_template_kwargs",
    "service_tier": "there is one tier: leave it out or send auto or default",
    "store": "nothing is stored: leave it out or send false",
    "verbosity": "models here have no such setting",
    "web_search_options": "there is no search: offer one as a tool",
}


def without_nulls(body: Any) -> Any:
    """The body without refused fields that are null."""
    if not isinstance(body, dict):
        return body
    return {name: value for name, value in body.items() if value is not None or name not in REFUSED}


def reason_for(where: Sequence[str]) -> str | None:
    """Why a field isn't served; None if it is, or if nobody knows it."""
    return REFUSED.get(where[0]) if where else None
