"""Messages of Anthropic's API as clients send them: content blocks, and what they are as messages of a chat."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Tag, model_validator

from eyas.serve.api.schema.messages import RequestFunctionCall, RequestMessage, RequestToolCall, ToolName
from eyas.serve.api.schema.request import CacheMarks, Ignored, RequestModel

_BLOCKS = {
    "text": ("system", "user", "assistant"),
    "tool_result": ("user",),
    "tool_use": ("assistant",),
    "thinking": ("assistant",),
    "redacted_thinking": ("assistant",),
}
"""Types of content blocks -> the roles whose messages may have them."""
_TEXT_ONLY = dict.fromkeys(("image", "document", "search_result", "container_upload"), "eyas serves text")
ELSEWHERE = Ignored("it is about Anthropic's service")
DROPPED = Ignored("earlier thinking is not shown to the model")


def check_blocks(content: Any) -> Any:
    """Name the type of a block that isn't served; left to the union, the error would list what each member expects."""
    for block in content if isinstance(content, list) else ():
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(kind, str) and kind not in _BLOCKS:
            why = _TEXT_ONLY.get(kind, f"send {', '.join(_BLOCKS)}")
            raise ValueError(f"blocks of type {kind[:50]!r} are not supported: {why}")
    return content


class AnthropicText(CacheMarks):
    """A block of text."""

    type: Literal["text"]
    text: str
    citations: Annotated[Any, Ignored("the model doesn't see them")] = None


class ThinkingBlock(RequestModel):
    """What an earlier answer thought."""

    type: Literal["thinking"]
    thinking: Annotated[str, DROPPED]
    signature: str | None = None


class RedactedThinkingBlock(RequestModel):
    """What an earlier answer thought, encrypted."""

    type: Literal["redacted_thinking"]
    data: Annotated[str, DROPPED]


class ToolUseBlock(CacheMarks):
    """A call that the assistant made."""

    type: Literal["tool_use"]
    id: str
    name: ToolName
    input: dict[str, Any]
    caller: Annotated[Any, ELSEWHERE] = None


class ToolResultBlock(CacheMarks):
    """What a called tool returned; only text is served."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[str | list[AnthropicText] | None, BeforeValidator(check_blocks)] = None
    is_error: Annotated[Any, Ignored("the model reads what went wrong in the result's text")] = None


def _kind(block: Any) -> str:
    return str(block.get("type") if isinstance(block, dict) else getattr(block, "type", None))


Block = Annotated[
    Annotated[AnthropicText, Tag("text")]
    | Annotated[ThinkingBlock, Tag("thinking")]
    | Annotated[RedactedThinkingBlock, Tag("redacted_thinking")]
    | Annotated[ToolUseBlock, Tag("tool_use")]
    | Annotated[ToolResultBlock, Tag("tool_result")],
    Discriminator(_kind),
]


class AnthropicMessage(RequestModel):
    """A message of the conversation so far."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[str | list[Block], BeforeValidator(check_blocks)]

    @model_validator(mode="after")
    def _blocks_fit_the_role(self) -> AnthropicMessage:
        for block in self.content if isinstance(self.content, list) else ():
            if self.role not in _BLOCKS[block.type]:
                raise ValueError(f"{block.type} belongs to the {_BLOCKS[block.type][0]}, not to the {self.role}")
        return self

    def as_messages(self) -> Iterator[RequestMessage]:
        """The messages of the chat that this is: the results of tools are messages of their own."""
        text, calls = "", list[RequestToolCall]()
        for block in [AnthropicText(type="text", text=self.content)] if isinstance(self.content, str) else self.content:
            if isinstance(block, AnthropicText):
                text += block.text
            elif isinstance(block, ToolUseBlock):
                arguments = json.dumps(block.input, ensure_ascii=False)
                function = RequestFunctionCall(name=block.name, arguments=arguments)
                calls.append(RequestToolCall(id=block.id, function=function))
            elif isinstance(block, ToolResultBlock):
                if text:
                    yield RequestMessage(role=self.role, content=text)
                    text = ""
                yield RequestMessage(role="tool", content=joined_text(block.content), tool_call_id=block.tool_use_id)
        results = isinstance(self.content, list) and any(isinstance(each, ToolResultBlock) for each in self.content)
        if text or not results:
            yield RequestMessage(role=self.role, content=None if calls and not text else text, tool_calls=calls or None)


def joined_text(content: str | list[AnthropicText] | None) -> str:
    """The text of a message or a block."""
    return content if isinstance(content, str) else "".join(block.text for block in content or ())
