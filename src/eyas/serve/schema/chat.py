"""Requests and responses of `POST /v1/chat/completions` and `POST /v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic.json_schema import SkipJsonSchema

from eyas.serve.schema.messages import NamedToolChoice, RequestMessage, ResponseMessage, Tool
from eyas.serve.schema.request import (
    UNLIMITED,
    CacheMarks,
    GenerationRequest,
    Ignored,
    Name,
    RequestModel,
    TokenIds,
    TokenLimit,
)
from eyas.serve.schema.response import FullResponse, PromptLogprobList, ResponseModel, StreamChunk

MAX_PROMPTS = 128
Prompts = Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
TokenPrompt = Annotated[TokenIds, Field(min_length=1)]
TokenPrompts = Annotated[list[TokenPrompt], Field(min_length=1, max_length=MAX_PROMPTS)]


Suffix = Annotated[str, BeforeValidator(lambda given: "" if given is False else given)]
"""Some editors send `false` instead of leaving it out."""


class CompletionRequest(GenerationRequest):
    """One or more prompts to continue, with OpenAI's fields and the supported fields of vLLM."""

    prompt: str | Prompts | TokenPrompt | TokenPrompts
    suffix: Suffix | None = Field(default=None, description="what follows: the answer fills the gap before it")
    echo: bool | None = Field(default=None, description="begin the text, and the logprobs, with the prompt")
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Annotated[int, Field(ge=1, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=UNLIMITED, lt=2**31, description="0 = only read the prompt")] | None = None

    @model_validator(mode="after")
    def _fields_fit_together(self) -> CompletionRequest:
        if self.best_of is not None and self.n not in (None, 1):
            raise ValueError("best_of is less than n")
        if self.suffix and self.echo:
            raise ValueError("echo repeats a prompt that is continued, but suffix has a gap filled: send one of them")
        return self

    @property
    def scored_alternatives(self) -> int | None:
        """How many alternatives to report for each prompt token; None = no log-probabilities of the prompt."""
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in wanted if count is not None), default=None)

    @property
    def scores_all(self) -> bool:
        """Whether tokens without text, such as the end token, have log-probabilities too."""
        return bool(self.echo) and self.logprobs is not None

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
    """Log-probabilities of the generated tokens: parallel lists with one entry per token.

    With `echo`, the prompt's tokens come first; the very first one has no log-probability.
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
    """What a chunk adds to the choice with this index."""

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


MAX_MESSAGES = 4096
MAX_TOOLS = 128


class JsonSchema(RequestModel):
    """A named JSON schema that the answer must satisfy."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextFormat(RequestModel):
    """A `response_format` that leaves the answer free."""

    type: Literal["text"]


class JsonObjectFormat(RequestModel):
    """A `response_format` that makes the answer a JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(RequestModel):
    """A `response_format` that makes the answer JSON of a given schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class PredictionPart(CacheMarks):
    """A piece of what the answer is expected to be."""

    type: Literal["text"]
    text: str


class Prediction(RequestModel):
    """What the answer is expected to be in large part, such as the old text of a file to edit."""

    type: Literal["content"]
    content: str | Annotated[list[PredictionPart], Field(max_length=MAX_MESSAGES)]

    @property
    def text(self) -> str:
        """The whole text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]
ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


class ChatCompletionRequest(GenerationRequest):
    """A chat to answer, with OpenAI's fields and the supported fields of vLLM."""

    messages: Annotated[list[RequestMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: TokenLimit | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    prediction: Prediction | None = Field(
        default=None, description="what the answer will repeat: drafts copy from it; it changes no token"
    )
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = Field(default=None, description="false: don't begin an answer")
    continue_final_message: bool | None = Field(
        default=None, description="continue the last message; needs add_generation_prompt: false"
    )
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="variables for the chat template")
    reasoning_effort: Name | None = Field(default=None, description="for the chat template, if it reads it")
    enable_thinking: bool | None = Field(default=None, description="for the chat template, if it reads it")
    reasoning: Annotated[Any, Ignored("send reasoning_effort or chat_template_kwargs")] = None
    include_reasoning: bool | None = Field(default=None, description="false: leave thoughts out of the answer")
    separate_reasoning: bool | None = Field(default=None, description="false: thoughts are part of the text")
    reasoning_format: Literal["auto", "deepseek", "parsed", "none", "raw", "hidden"] | None = Field(
        default=None, description="none and raw: thoughts are part of the text; hidden: they are left out"
    )
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    safety_identifier: Name | None = Field(default=None, description="used like user")

    @model_validator(mode="after")
    def _fields_fit_together(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_tokens and max_completion_tokens mean the same: send one of them")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ValueError("tool_choice needs tools")
        if any(message.continues for message in self.messages[:-1]):
            raise ValueError("prefix and partial are only allowed in the last message")
        if self.continue_final_message and self.add_generation_prompt is not False:
            raise ValueError("continue_final_message needs add_generation_prompt: false")
        return self

    @property
    def continues(self) -> bool:
        """Whether the answer continues the last message."""
        return bool(self.continue_final_message) or self.messages[-1].continues

    @property
    def begun_answer(self) -> str:
        """What the answer continues; empty if it begins by itself."""
        return (self.messages[-1].as_message().content or "") if self.continues else ""

    @property
    def separates_thoughts(self) -> bool:
        """Whether thoughts are no part of the text."""
        return self.reasoning_format not in ("none", "raw") and self.separate_reasoning is not False

    @property
    def shows_thoughts(self) -> bool:
        return self.reasoning_format != "hidden" and self.include_reasoning is not False


class TopLogprob(ResponseModel):
    """A token, its natural log-probability and its UTF-8 bytes."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TopLogprob):
    """A generated token and the most likely tokens in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseModel):
    """Log-probabilities of the tokens of the content."""

    content: list[ChatTokenLogprob] | None
    refusal: None = None


FinishReason = Literal["stop", "length", "tool_calls"]


class ChatChoice(ResponseModel):
    """One complete answer to the chat."""

    index: int
    message: ResponseMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    token_ids: list[int] | None = None
    eyas: dict[str, Any] | SkipJsonSchema[None] = None


class ChatCompletionResponse(FullResponse):
    """The complete answers to a chat: `n` choices."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobList | None = None
    prompt_token_ids: list[int] | None = None
    service_tier: Literal["default"] | None = None


class ToolCallFunctionDelta(ResponseModel):
    """A piece of a function call: first the name, then the arguments as they are generated."""

    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(ResponseModel):
    """A piece of the tool call with this index."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: ToolCallFunctionDelta


class ChatDelta(ResponseModel):
    """What a chunk adds to the assistant's message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(ResponseModel):
    """What a chunk adds to the choice with this index."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None
    token_ids: list[int] | None = None
    eyas: dict[str, Any] | None = None


class ChatCompletionChunk(StreamChunk):
    """One event of a streamed chat completion."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
    prompt_token_ids: list[int] | None = None
