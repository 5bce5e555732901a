"""Text completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from eyas.serve.api.schema.base import Chunk, TokenIds, Told, Whole
from eyas.serve.api.schema.sampling import SamplingFields

MOST_PROMPTS = 128
Prompts = Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS)]
TokenPrompt = Annotated[TokenIds, Field(min_length=1)]
TokenPrompts = Annotated[list[TokenPrompt], Field(min_length=1, max_length=MOST_PROMPTS)]


class CompletionRequest(SamplingFields):
    """`POST /v1/completions`."""

    prompt: str | Prompts | TokenPrompt | TokenPrompts
    echo: bool | None = Field(default=None, description="put the prompt before the answer; not with logprobs")
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise ValueError("echo with logprobs is not supported: prompt tokens have no log-probabilities here")
        return self

    @property
    def prompts(self) -> list[str | tuple[int, ...]]:
        """Each prompt as text or token ids."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if isinstance(given[0], int):
            return [tuple(given)]
        return [each if isinstance(each, str) else tuple(each) for each in given]


class CompletionLogprobs(Told):
    """Parallel lists, one entry a token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(Told):
    """One answer."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    eyas: dict[str, Any] | None = None


class Completion(Whole):
    """The answers to all prompts: prompt p's choice j has index p * n + j."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class CompletionChunkChoice(Told):
    """A piece of one answer."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None
    eyas: dict[str, Any] | None = None


class CompletionChunk(Chunk):
    """One event of a stream; the last is `[DONE]`."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChunkChoice]
