"""Common parts of request bodies, and the fields that chat and text completions share.

Bodies are read strictly: an unknown field is an error, and so is text where a number belongs. Fields of other APIs that
would change the answer are refused with the reason (`NOT_SERVED`), unless they are null or have the value in `NEUTRAL`.
Fields that change nothing (`Ignored`) are accepted with any value, and named in the log.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    StringConstraints,
    model_validator,
)
from pydantic.fields import FieldInfo

_TEXT_ONLY = "eyas serves text"
_STATELESS = "responses aren't stored: send the earlier items as input"
_TOOLS = "use tools and tool_choice instead"

_SAMPLER = "this sampler isn't served: leave it out, or send the value that turns it off"
_OFF: dict[str, float | bool] = {
    "dry_multiplier": 0,
    "dynatemp_range": 0,
    "early_stopping": False,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "length_penalty": 1,
    "mirostat": 0,
    "mirostat_mode": 0,
    "tfs_z": 1,
    "top_a": 0,
    "top_n_sigma": -1,
    "typ_p": 1,
    "typical_p": 1,
    "use_beam_search": False,
    "xtc_probability": 0,
}
"""Samplers of llama.cpp, vLLM and others -> the value that turns them off."""

NOT_SERVED: dict[str, str] = {
    "audio": _TEXT_ONLY,
    "background": "there are no background responses: leave it out or send false",
    "modalities": f'{_TEXT_ONLY}: leave it out or send ["text"]',
    "best_of": "answers aren't ranked: request n of them",
    "context_management": "the context isn't shortened here",
    "conversation": _STATELESS,
    "json_schema": "use response_format instead",
    "grammar": "use structured_outputs.grammar, in llguidance's dialect, instead",
    "n_predict": "use max_tokens instead",
    "previous_response_id": _STATELESS,
    "repeat_penalty": "use repetition_penalty, which covers the whole text, instead",
    "suffix": "text completions fill gaps: use /v1/completions or /infill",
    "function_call": _TOOLS,
    "functions": _TOOLS,
    "moderation": "nothing is moderated",
    "compaction": "the context isn't shortened here",
    "container": "there are no containers: offer a tool",
    "fallbacks": "there is one model here",
    "mcp_servers": "the server calls no tools itself: offer them as tools",
    "thread": _STATELESS,
    "truncation": "prompts are never shortened: leave it out or send disabled",
    "web_search_options": "there is no search: offer one as a tool",
    **dict.fromkeys(_OFF, _SAMPLER),
}
"""Fields of OpenAI's and other APIs that would change the answer and are not served, and why."""

NEUTRAL: dict[str, Any] = {
    **_OFF,
    "suffix": "",
    "repeat_penalty": 1,
    "functions": [],
    "function_call": "none",
    "mcp_servers": [],
    "context_management": {},
}
"""Values of these fields that change nothing and are accepted; null is accepted for every field."""
UNLIMITED = -1
"""The length limit that means no limit, as in llama.cpp."""

MAX_STOPS = 16
MAX_BIASES = 1024
MAX_BAD_WORDS = 256


def _no_zero(limit: int) -> int:
    if limit == 0:
        raise ValueError("it must be at least 1, or -1 for no limit")
    return limit


Finite = Annotated[float, Field(allow_inf_nan=False)]
TokenLimit = Annotated[
    int, Field(ge=UNLIMITED, lt=2**31, description="-1 = the rest of the context"), AfterValidator(_no_zero)
]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63, description="-1 = random")]
TopP = Annotated[Finite, Field(ge=0, le=1, description="0 = only the most likely token")]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
"""Validation stops at the first invalid id: a body may hold millions."""
StopString = Annotated[str, StringConstraints(min_length=1, max_length=256)]


def _no_empty_stops(value: Any) -> Any:
    """Raise a clear error; the union's own would say that a list isn't a string."""
    if value == "" or (isinstance(value, list) and "" in value):
        raise ValueError("a stop string has at least one character: leave empty ones out")
    return value


Stop = Annotated[
    StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)], BeforeValidator(_no_empty_stops)
]
BiasKey = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[Finite, Field(ge=-100, le=100)]


def _only_false(value: Any) -> Any:
    if value is not False:  # `!=` would let 0 pass
        raise ValueError("it may only be false")
    return value


OnlyFalse = Annotated[Literal[False], BeforeValidator(_only_false)]
Name = Annotated[str, StringConstraints(max_length=256)]


def _is_off(name: str, value: Any) -> bool:
    """Whether a field that isn't served has its neutral value."""
    return name in NEUTRAL and bool(value == NEUTRAL[name])


