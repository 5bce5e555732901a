"""Request, response and events of `POST /v1/responses`: OpenAI's Responses API without state.

A request is a chat in another form: `ResponsesRequest.as_chat` converts it, and it is answered as a chat.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from eyas.serve.schema.chat import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatCompletionRequest,
    ChatTokenLogprob,
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    TextFormat,
)
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
    TEXT_ONLY,
    UNPADDED,
    CacheMarks,
    Ignored,
    IgnoredFields,
    Name,
    OnlyFalse,
    RequestModel,
    SamplingFields,
    TokenLimit,
    only_kinds,
)
from eyas.serve.schema.response import EyasResponse, PromptTokensDetails, ResponseModel, SpeculationUsage

_NO_SUMMARY = Ignored("reasoning items have the whole thought, and no summary")
_FUNCTION = set(FunctionDefinition.model_fields)
ItemStatus = Literal["in_progress", "completed", "incomplete"]
_SENT_BACK = Ignored("it came with an earlier response, and the model doesn't see it")
_ITEMS = ("message", "function_call", "function_call_output", "reasoning")


def _kind(item: Any) -> str:
    """The type of an input item; a message may leave it out."""
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")
    if kind not in _ITEMS:
        raise ValueError(f"items of type {str(kind)[:50]!r} are not supported: send {', '.join(_ITEMS)}")
    return str(kind)


def _check_kinds(items: Any) -> Any:
    for item in items if isinstance(items, list) else ():
        _kind(item)
    return items


class ItemPart(CacheMarks):
    """A part of an item's content. The model sees only the text of earlier answers."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


ItemContent = Annotated[
    str | list[ItemPart], only_kinds(("input_text", "output_text", "text"), "parts", lambda _: TEXT_ONLY)
]


class InputItem(RequestModel):
    """The fields that all input items have. The model doesn't see the ids and statuses of answers sent back."""

    id: str | None = None
    status: ItemStatus | None = None
    created_by: Annotated[Any, _SENT_BACK] = None
    metadata: Annotated[Any, _SENT_BACK] = None


class MessageItem(InputItem):
    """A message of the conversation so far."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: ItemContent
    name: Annotated[Any, _SENT_BACK] = None
    phase: Annotated[Any, _SENT_BACK] = None


class FunctionCallItem(InputItem):
    """A call that the assistant made; arguments are JSON in a string."""

    type: Literal["function_call"]
    call_id: str
    name: ToolName
    arguments: str
    namespace: Annotated[Any, _SENT_BACK] = None
    caller: Annotated[Any, _SENT_BACK] = None


class ReasoningPart(CacheMarks):
    """A part of an earlier thought."""

    type: Literal["reasoning_text"]
    text: str


class ReasoningItem(InputItem):
    """The thought of an earlier response, which the chat template shows to the model or not."""

    type: Literal["reasoning"]
    summary: Annotated[Any, _SENT_BACK] = None
    content: list[ReasoningPart] | None = None
    encrypted_content: Annotated[Any, _SENT_BACK] = None


class FunctionOutputItem(InputItem):
    """What a called function returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: ItemContent


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]
Items = Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES), BeforeValidator(_check_kinds)]


class FunctionTool(CacheMarks):
    """A function that the assistant may call; other types of tools are not served."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = Field(default=None, description="a JSON schema")
    strict: bool | None = None


class FunctionToolChoice(RequestModel):
    """A `tool_choice` that forces a call of one function."""

    type: Literal["function"]
    name: ToolName


class JsonSchemaTextFormat(JsonSchema):
    """A `text.format` that makes the answer JSON of a given schema."""

    type: Literal["json_schema"]


class TextOptions(RequestModel):
    """The form of the answer's text."""

    verbosity: Annotated[Any, Ignored("models here have no such setting")] = None
    format: Annotated[TextFormat | JsonObjectFormat | JsonSchemaTextFormat | None, Field(discriminator="type")] = None


class ResponseStreamOptions(RequestModel):
    """Options of a streamed response; nothing is padded here."""

    include_obfuscation: Annotated[Any, UNPADDED] = None


class Reasoning(RequestModel):
    """How the model should think, if its chat template has a setting for it; nothing is summarized."""

    effort: Name | None = Field(default=None, description="for the chat template, if it reads reasoning_effort")
    summary: Annotated[Any, _NO_SUMMARY] = None
    generate_summary: Annotated[Any, _NO_SUMMARY] = None
    context: Annotated[Any, _NO_SUMMARY] = None


