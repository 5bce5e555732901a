"""Chat messages and tools, as clients send them and as the assistant answers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints, model_validator

from eyas.serve.schema.request import TEXT_ONLY, CacheMarks, Ignored, RequestModel, only_kinds
from eyas.serve.schema.response import ResponseModel
from eyas.text.chats import FunctionCall, Message, ToolCall

ToolName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
_UNSHOWN = Ignored("chat templates have no place for it")
_UNSEEN = Ignored("it came with an earlier answer, and the model doesn't see it")


class TextPart(CacheMarks):
    """A part of a message's content; only text is served."""

    type: Literal["text"]
    text: str
    id: Annotated[Any, _UNSEEN] = None
    annotations: Annotated[Any, _UNSEEN] = None
    citations: Annotated[Any, _UNSEEN] = None
    logprobs: Annotated[Any, _UNSEEN] = None


_PARTS = only_kinds(("text",), "parts", lambda _: TEXT_ONLY)


def _arguments_as_text(value: Any) -> Any:
    """Arguments that are sent as an object, as Ollama does, in OpenAI's form."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value


class RequestFunctionCall(RequestModel):
    """The function that an earlier assistant message called; arguments are JSON in a string."""

    name: ToolName
    arguments: Annotated[str, BeforeValidator(_arguments_as_text)] = "{}"
    parsed_arguments: Annotated[Any, _UNSEEN] = None


class RequestToolCall(CacheMarks):
    """A tool call of an earlier assistant message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: RequestFunctionCall
    index: Annotated[Any, _UNSEEN] = None
    extra_content: Annotated[Any, _UNSEEN] = None
    provider_specific_fields: Annotated[Any, _UNSEEN] = None
    caller: Annotated[Any, _UNSEEN] = None

    def as_call(self) -> ToolCall:
        """The call for chat templates, arguments parsed if they are a JSON object."""
        try:
            parsed = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else self.function.arguments
        return ToolCall(id=self.id, function=FunctionCall(name=self.function.name, arguments=arguments))


class RequestMessage(CacheMarks):
    """A message of the chat so far."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | list[TextPart] | None, _PARTS] = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = Field(default=None, description="vLLM's newer name for reasoning_content")
    prefix: bool | None = Field(default=None, description="true: the answer continues this message, the last one")
    partial: bool | None = Field(default=None, description="as prefix")
    id: Annotated[Any, _UNSEEN] = None
    type: Annotated[Any, _UNSEEN] = None
    status: Annotated[Any, _UNSEEN] = None
    index: Annotated[Any, _UNSEEN] = None
    model: Annotated[Any, _UNSEEN] = None
    metadata: Annotated[Any, _UNSEEN] = None
    timestamp: Annotated[Any, _UNSEEN] = None
    created_at: Annotated[Any, _UNSEEN] = None
    finish_reason: Annotated[Any, _UNSEEN] = None
    usage: Annotated[Any, _UNSEEN] = None
    logprobs: Annotated[Any, _UNSEEN] = None
    parsed: Annotated[Any, _UNSEEN] = None
    refusal: Annotated[Any, _UNSEEN] = None
    annotations: Annotated[Any, _UNSEEN] = None
    citations: Annotated[Any, _UNSEEN] = None
    reasoning_details: Annotated[Any, _UNSEEN] = None
    reasoning_signature: Annotated[Any, _UNSEEN] = None
    thinking_blocks: Annotated[Any, _UNSEEN] = None
    provider_specific_fields: Annotated[Any, _UNSEEN] = None
    tool_calls: list[RequestToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _fields_fit_the_role(self) -> RequestMessage:
        if self.reasoning not in (None, self.reasoning_content) and self.reasoning_content is not None:
            raise ValueError("reasoning and reasoning_content mean the same: send one of them")
        if self.continues and self.role != "assistant":
            raise ValueError("prefix and partial are only allowed in assistant messages")
        self.as_message()
        return self

    @property
    def continues(self) -> bool:
        """Whether the answer is to continue this message."""
        return bool(self.prefix or self.partial)

    @property
    def characters(self) -> int:
        """Characters of everything that the template may show."""
        content = self.content or ""
        parts = [content] if isinstance(content, str) else [part.text for part in content]
        calls = [call.function for call in self.tool_calls or ()]
        parts += [text for call in calls for text in (call.name, call.arguments)]
        return sum(map(len, (*parts, self.name or "", self.reasoning_content or "", self.reasoning or "")))

    def as_message(self) -> Message:
        """The message for chat templates. Raises ValidationError if its fields don't fit its role."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        return Message(
            role=self.role,
            content=content,
            name=self.name,
            reasoning_content=self.reasoning_content if self.reasoning is None else self.reasoning,
            tool_calls=tuple(call.as_call() for call in self.tool_calls) if self.tool_calls else None,
            tool_call_id=self.tool_call_id,
        )


class FunctionDefinition(RequestModel):
    """A function that the assistant may call."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(default=None, description="a JSON schema")
    strict: bool | None = None
    annotations: Annotated[Any, _UNSHOWN] = None
    metadata: Annotated[Any, _UNSHOWN] = None
    examples: Annotated[Any, _UNSHOWN] = None
    input_examples: Annotated[Any, _UNSHOWN] = None
    output_schema: Annotated[Any, _UNSHOWN] = None
    defer_loading: Annotated[Any, _UNSHOWN] = None
    cache_control: Annotated[Any, _UNSHOWN] = None


class Tool(CacheMarks):
    """A tool that the assistant may call; only functions are served."""

    type: Literal["function"]
    function: FunctionDefinition
    id: Annotated[Any, _UNSHOWN] = None
    strict: Annotated[Any, _UNSHOWN] = None
    metadata: Annotated[Any, _UNSHOWN] = None
    defer_loading: Annotated[Any, _UNSHOWN] = None


def tool_schemas(tools: Sequence[Tool] | None) -> list[dict[str, Any]]:
    """The tools as chat templates expect them."""
    shown: dict[str, bool | set[str]] = {"type": True, "function": {"name", "description", "parameters", "strict"}}
    return [tool.model_dump(mode="json", exclude_none=True, include=shown) for tool in tools or ()]


class NamedFunction(RequestModel):
    """The name of one of the functions in `tools`."""

    name: ToolName


class NamedToolChoice(RequestModel):
    """A `tool_choice` that forces a call of one function."""

    type: Literal["function"]
    function: NamedFunction


class ResponseFunctionCall(ResponseModel):
    """The called function; arguments are JSON in a string, as the model wrote it."""

    name: str
    arguments: str


class ResponseToolCall(ResponseModel):
    """A tool call that the assistant makes."""

    id: str
    type: Literal["function"] = "function"
    function: ResponseFunctionCall


class ResponseMessage(ResponseModel):
    """The assistant's message; `content` is null if it only calls tools."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    reasoning_content: str | None = Field(default=None, description="what the model thought before it answered")
    reasoning: str | None = Field(default=None, description="the same, by vLLM's newer name")
    refusal: None = None
    tool_calls: list[ResponseToolCall] | None = None
