"""Chat completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from pydantic.json_schema import SkipJsonSchema

from eyas.serve.api.schema.base import Asked, Chunk, Told, Whole
from eyas.serve.api.schema.messages import AskedMessage, NamedTool, ToldMessage, Tool
from eyas.serve.api.schema.sampling import Name, SamplingFields

MOST_MESSAGES = 4096
MOST_TOOLS = 128


class JsonSchema(Asked):
    """A schema that the answer must satisfy."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextFormat(Asked):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Asked):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Asked):
    """JSON of one shape."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]
ToolChoice = Literal["none", "auto", "required"] | NamedTool


class ChatRequest(SamplingFields):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[AskedMessage], Field(min_length=1, max_length=MOST_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="what the chat template reads")
    modalities: Annotated[list[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    safety_identifier: Name | None = Field(default=None, description="as user")

    @model_validator(mode="after")
    def _fits_together(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_tokens and max_completion_tokens are the same: send one of them")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ValueError("tool_choice needs tools")
        return self


class TopLogprob(Told):
    """A token and what the model thought of it."""

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    """An emitted token and its most likely alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Told):
    """Of the tokens of an answer's content."""

    content: list[TokenLogprob] | None
    refusal: None = None


FinishReason = Literal["stop", "length", "tool_calls"]


class ChatChoice(Told):
    """One answer."""

    index: int
    message: ToldMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    eyas: dict[str, Any] | SkipJsonSchema[None] = None


class ChatCompletion(Whole):
    """The answers to a chat."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    service_tier: Literal["default"] | None = None


class ToolCallFunctionDelta(Told):
    """The name comes first, then the arguments in pieces."""

    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(Told):
    """A piece of a call."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: ToolCallFunctionDelta


class ChatDelta(Told):
    """What a chunk adds to an answer."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(Told):
    """A piece of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None
    eyas: dict[str, Any] | None = None


class ChatChunk(Chunk):
    """One event of a stream; the last is `[DONE]`."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]
