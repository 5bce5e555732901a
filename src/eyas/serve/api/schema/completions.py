"""Request and response of `POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from eyas.serve.api.schema.request import GenerationRequest, TokenIds
from eyas.serve.api.schema.response import FullResponse, PromptLogprobList, ResponseModel, StreamChunk

MOST_PROMPTS = 128
Prompts = Annotated[list[str], Field(min_length=1, max_length=MOST_PROMPTS)]
TokenPrompt = Annotated[TokenIds, Field(min_length=1)]
TokenPrompts = Annotated[list[TokenPrompt], Field(min_length=1, max_length=MOST_PROMPTS)]


class CompletionRequest(GenerationRequest):
    """One prompt or several to continue, with OpenAI's fields and those of vLLM that are served."""

    prompt: str | Prompts | TokenPrompt | TokenPrompts
    echo: bool | None = Field(default=None, description="begin the text, and the logprobs, with the prompt")
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=0, lt=2**31, description="0 = only read the prompt")] | None = None

    @model_validator(mode="after")
    def _fields_fit_together(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise ValueError("max_tokens is 0, which generates nothing: send echo or prompt_logprobs, or at least 1")
        if self.best_of is not None and self.n not in (None, 1):
            raise ValueError("best_of is less than n")
        return self

    @property
    def scored_alternatives(self) -> int | None:
        """How many alternatives are wanted to each token of the prompt; None = no log-probabilities of it."""
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in wanted if count is not None), default=None)

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
    """Log-probabilities of the generated tokens: parallel lists with an entry for each.

    With `echo` the prompt's tokens come first, and the first of them has none.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(ResponseModel):
    """One complete continuation of a prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    prompt_logprobs: PromptLogprobList | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
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
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    eyas: dict[str, Any] | None = None


class CompletionChunk(StreamChunk):
    """One event of a streamed completion."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChunkChoice]
