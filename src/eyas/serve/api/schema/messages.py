"""Messages of a chat, as clients send them and as they get them back."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, model_validator

from eyas.serve.api.schema.base import Asked, Told
from eyas.text.chats import FunctionCall, Message, ToolCall

_ALWAYS_NULL = ("annotations", "audio", "function_call", "refusal")  # in messages that clients send back
ToolName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class TextPart(Asked):
    """The only kind of content that is served."""

    type: Literal["text"]
    text: str


class AskedFunctionCall(Asked):
    """A call the assistant made; arguments are text."""

    name: ToolName
    arguments: str


class AskedToolCall(Asked):
    """One call of a tool."""

    id: str
    type: Literal["function"] = "function"
    function: AskedFunctionCall

    def as_call(self) -> ToolCall:
        """For templates: arguments that are an object are one."""
        try:
            parsed = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else self.function.arguments
        return ToolCall(id=self.id, function=FunctionCall(name=self.function.name, arguments=arguments))


class AskedMessage(Asked):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[AskedToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if value is not None or name not in _ALWAYS_NULL}

    @model_validator(mode="after")
    def _says_something(self) -> AskedMessage:
        self.as_message()
        return self

    @property
    def characters(self) -> int:
        """Of its content."""
        content = self.content or ""
        return len(content) if isinstance(content, str) else sum(len(part.text) for part in content)

    def as_message(self) -> Message:
        """The turn as templates know it."""
        content = self.content
        if isinstance(content, list):
            content = "".join(part.text for part in content)
        return Message(
            role=self.role,
            content=content,
            name=self.name,
            reasoning_content=self.reasoning_content,
            tool_calls=tuple(call.as_call() for call in self.tool_calls) if self.tool_calls else None,
            tool_call_id=self.tool_call_id,
        )


class Function(Asked):
    """A function that the assistant may call."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(default=None, description="a JSON schema")
    strict: bool | None = None


class Tool(Asked):
    """A tool that the assistant may use."""

    type: Literal["function"]
    function: Function


class NamedFunction(Asked):
    """A function by its name."""

    name: ToolName


class NamedTool(Asked):
    """This tool and no other."""

    type: Literal["function"]
    function: NamedFunction


class ToldFunctionCall(Told):
    """What to call; arguments are JSON as the model wrote it."""

    name: str
    arguments: str


class ToldToolCall(Told):
    """One call of a tool."""

    id: str
    type: Literal["function"] = "function"
    function: ToldFunctionCall


class ToldMessage(Told):
    """An answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[ToldToolCall] | None = None