def why_not_served(location: Sequence[str | int]) -> str | None:
    """Why the field at a location in the body isn't served; None if it is, or if the field is unknown."""
    return NOT_SERVED.get(str(location[0])) if location else None


@dataclass(frozen=True)
class Ignored:
    """Marks a field that clients send but that changes nothing here, and says why. Any value is accepted."""

    why: str

    def __get_pydantic_json_schema__(self, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Describe the field as ignored in `/openapi.json`."""
        return {**handler(schema), "description": f"accepted and ignored: {self.why}"}


class RequestModel(BaseModel):
    """A request body or a part of one, frozen and read strictly."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, body: Any) -> Any:
        """Drop nulls: clients send them for everything that they leave open, fields of other APIs included."""
        return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """Say in `/openapi.json` that null counts as absent, for every field that may be absent."""
        made = handler(schema)
        null = {"type": "null"}
        whole = handler.resolve_ref_schema(made)
        for name in whole.get("properties", {}).keys() - whole.get("required", ()):
            field = whole["properties"][name]
            about = {key: field.pop(key) for key in ("title", "description", "default") if key in field}
            choices = field.get("anyOf", [field] if field else [])  # an empty schema is anything
            if choices and null not in choices:
                field = {"anyOf": [*choices, null]}
            whole["properties"][name] = field | about
        return made


def ignored_fields(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the paths of a body's fields that were sent but are ignored, without indices, each with the reason."""
    if isinstance(value, list) and value and isinstance(value[0], RequestModel):
        for each in value:
            yield from ignored_fields(each, path)
    if not isinstance(value, RequestModel):
        return
    fields = type(value).model_fields
    for name in sorted(value.model_fields_set & fields.keys()):  # others aren't the model's own
        inside = getattr(value, name)
        field = fields[name]
        here = f"{path}.{name}".removeprefix(".")
        why = _why_ignored(field)
        if why is None:
            yield from ignored_fields(inside, here)
        elif inside is not None:
            yield here, why


def names_ignored(model: type[RequestModel]) -> frozenset[str]:
    """The names of a model's fields that are accepted and ignored."""
    return frozenset(name for name, field in model.model_fields.items() if _why_ignored(field) is not None)


def _why_ignored(field: FieldInfo) -> str | None:
    """Why a field is ignored; None if it isn't."""
    return next((mark.why for mark in field.metadata if isinstance(mark, Ignored)), None)


_PREFIXES = Ignored("shared prefixes are found automatically")
_UNSTORED = Ignored("nothing is stored")
_SLOTS = Ignored("the scheduler assigns slots")
_MEASURED = Ignored("usage.eyas has the counts and times")
_THINKING = Ignored("only chat completions have this choice")
_SWITCHED_OFF = Ignored("the sampler that it belongs to is off")
_NAMED_HERE = Ignored("requests are named by the header X-Request-Id")
_ROUTING = Ignored("there is one model here, and no other provider")
UNPADDED = Ignored("events aren't padded")


def only_kinds(known: Collection[str], things: str, why: Callable[[str], str]) -> BeforeValidator:
    """Make a validator for a list of `things` whose error names the type that isn't served, and why.

    The union's own error would list what each of its members expects.
    """

    def check(value: Any) -> Any:
        for each in value if isinstance(value, list) else ():
            kind = each.get("type") if isinstance(each, dict) else None
            if isinstance(kind, str) and kind not in known:
                raise ValueError(f"{things} of type {kind[:50]!r} {why(kind)}")
        return value

    return BeforeValidator(check)


TEXT_ONLY = f"are not supported: {_TEXT_ONLY}"


class CacheMarks(RequestModel):
    """Marks that agents put into messages and tools to say where a prompt should be cached."""

    cache_control: Annotated[Any, _PREFIXES] = None
    prompt_cache_breakpoint: Annotated[Any, _PREFIXES] = None


class IgnoredFields(CacheMarks):
    """Fields that clients of OpenAI, OpenRouter, llama.cpp and vLLM send and that change nothing here."""

    store: Annotated[Any, _UNSTORED] = None
    metadata: Annotated[Any, _UNSTORED] = None
    client_metadata: Annotated[Any, _UNSTORED] = None
    litellm_metadata: Annotated[Any, _UNSTORED] = None
    id: Annotated[Any, _NAMED_HERE] = None
    request_id: Annotated[Any, _NAMED_HERE] = None
    trace_id: Annotated[Any, _NAMED_HERE] = None
    session_id: Annotated[Any, _UNSTORED] = None
    service_tier: Annotated[Any, Ignored("there is one tier")] = None
    prompt_cache_key: Annotated[Any, _PREFIXES] = None
    prompt_cache_retention: Annotated[Any, _PREFIXES] = None
    prompt_cache_options: Annotated[Any, _PREFIXES] = None
    cache_prompt: Annotated[Any, _PREFIXES] = None
    n_cache_reuse: Annotated[Any, _PREFIXES] = None
    id_slot: Annotated[Any, _SLOTS] = None
    slot_id: Annotated[Any, _SLOTS] = None
    timings_per_token: Annotated[Any, _MEASURED] = None
    return_progress: Annotated[Any, _MEASURED] = None
    usage: Annotated[Any, _MEASURED] = None
    verbosity: Annotated[Any, Ignored("models here have no such setting")] = None
    max_tool_calls: Annotated[Any, Ignored("there are no built-in tools")] = None
    include_reasoning: Annotated[Any, _THINKING] = None
    reasoning_format: Annotated[Any, _THINKING] = None
    keep_alive: Annotated[Any, Ignored("the model stays loaded")] = None
    provider: Annotated[Any, _ROUTING] = None
    route: Annotated[Any, _ROUTING] = None
    models: Annotated[Any, _ROUTING] = None
    transforms: Annotated[Any, Ignored("prompts are never shortened")] = None
    drop_params: Annotated[Any, Ignored("fields that aren't served are refused by name")] = None
    priority: Annotated[Any, Ignored("clients take turns")] = None
    spaces_between_special_tokens: Annotated[Any, Ignored("text is what the tokenizer makes of the tokens")] = None
    mirostat_eta: Annotated[Any, _SWITCHED_OFF] = None
    mirostat_tau: Annotated[Any, _SWITCHED_OFF] = None
    dry_allowed_length: Annotated[Any, _SWITCHED_OFF] = None
    dry_base: Annotated[Any, _SWITCHED_OFF] = None
    dry_penalty_last_n: Annotated[Any, _SWITCHED_OFF] = None
    dry_sequence_breakers: Annotated[Any, _SWITCHED_OFF] = None
    dynatemp_exponent: Annotated[Any, _SWITCHED_OFF] = None
    repeat_last_n: Annotated[Any, _SWITCHED_OFF] = None
    xtc_threshold: Annotated[Any, _SWITCHED_OFF] = None

    @model_validator(mode="before")
    @classmethod
    def _drop_what_is_off_of_fields_not_served(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if name not in NOT_SERVED or not _is_off(name, value)}


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
    include_obfuscation: Annotated[Any, UNPADDED] = None

    @model_validator(mode="after")
    def _fields_fit_together(self) -> StreamOptions:
        if self.continuous_usage_stats and not self.include_usage:
            raise ValueError("continuous_usage_stats needs include_usage: true")
        return self


class StructuredOutputs(RequestModel):
    """Constraints on the answer in vLLM's form: at most one of them, plus the whitespace for JSON."""

    json_: dict[str, Any] | str | None = Field(default=None, alias="json", description="a JSON schema")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = Field(default=None, description="a Lark grammar in llguidance's dialect")
    whitespace_pattern: str | None = Field(default=None, description="regex of what may stand between JSON tokens")


class SamplingFields(IgnoredFields):
    """The fields of every request that generates; the defaults are OpenAI's: temperature 1, the rest off."""

    model: Name | None = Field(default=None, description="may be left out: there is one model")
    stream: bool | None = None

    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = Field(default=None, description="keep what stopped the text at its end")
    skip_special_tokens: bool | None = Field(default=None, description="false: special tokens are part of the text")

    seed: Seed | None = None
    temperature: Annotated[Finite, Field(ge=0, le=2)] | None = None
    top_p: TopP | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31, description="0 or -1 = off")] | None = None
    min_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Finite, Field(gt=0, le=10)] | None = None
    logit_bias: Annotated[dict[BiasKey, Bias], Field(max_length=MAX_BIASES)] | None = None
    bad_words: Annotated[list[StopString], Field(max_length=MAX_BAD_WORDS)] | None = Field(
        default=None, description="texts that the answer must not contain, as their usual tokens"
    )

    structured_outputs: StructuredOutputs | None = None

    user: Name | None = Field(
        default=None, description="requests of one user queue behind each other; users share what their client gets"
    )
    eyas: EyasOptions | None = None

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
    max_tokens: TokenLimit | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        default=None, description="log-probabilities of the prompt's tokens, with this many alternatives; not streamed"
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
    def shows_thoughts(self) -> bool:
        """Whether the answer includes thoughts, where it has them apart from the text."""
        return True

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk that has the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream has the usage of its choice so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)
