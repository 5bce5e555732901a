"""Requests and responses of llama-server's own routes, as editors send and read them.

Fields that the OpenAI routes have too mean the same; `CompletionRequest` reads those that a completion takes.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field, model_validator

from eyas.serve.schema.chat import ChatCompletionRequest, CompletionRequest, TokenPrompt
from eyas.serve.schema.request import UNLIMITED, Ignored, Name, RequestModel, names_ignored
from eyas.serve.schema.response import ResponseModel

MAX_EXTRA_FILES = 256
"""Several times what editors send: llama.vim keeps 16 chunks."""
_DEFAULTS: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
"""llama-server's default samplers."""
_OFF: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
_GREEDY: dict[str, Any] = {**_OFF, "temperature": 0.0}
_NATIVE = frozenset(
    "prompt input_prefix input_suffix input_extra n_predict samplers n_indent t_max_predict_ms response_fields "
    "return_tokens n_probs".split()
)
"""Fields that a completion doesn't have, or has by another name."""
_UNWRITTEN = {
    "n": "one answer is written: use /v1/completions for several",
    "echo": "only the answer is written: use /v1/completions",
    "logprobs": "send n_probs",
    "prompt_logprobs": "only the answer has log-probabilities: use /v1/completions",
    "return_token_ids": "send return_tokens",
}
"""Fields of a completion that change what its response holds, which these routes don't write, and what to send."""


class ExtraContext(RequestModel):
    """A piece of another file."""

    text: str
    filename: Annotated[str, Field(max_length=4096)] = "tmp"
    time: Annotated[Any, Ignored("all pieces are read in the order in which they come")] = None


class LlamaRequest(RequestModel, extra="allow"):
    """What llama-server's completion routes share; any other field must be one of a completion."""

    model: Name | None = None
    n_predict: Annotated[int, Field(ge=UNLIMITED, lt=2**31)] = UNLIMITED
    samplers: list[str] | None = Field(
        default=None, description="the samplers that count; others are off, and `infill` takes the likeliest tokens"
    )
    n_probs: Annotated[int, Field(ge=0, le=20)] = 0
    n_indent: Annotated[int, Field(ge=0, lt=2**31)] = Field(
        default=0, description="end before a line, but the first, that is indented by fewer characters"
    )
    t_max_predict_ms: Annotated[int, Field(ge=0, lt=2**31)] = Field(
        default=0, description="end after this time, once a line is complete; 0 = no limit"
    )
    t_max_prompt_ms: Annotated[Any, Ignored("a prompt is always read to its end")] = None
    response_fields: list[str] | None = Field(default=None, description="paths such as timings/prompt_n; [] = all")
    return_tokens: bool = False
    lora: Annotated[Any, Ignored("adapters are chosen when the server starts")] = None
    n_keep: Annotated[Any, Ignored("the context isn't shifted")] = None
    n_discard: Annotated[Any, Ignored("the context isn't shifted")] = None
    post_sampling_probs: Annotated[Any, Ignored("log-probabilities are the model's own")] = None

    @model_validator(mode="after")
    def _can_be_written(self) -> LlamaRequest:
        asked = self.model_extra or {}
        for name, instead in _UNWRITTEN.items():
            value = asked.get(name)
            if value is not None and value is not False and not (name == "n" and value == 1):
                raise ValueError(f"{name} isn't supported here: {instead}")
        own = asked.get("eyas")
        if isinstance(own, dict) and own.get("trace"):
            raise ValueError("eyas.trace is only served by chat and text completions")
        return self

    def completion(self, served: str) -> CompletionRequest:
        """The same request with OpenAI's names. Raises ValidationError for fields that no completion has."""
        fields = self.model_dump(exclude_unset=True, exclude={*_NATIVE, *names_ignored(type(self)), "model"})
        chosen = dict(_DEFAULTS)
        if self.samplers is not None and "infill" in self.samplers:
            chosen = dict(_GREEDY)
            fields = {name: value for name, value in fields.items() if name not in _OFF}
        elif self.samplers is not None:
            chosen = {name: _DEFAULTS[name] if name in self.samplers else off for name, off in _OFF.items()}
            fields = {name: value for name, value in fields.items() if name not in _OFF or name in self.samplers}
        if self.n_probs:
            fields["logprobs"] = self.n_probs
        named = {"model": served, "prompt": "", "max_tokens": self.n_predict}
        return CompletionRequest.model_validate({**named, **chosen, **fields})


class LlamaCompletionRequest(LlamaRequest):
    """`POST /completion`: a prompt to continue, as text, token ids, or both in a list."""

    prompt: str | TokenPrompt | Annotated[list[str | int], Field(min_length=1)]


class InfillRequest(LlamaRequest):
    """`POST /infill`: what stands before and after the cursor, and pieces of other files."""

    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[ExtraContext], Field(max_length=MAX_EXTRA_FILES)] = Field(default_factory=list)
    prompt: str = Field(default="", description="how the missing text begins")


class ApplyTemplateRequest(ChatCompletionRequest):
    """`POST /apply-template`: a chat to answer, of which only the prompt is made."""


class ApplyTemplateResponse(ResponseModel):
    """The chat as the model's template writes it."""

    prompt: str


class Timings(ResponseModel):
    """How long reading and writing took."""

    cache_n: int = Field(description="tokens of the prompt that were known from earlier requests")
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int | None = None
    draft_n_accepted: int | None = None


class LlamaCompletion(ResponseModel):
    """The text that was written, and how; the last event of a stream too."""

    index: int
    content: str
    tokens: list[int]
    id_slot: int
    stop: bool
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    completion_probabilities: list[dict[str, Any]] | None = None
    generation_settings: dict[str, Any]
    prompt: str
    has_new_line: bool
    truncated: bool
    stop_type: str
    stopping_word: str
    timings: Timings


def _any_of_them(schema: dict[str, Any]) -> None:
    del schema["required"]
    schema["patternProperties"] = {"^(timings|generation_settings)/": {}}


class LlamaSelection(LlamaCompletion):
    """Those of the fields that `response_fields` names; a part of a field, such as `timings/prompt_n`, by its path."""

    model_config = ConfigDict(json_schema_extra=_any_of_them)


class LlamaChunk(ResponseModel):
    """A piece of the text."""

    index: int
    content: str
    tokens: list[int]
    stop: bool
    id_slot: int
    tokens_predicted: int
    tokens_evaluated: int