class ResponsesRequest(SamplingFields):
    """A conversation to answer, as items; no response is stored."""

    input: str | Items
    instructions: str | None = Field(default=None, description="becomes the first system message")
    max_output_tokens: TokenLimit | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = Field(
        default=None, description="reasoning items are never encrypted"
    )
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    chat_template_kwargs: dict[str, Any] | None = Field(default=None, description="variables for the chat template")
    safety_identifier: Name | None = Field(default=None, description="used like user")
    reasoning: Reasoning | None = None
    stream_options: ResponseStreamOptions | None = None
    truncation: Literal["disabled"] | None = None
    background: OnlyFalse | None = None

    @model_validator(mode="after")
    def _fields_fit_together(self) -> ResponsesRequest:
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise ValueError("tool_choice needs tools")
        if self.top_logprobs and not self.with_logprobs:
            raise ValueError('top_logprobs needs include: ["message.output_text.logprobs"]')
        if self.options.trace:
            raise ValueError("eyas.trace is only served by chat and text completions")
        if not isinstance(self.input, str) and all(item.type == "reasoning" for item in self.input):
            raise ValueError("input has nothing to answer, only reasoning: send a message too")
        return self

    @property
    def with_logprobs(self) -> bool:
        """Whether the text's log-probabilities are wanted."""
        return "message.output_text.logprobs" in (self.include or ())

    def as_chat(self) -> ChatCompletionRequest:
        """The same request for the chat API."""
        shared = set(SamplingFields.model_fields) - set(IgnoredFields.model_fields)
        shared |= {"parallel_tool_calls", "chat_template_kwargs", "safety_identifier"}
        return ChatCompletionRequest(
            **{name: getattr(self, name) for name in shared},
            messages=self._messages(),
            max_completion_tokens=self.max_output_tokens,
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            logprobs=self.with_logprobs or None,
            top_logprobs=self.top_logprobs if self.with_logprobs else None,
            response_format=self._response_format(),
            tools=[
                Tool(type=tool.type, function=FunctionDefinition(**tool.model_dump(include=_FUNCTION)))
                for tool in self.tools or ()
            ]
            or None,
            tool_choice=NamedToolChoice(type="function", function=NamedFunction(name=self.tool_choice.name))
            if isinstance(self.tool_choice, FunctionToolChoice)
            else self.tool_choice,
        )

    def _messages(self) -> list[RequestMessage]:
        """The messages of the chat; an answer's text and the calls after it become one message, as templates expect."""
        items = [MessageItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input
        messages = [] if self.instructions is None else [RequestMessage(role="system", content=self.instructions)]
        thought: str | None = None  # it belongs to the message or call after it
        for item in items:
            if isinstance(item, ReasoningItem):
                thought = "".join(part.text for part in item.content or ()) or None
                continue
            if isinstance(item, MessageItem):
                own = thought if item.role == "assistant" else None
                messages.append(RequestMessage(role=item.role, content=_text(item.content), reasoning_content=own))
            elif isinstance(item, FunctionOutputItem):
                messages.append(RequestMessage(role="tool", content=_text(item.output), tool_call_id=item.call_id))
            else:
                function = RequestFunctionCall(name=item.name, arguments=item.arguments)
                call = RequestToolCall(id=item.call_id, function=function)
                if not messages or messages[-1].role != "assistant":
                    messages.append(RequestMessage(role="assistant", tool_calls=[call], reasoning_content=thought))
                else:
                    calls = [*(messages[-1].tool_calls or ()), call]
                    messages[-1] = messages[-1].model_copy(update={"tool_calls": calls})
            thought = None
        return messages

    def _response_format(self) -> TextFormat | JsonObjectFormat | JsonSchemaFormat | None:
        wanted = None if self.text is None else self.text.format
        if not isinstance(wanted, JsonSchemaTextFormat):
            return wanted
        schema = JsonSchema(**wanted.model_dump(exclude={"type"}, by_alias=True))
        return JsonSchemaFormat(type="json_schema", json_schema=schema)


def _text(content: str | list[ItemPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class OutputText(ResponseModel):
    """The text of a message; there are never annotations."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: list[Any]
    logprobs: list[ChatTokenLogprob]


class OutputMessage(ResponseModel):
    """A message of the answer."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    status: ItemStatus
    content: list[OutputText]


class OutputCall(ResponseModel):
    """A function call of the answer."""

    id: str
    type: Literal["function_call"] = "function_call"
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


class OutputReasoningPart(ResponseModel):
    """The text of a thought."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class OutputReasoning(ResponseModel):
    """What the model thought before it answered; there is never a summary."""

    id: str
    type: Literal["reasoning"] = "reasoning"
    status: ItemStatus
    summary: list[Any]
    content: list[OutputReasoningPart]


class OutputTokensDetails(ResponseModel):
    """What the output tokens were used for."""

    reasoning_tokens: int


class ResponsesUsage(ResponseModel):
    """Tokens read and generated for a response."""

    input_tokens: int
    input_tokens_details: PromptTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    eyas: SpeculationUsage


class ResponseObject(ResponseModel):
    """A response: its output items, how it ended, and the settings that it was made with."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputReasoning | OutputMessage | OutputCall]
    parallel_tool_calls: bool
    previous_response_id: None
    store: Literal[False]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    background: Literal[False]
    metadata: dict[str, str]
    service_tier: Literal["default"]
    user: str | None
    usage: ResponsesUsage | None
    eyas: EyasResponse


class ResponseEvent(ResponseModel):
    """One event of a streamed response; its further fields depend on its type, as in OpenAI's API."""

    model_config = ConfigDict(extra="allow", frozen=True)

    type: str
    sequence_number: int
