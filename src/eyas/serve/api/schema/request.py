"""What request bodies have in common, and the fields that chat and text completions share.

Bodies are read strictly: an unknown field is an error, and so is text where a number belongs. Fields of OpenAI's API
that are not served are refused with the reason (`NOT_SERVED`), unless they are null, their default.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator

_TEXT_ONLY = "eyas serves text"
_STATELESS = "responses aren't stored: send the earlier items as input"
_TOOLS = "write tools and tool_choice instead"

NOT_SERVED: dict[str, str] = {
    "audio": _TEXT_ONLY,
    "background": "there are no background responses: leave it out or send false",
    "modalities": f'{_TEXT_ONLY}: leave it out or send ["text"]',
    "best_of": "answers aren't ranked: ask for n of them",
    "context_management": "the context isn't shortened here",
    "conversation": _STATELESS,
    "max_tool_calls": "there are no built-in tools",
    "previous_response_id": _STATELESS,
    "reasoning": "the chat template decides, through chat_template_kwargs",
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
    "truncation": "prompts are never shortened: leave it out or send disabled",
    "verbosity": "models here have no such setting",
    "web_search_options": "there is no search: offer one as a tool",
}
"""Fields of OpenAI's API that this server does not serve, and why."""

MOST_STOPS = 16
MOST_BIASES = 1024
MOST_BAD_WORDS = 256

Finite = Annotated[float, Field(allow_inf_nan=False)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
"""Validation stops at the first bad id: a body may hold millions."""
StopString = Annotated[str, StringConstraints(min_length=1, max_length=256)]


def _no_empty_stops(value: Any) -> Any:
    """Say it plainly; left to the union, the error would be that a list is no text."""
    if value == "" or (isinstance(value, list) and "" in value):
        raise ValueError("a stop string has at least one character: leave empty ones out")
    return value


Stop = Annotated[
    StopString | Annotated[list[StopString], Field(max_length=MOST_STOPS)], BeforeValidator(_no_empty_stops)
]
BiasKey = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[Finite, Field(ge=-100, le=100)]


def _only_false(value: Any) -> Any:
    if value is not False:  # 0 equals it, and would pass
        raise ValueError("it may only be false")
    return value


OnlyFalse = Annotated[Literal[False], BeforeValidator(_only_false)]
Name = Annotated[str, StringConstraints(max_length=256)]


def why_not_served(location: Sequence[str | int]) -> str | None:
    """Why the field at a location in the body isn't served; None if it is, or if OpenAI's API doesn't have it."""
    return NOT_SERVED.get(str(location[0])) if location else None


class RequestModel(BaseModel):
    """A request body or a part of one, frozen and read strictly."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class EyasOptions(RequestModel):
    """Extension: how eyas decodes this request."""

    speculate: bool = Field(default=True, description="false decodes this request without draft tokens")
    trace: bool = Field(default=False, description="report what every round drafted and accepted")


class StreamOptions(RequestModel):
    """Options of a streamed response."""

    include_usage: bool | None = Field(default=None, description="end the stream with the usage of all choices")
    continuous_usage_stats: bool | None = Field(
        default=None, description="every chunk has the usage of its choice so far; needs include_usage"
    )

    @model_validator(mode="after")
    def _fields_fit_together(self) -> StreamOptions:
        if self.continuous_usage_stats and not self.include_usage:
            raise ValueError("continuous_usage_stats needs include_usage: true")
        return self


class StructuredOutputs(RequestModel):
    """Constraints on the answer in vLLM's form; at most one of them, and the white space of JSON, may be given."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json", description="a JSON schema")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = Field(default=None, description="a Lark grammar in llguidance's dialect")
    whitespace_pattern: str | None = Field(default=None, description="what may stand between the tokens of JSON")


class SamplingFields(RequestModel):
    """The fields of every request that generates; the defaults are OpenAI's: temperature 1, the rest off."""

    model: Name
    stream: bool | None = None

    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = Field(default=None, description="the text ends with what stopped it")
    skip_special_tokens: bool | None = Field(default=None, description="false: special tokens are part of the text")

    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    temperature: Annotated[Finite, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31, description="0 or -1 = off")] | None = None
    min_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Finite, Field(gt=0, le=10)] | None = None
    logit_bias: Annotated[dict[BiasKey, Bias], Field(max_length=MOST_BIASES)] | None = None
    bad_words: Annotated[list[StopString], Field(max_length=MOST_BAD_WORDS)] | None = Field(
        default=None, description="texts that the answer doesn't contain, as the tokens they are usually written in"
    )

    structured_outputs: StructuredOutputs | None = None

    user: Name | None = Field(
        default=None, description="requests of one user queue behind each other; users share what their client gets"
    )
    store: OnlyFalse | None = None
    service_tier: Literal["auto", "default"] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=0)] | None = None
    eyas: EyasOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls_of_fields_not_served(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if value is not None or name not in NOT_SERVED}

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The field `stop` as a tuple, empty if it is absent."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def options(self) -> EyasOptions:
        """The field `eyas`, or its defaults."""
        return self.eyas or EyasOptions()


class GenerationRequest(SamplingFields):
    """The fields that chat and text completions share."""

    return_token_ids: bool | None = Field(default=None, description="the ids of the prompt and of every choice")
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        default=None, description="log-probabilities of the prompt's tokens, with so many alternatives; not streamed"
    )

    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None

    @model_validator(mode="after")
    def _fields_fit_the_stream(self) -> GenerationRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        if self.prompt_logprobs is not None and self.stream:
            raise ValueError("prompt_logprobs can't be streamed: leave out stream")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that has the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream has the usage of its choice so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)
