"""Fields that chats and completions share: how tokens are chosen, how many, and where to stop."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from eyas.serve.api.schema.base import Asked, AskedAtTop, EyasOptions, Finite, StreamOptions, TokenId

MOST_STOPS = 16
MOST_BIASES = 1024
StopString = Annotated[str, StringConstraints(min_length=1, max_length=256)]
BiasKey = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[Finite, Field(ge=-100, le=100)]
Name = Annotated[str, StringConstraints(max_length=256)]


class StructuredOutputs(Asked):
    """vLLM's way of saying what an answer must look like; at most one of them."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json", description="a JSON schema")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = Field(default=None, description="Lark, in llguidance's dialect")


class SamplingFields(AskedAtTop):
    """The common part of a request. Defaults are OpenAI's: temperature 1, everything else off."""

    model: Name
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MOST_STOPS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = None
    ignore_eos: bool | None = None

    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    temperature: Annotated[Finite, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31, description="0 or -1 = off")] | None = None
    min_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Finite, Field(gt=0, le=10)] | None = None
    logit_bias: Annotated[dict[BiasKey, Bias], Field(max_length=MOST_BIASES)] | None = None

    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    user: Name | None = Field(default=None, description="requests of one user queue behind each other")
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    metadata: Annotated[dict[str, str], Field(max_length=0)] | None = None
    eyas: EyasOptions | None = None

    @model_validator(mode="after")
    def _streams_if_it_says_how(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def options(self) -> EyasOptions:
        """The extension, or its defaults."""
        return self.eyas or EyasOptions()

    @property
    def wants_usage(self) -> bool:
        """Shall a stream end with the usage?"""
        return self.stream_options is not None and bool(self.stream_options.include_usage)
