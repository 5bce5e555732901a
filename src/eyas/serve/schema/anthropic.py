"""Messages, response and events of `POST /v1/messages` and its `count_tokens`: Anthropic's Messages API.

A request is a chat in another form: `MessagesRequest.as_chat` converts it, and it is answered as a chat.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, model_validator

from eyas.serve.schema.chat import MAX_MESSAGES, MAX_TOOLS, ChatCompletionRequest, JsonSchema, JsonSchemaFormat
from eyas.serve.schema.messages import (
    FunctionDefinition,
    NamedFunction,
    NamedToolChoice,
    RequestFunctionCall,
    RequestMessage,
    RequestToolCall,
    Tool,
    ToolName,
)
from eyas.serve.schema.request import (
    MAX_STOPS,
    CacheMarks,
    EyasOptions,
    Finite,
    Ignored,
    IgnoredFields,
    Name,
    RequestModel,
    Seed,
    StopString,
    TokenLimit,
    TopP,
    only_kinds,
)
from eyas.serve.schema.response import EyasResponse, ResponseModel, SpeculationUsage

_BLOCKS = {
    "text": ("system", "user", "assistant"),
    "tool_result": ("user",),
    "tool_use": ("assistant",),
    "thinking": ("assistant",),
    "redacted_thinking": ("assistant",),
}
"""Types of content blocks -> the roles whose messages may have them."""
_TEXT_ONLY = dict.fromkeys(("image", "document", "search_result", "container_upload"), "eyas serves text")
_SENT_BACK = Ignored("it came with an earlier answer, and the model doesn't see it")
ELSEWHERE = Ignored("it concerns Anthropic's own service")
DROPPED = Ignored("thinking that is encrypted elsewhere can't be shown to the model")


_SEND = f"send {', '.join(_BLOCKS)}"
_CHECKED = only_kinds(_BLOCKS, "blocks", lambda kind: f"are not supported: {_TEXT_ONLY.get(kind, _SEND)}")


class AnthropicText(CacheMarks):
    """A block of text."""

    type: Literal["text"]
    text: str
    citations: Annotated[Any, Ignored("the model doesn't see them")] = None


class ThinkingBlock(RequestModel):
    """The thinking of an earlier answer, which the chat template shows to the model or not."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(RequestModel):
    """The thinking of an earlier answer, encrypted."""

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
    content: Annotated[str | list[AnthropicText] | None, _CHECKED] = None
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
    content: Annotated[str | list[Block], _CHECKED]
    id: Annotated[Any, _SENT_BACK] = None
    type: Annotated[Any, _SENT_BACK] = None
    model: Annotated[Any, _SENT_BACK] = None
    stop_reason: Annotated[Any, _SENT_BACK] = None
    stop_sequence: Annotated[Any, _SENT_BACK] = None
    usage: Annotated[Any, _SENT_BACK] = None
    container: Annotated[Any, _SENT_BACK] = None

    @model_validator(mode="after")
    def _blocks_fit_the_role(self) -> AnthropicMessage:
        for block in self.content if isinstance(self.content, list) else ():
            if self.role not in _BLOCKS[block.type]:
                raise ValueError(f"{block.type} belongs to the {_BLOCKS[block.type][0]}, not to the {self.role}")
        return self

    def as_messages(self) -> Iterator[RequestMessage]:
        """Yield this message as messages of the chat API: tool results become messages of their own."""
        text = thought = ""
        calls: list[RequestToolCall] = []
        for block in [AnthropicText(type="text", text=self.content)] if isinstance(self.content, str) else self.content:
            if isinstance(block, AnthropicText):
                text += block.text
            elif isinstance(block, ThinkingBlock):
                thought += block.thinking
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
            yield RequestMessage(
                role=self.role,
                content=None if calls and not text else text,
                reasoning_content=thought or None,
                tool_calls=calls or None,
            )


def joined_text(content: str | list[AnthropicText] | None) -> str:
    """The text of a message or a block."""
    return content if isinstance(content, str) else "".join(block.text for block in content or ())


_LONGEST_USER = 256


_OWN_TOOLS = only_kinds(
    ("custom",), "tools", lambda _: "run at Anthropic: define one of your own, with an input_schema"
)


class AnthropicTool(CacheMarks):
    """A tool defined by the client; Anthropic's own tools are not served."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    eager_input_streaming: Annotated[Any, Ignored("inputs are streamed as they are written")] = None
    input_examples: Annotated[Any, Ignored("chat templates have no place for them")] = None
    defer_loading: Annotated[Any, Ignored("there is no tool search: every tool is shown")] = None
    allowed_callers: Annotated[Any, ELSEWHERE] = None

    def as_tool(self) -> Tool:
        """The tool in the chat API's form."""
        function = FunctionDefinition(
            name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict
        )
        return Tool(type="function", function=function)


class AnthropicToolChoice(RequestModel):
    """Whether tools may, must or must not be called, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _a_name_for_a_tool(self) -> AnthropicToolChoice:
        if (self.name is not None) != (self.type == "tool"):
            raise ValueError("tool_choice must have a name if its type is tool, and only then")
        return self

    def as_choice(self) -> Literal["none", "auto", "required"] | NamedToolChoice:
        """The choice in the chat API's form."""
        if self.name is not None:
            return NamedToolChoice(type="function", function=NamedFunction(name=self.name))
        return "required" if self.type == "any" else "none" if self.type == "none" else "auto"


