"""Common parts of response bodies, error bodies, and the responses of routes as documented in `/openapi.json`."""

from __future__ import annotations

from types import UnionType
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

ERRORS_OF_ALL = (400, 403)
"""Error statuses of every route, caused by a request's headers."""
ERRORS_OF_READS = (401, 500)
"""Error statuses of routes that only read."""
WITH_BODY = (400, 401, 404, 408, 413, 415, 500, 503)
"""Error statuses of routes that take a body."""

_DESCRIPTIONS = {
    400: "a field or a header is wrong, unknown or not supported, or the context is too small",
    401: "the key is missing or wrong",
    403: "the Host header isn't one of the server's names",
    404: "no such model",
    408: "the client paused too long while sending the body",
    413: "the body is too large",
    415: "the body is not JSON, or its encoding is not gzip",
    429: "too many requests are waiting: try again after Retry-After seconds",
    500: "the server failed",
    503: "the model is being loaded, or the server is going down",
    504: "the request took longer than this server allows",
}


class ResponseModel(BaseModel):
    """A response body or a part of one. Bodies are written as plain JSON; these models document and test them."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ErrorDetail(ResponseModel):
    """The error: a message for people, a type and a code for programs, and the field it is about."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(ResponseModel):
    """The body of every response whose status is an error."""

    error: ErrorDetail


class PromptTokensDetails(ResponseModel):
    """How many of the prompt tokens came from the cache."""

    cached_tokens: int = Field(description="prompt tokens found in the prefix cache, which were not computed again")


class SpeculationUsage(ResponseModel):
    """Extension of usage: what speculation did for this request, all choices pooled (docs/metrics.md)."""

    target_passes: int
    accept_length: float = Field(description="tokens per target pass")
    acceptance_rate: float = Field(description="accepted draft tokens / draft tokens on the offered depth")
    accepted_by_position: list[float]
    accepted_histogram: list[int] = Field(description="[i] = rounds that accepted exactly i draft tokens")
    accept_length_by_context: dict[str, float] = Field(description="range of tokens before a round -> accept length")
    rounds_by_context: list[int] = Field(description="[i] = rounds in the i-th range: 0-1k, 1-2k, 2-4k, 4-8k, ...")
    prefill_seconds: float
    decode_seconds: float
    draft_seconds: float = Field(description="the drafter's part of decode_seconds")
    tokens_per_second: float
    lossy: bool = Field(default=False, description="the server's rule of acceptance may have changed the answer")


class ChoiceUsage(ResponseModel):
    """Tokens of one choice and its prompt so far, in the chunks of a stream with `continuous_usage_stats`."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CompletionTokensDetails(ResponseModel):
    """What the completion tokens were used for, and what became of the request's prediction."""

    reasoning_tokens: int = Field(description="tokens of the model's thought, its marks included")
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int = Field(description="verified and rejected; none of them is part of the answer")


class Usage(ChoiceUsage):
    """Tokens read and generated for a request."""

    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
    eyas: SpeculationUsage


class EyasResponse(ResponseModel):
    """Extension of responses: what makes them reproducible."""

    seed: int = Field(description="choice i was sampled with seed + i; send it again for the same answers")


class PromptLogprob(ResponseModel):
    """The log-probability of a token at one position of the prompt, and its rank there (1 = the most probable)."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobList = list[dict[str, PromptLogprob] | None]
"""For each prompt token, its entry and its alternatives' by token id; null for the first token, as in vLLM."""


class ResponseHead(ResponseModel):
    """The fields that every generated response and every chunk of a stream has."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class SpeculationMetrics(ResponseModel):
    """vLLM's speculation metrics, if the server was started with them."""

    speculative_decoding: dict[str, float | int | list[int]]


class FullResponse(ResponseHead):
    """A response that isn't streamed: all choices, their usage and the seed."""

    usage: Usage
    eyas: EyasResponse
    metrics: SpeculationMetrics | None = None


class StreamChunk(ResponseHead):
    """One event of a streamed response; the last event is `[DONE]`."""

    usage: Usage | ChoiceUsage | None = None
    eyas: EyasResponse | None = None
    metrics: SpeculationMetrics | None = None


def error_responses(*statuses: int, body: type[BaseModel] = ErrorBody) -> dict[int | str, dict[str, Any]]:
    """Document the error responses of a route."""
    every = sorted({*ERRORS_OF_ALL, *statuses})
    return {status: {"model": body, "description": _DESCRIPTIONS[status]} for status in every}


def generation_responses(
    full: type[BaseModel] | UnionType,
    chunk: type[BaseModel],
    error: type[BaseModel] = ErrorBody,
    lines: bool = False,
) -> dict[int | str, dict[str, Any]]:
    """Document the responses of a route that generates: a full response, a stream of chunks, or an error.

    `lines`: a chunk is a line of JSON instead of an event.
    """
    if lines:
        line = {"type": "object", "description": f"a {chunk.__name__}; the last line has done: true"}
        success: dict[str, Any] = {"model": full, "content": {"application/x-ndjson": {"itemSchema": line}}}
        return {200: success, **error_responses(*WITH_BODY, 429, 504, body=error)}
    data = {"type": "string", "description": f"the JSON of a {chunk.__name__}; the last event has `[DONE]`"}
    event = {"type": "object", "properties": {"data": data}, "required": ["data"]}
    success = {"model": full, "content": {"text/event-stream": {"itemSchema": event}}}
    return {200: success, **error_responses(*WITH_BODY, 429, 504, body=error)}
