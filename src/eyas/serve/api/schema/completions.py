"""Request and response of `POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from eyas.serve.api.schema.request import GenerationRequest, TokenIds
from eyas.serve.api.schema.response import FullResponse, ResponseModel, StreamChunk

MOST_PROMPTS = 128
Prompts = Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS)]
TokenPrompt = Annotated[TokenIds, Field(min_length=1)]
TokenPrompts = Annotated[list[TokenPrompt], Field(min_length=1, max_length=MOST_PROMPTS)]


class CompletionRequest(GenerationRequest):
    """One prompt or several to continue, with OpenAI's fields and those of vLLM that are served."""

    prompt: str | Prompts | TokenPrompt | TokenPrompts
    echo: bool | None = Field(default=None, description="begin the text with the prompt; not with logprobs")
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _fields_fit_together(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs is not supported: prompt tokens have no log-probabilities here")
        return self

    @property
    def prompts(self) -> list[str | tuple[int, ...]]:
        """The prompts, each as text or as token ids."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if isinstance(given[0], int):
            return [tuple(given)]
        return [each if isinstance(each, str) else tuple(each) for each in given]


class CompletionLogprobs(ResponseModel):
    """Log-probabilities of the generated tokens: parallel lists with an entry for each."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(ResponseModel):
    """One complete continuation of a prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] | None = Field(default=None, description="what was generated, if the model has no tokenizer")
    eyas: dict[str, Any] | None = None


class CompletionResponse(FullResponse):
    """The complete continuations of all prompts: choice j of prompt p has index p * n + j."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class CompletionChunkChoice(ResponseModel):
    """What a chunk adds to the choice that has this index."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None
    token_ids: list[int] | None = Field(default=None, description="what was generated, if the model has no tokenizer")
    eyas: dict[str, Any] | None = None


class CompletionChunk(StreamChunk):
    """One event of a streamed completion."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChunkChoice]