class Thinking(RequestModel):
    """Whether the model should think, if its chat template has a setting for it (`enable_thinking`)."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: Annotated[Any, Ignored("thoughts are only limited by max_tokens")] = None
    display: Literal["summarized", "omitted"] | None = Field(
        default=None, description="omitted: leave thoughts out of the answer; they are never summarized"
    )


class OutputFormat(RequestModel):
    """A JSON schema that the answer satisfies."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestModel):
    """The form of the answer, and the effort if the chat template reads it (`reasoning_effort`)."""

    effort: Name | None = None
    format: OutputFormat | None = None
    task_budget: Annotated[Any, ELSEWHERE] = None


class ThinkingEdit(RequestModel):
    """Which earlier thinking to remove; here, the chat template decides."""

    type: Literal["clear_thinking_20251015"]
    keep: Annotated[Any, Ignored("the chat template decides which earlier thinking it shows")] = None


class ContextEdits(RequestModel):
    """What to remove from the conversation before the model reads it; only thinking can be removed."""

    edits: list[ThinkingEdit] | None = None


class RequestMetadata(RequestModel):
    """The user who sends the request."""

    user_id: Annotated[str, Field(max_length=4 * _LONGEST_USER)] | None = Field(
        default=None, description="requests of one user queue behind each other; users share slots fairly"
    )


class AnthropicConversation(IgnoredFields):
    """The part of a request that the model reads before its answer begins."""

    model: Name
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Annotated[str | list[AnthropicText], _CHECKED] | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS), _OWN_TOOLS] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextEdits | None = None
    metadata: RequestMetadata | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="variables for the chat template")
    anthropic_beta: Annotated[Any, ELSEWHERE] = None
    anthropic_version: Annotated[Any, ELSEWHERE] = None
    betas: Annotated[Any, ELSEWHERE] = None
    diagnostics: Annotated[Any, ELSEWHERE] = None
    inference_geo: Annotated[Any, ELSEWHERE] = None
    speed: Annotated[Any, ELSEWHERE] = None
    user_profile_id: Annotated[Any, ELSEWHERE] = None
    workspace_id: Annotated[Any, ELSEWHERE] = None

    @model_validator(mode="after")
    def _a_choice_needs_tools(self) -> AnthropicConversation:
        if self.tool_choice is not None and self.tool_choice.type in ("any", "tool") and not self.tools:
            raise ValueError("tool_choice needs tools")
        return self

    def as_chat(self, **further: Any) -> ChatCompletionRequest:
        """The same request for the chat API; an assistant message at the end is the beginning of the answer."""
        system = [] if self.system is None else [RequestMessage(role="system", content=joined_text(self.system))]
        messages = [*system, *(each for message in self.messages for each in message.as_messages())]
        begun = messages[-1].role == "assistant" and not messages[-1].tool_calls
        output = self.output_config or OutputConfig()
        choice = self.tool_choice
        schema = JsonSchema(name="answer", schema=output.format.schema_) if output.format else None
        return ChatCompletionRequest(
            model=self.model,
            messages=messages,
            add_generation_prompt=False if begun else None,
            continue_final_message=begun or None,
            tools=[tool.as_tool() for tool in self.tools or ()] or None,
            tool_choice=None if choice is None else choice.as_choice(),
            parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
            response_format=None if schema is None else JsonSchemaFormat(type="json_schema", json_schema=schema),
            reasoning_effort=output.effort,
            enable_thinking=None if self.thinking is None else self.thinking.type != "disabled",
            include_reasoning=None if self.thinking is None else self.thinking.display != "omitted",
            chat_template_kwargs=self.chat_template_kwargs,
            **further,
        )


class MessagesRequest(AnthropicConversation):
    """A conversation to answer, with Anthropic's fields plus `seed` and `eyas`."""

    max_tokens: TokenLimit
    """May exceed the rest of the context; an answer that fills it ends with `model_context_window_exceeded`."""
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    temperature: Annotated[Finite, Field(ge=0, le=2)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    top_p: TopP | None = None
    seed: Seed | None = None
    eyas: EyasOptions | None = None

    @model_validator(mode="after")
    def _no_trace(self) -> MessagesRequest:
        if self.eyas is not None and self.eyas.trace:
            raise ValueError("eyas.trace is only served by chat and text completions")
        return self

    def as_chat(self, **further: Any) -> ChatCompletionRequest:
        """The same request for the chat API."""
        user = self.metadata.user_id if self.metadata else None
        sampling = {name: getattr(self, name) for name in ("stream", "temperature", "top_k", "top_p", "seed", "eyas")}
        return super().as_chat(
            max_completion_tokens=self.max_tokens,
            stop=self.stop_sequences,
            user=user and user[:_LONGEST_USER],
            **sampling,
            **further,
        )


class AnswerText(ResponseModel):
    """Text of the answer; there are never citations."""

    type: Literal["text"] = "text"
    text: str
    citations: None = None


class AnswerThinking(ResponseModel):
    """What the model thought before it answered; nothing is signed here."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str


class AnswerToolUse(ResponseModel):
    """A call of the answer; if it was cut off, `input` is the part that was written."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


class MessagesUsage(ResponseModel):
    """Tokens read and generated; the whole prompt is `input_tokens` plus `cache_read_input_tokens`."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    eyas: SpeculationUsage


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


class MessageResponse(ResponseModel):
    """An answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerThinking | AnswerText | AnswerToolUse]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessagesUsage
    eyas: EyasResponse


class MessageEvent(ResponseModel):
    """One event of a streamed answer; its further fields depend on its type, as in Anthropic's API."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: str


class TokenCount(ResponseModel):
    """How many tokens a conversation has, up to where the answer begins."""

    input_tokens: int


class AnthropicErrorDetail(ResponseModel):
    """A type for programs and a message for people."""

    type: str
    message: str


class AnthropicErrorBody(ResponseModel):
    """The body of an error response of these routes."""

    type: Literal["error"] = "error"
    error: AnthropicErrorDetail
    request_id: str
