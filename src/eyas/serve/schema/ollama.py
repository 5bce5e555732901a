"""Requests and responses of Ollama's API, and the models of LM Studio's.

A request is a chat or a completion in another form: `as_chat` and `as_completion` convert it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from eyas.serve.schema.chat import MAX_MESSAGES, MAX_TOOLS, ChatCompletionRequest, CompletionRequest
from eyas.serve.schema.messages import RequestFunctionCall, RequestMessage, RequestToolCall, Tool
from eyas.serve.schema.request import TEXT_ONLY, UNLIMITED, Finite, Ignored, Name, RequestModel
from eyas.serve.schema.response import ResponseModel

_DEFAULTS: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
"""Ollama's default samplers."""
_SHARED = frozenset(
    "temperature top_k top_p min_p seed stop presence_penalty frequency_penalty typical_p tfs_z mirostat mirostat_tau "
    "mirostat_eta".split()
)
"""Options that completions have by the same name, or refuse by it."""
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_AT_THE_START = Ignored("it is decided when the server starts")
_NO_TIME = re.compile(r"0+(\.0*)?(ns|us|µs|ms|s|m|h)?")
"""A duration of zero, in seconds or as Go writes it."""


def _whole(value: Any) -> Any:
    """A number that JavaScript or Go may have written as 40.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _refused(why: str) -> BeforeValidator:
    """Make a validator that refuses every value that isn't empty."""

    def check(value: Any) -> Any:
        if value:
            raise ValueError(why)
        return value

    return BeforeValidator(check)


_NO_IMAGES = _refused(f"images {TEXT_ONLY}")
Whole = Annotated[int, BeforeValidator(_whole), Field(ge=-(2**31), lt=2**31)]


class OllamaOptions(RequestModel, extra="allow"):
    """Options by Ollama's names; others, such as `temperature`, are those of a completion, or unknown and ignored."""

    num_predict: Whole = Field(default=UNLIMITED, description="0 or less = the rest of the context")
    num_ctx: Whole | None = Field(default=None, description="changes nothing, because the context is fixed")
    repeat_penalty: Annotated[Finite, Field(gt=0, le=10)] = 1.0
    repeat_last_n: Whole = Field(default=UNLIMITED, description="0 = no penalties; else they cover the whole text")
    penalize_newline: Annotated[Any, Ignored("penalties cover all tokens")] = None
    num_keep: Annotated[Any, Ignored("the context isn't shifted")] = None
    draft_num_predict: Annotated[Any, Ignored("the drafter was set up when the server started")] = None
    num_batch: Annotated[Any, _AT_THE_START] = None
    num_gpu: Annotated[Any, _AT_THE_START] = None
    main_gpu: Annotated[Any, _AT_THE_START] = None
    num_thread: Annotated[Any, _AT_THE_START] = None
    numa: Annotated[Any, _AT_THE_START] = None
    low_vram: Annotated[Any, _AT_THE_START] = None
    f16_kv: Annotated[Any, _AT_THE_START] = None
    use_mmap: Annotated[Any, _AT_THE_START] = None
    use_mlock: Annotated[Any, _AT_THE_START] = None

    def sampling(self) -> dict[str, Any]:
        """The options as fields of a chat or completion."""
        given = {name: _whole(value) for name, value in (self.model_extra or {}).items() if name in _SHARED}
        given = {**_DEFAULTS, "repetition_penalty": self.repeat_penalty, **given}
        if self.repeat_last_n == 0:  # turns penalties off, as in llama.cpp
            given = {name: value for name, value in given.items() if name not in _PENALTIES}
        return given | {"max_tokens": self.num_predict if self.num_predict > 0 else UNLIMITED}

    def notes(self) -> Iterator[tuple[str, str]]:
        """What has less effect than in Ollama, besides fields that are always ignored."""
        if self.num_ctx is not None:
            yield "options.num_ctx", "the context is always as long as the server was started with"
        if self.repeat_last_n not in (0, UNLIMITED):
            yield "options.repeat_last_n", "penalties cover the whole text"
        unknown = sorted((self.model_extra or {}).keys() - _SHARED)
        if unknown:  # one note for all: clients can make up as many names as they like
            yield "options", f"some are unknown: {', '.join(map(repr, unknown))[:200]}"


class OllamaFunctionCall(RequestFunctionCall):
    """The function that an earlier assistant message called; arguments are an object."""

    index: Annotated[Any, Ignored("calls are in order")] = None


class OllamaToolCall(RequestToolCall):
    """A tool call of an earlier assistant message."""

    function: OllamaFunctionCall


class OllamaMessage(RequestModel):
    """A message of the chat so far."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    images: Annotated[list[Any] | None, _NO_IMAGES] = None
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = Field(default=None, description="the tool that a message of the role tool comes from")
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _fields_fit_the_role(self) -> OllamaMessage:
        self.as_message()
        return self

    def as_message(self) -> RequestMessage:
        """The message in the chat API's form."""
        return RequestMessage(
            role=self.role,
            content=None if self.tool_calls and not self.content else self.content,
            reasoning_content=self.thinking or None,
            tool_calls=list(self.tool_calls or ()) or None,
            name=self.tool_name or None,
            tool_call_id=self.tool_call_id,
        )


def _json_or_schema(value: Any) -> Any:
    if value not in ("", "json") and not isinstance(value, dict):
        raise ValueError('it may be "json" or a JSON schema')
    return value


class OllamaRequest(RequestModel):
    """What Ollama's two generating routes share."""

    model: Name
    stream: bool = Field(default=True, description="true: one line of JSON for each piece")
    options: OllamaOptions = Field(default_factory=OllamaOptions)
    format: Annotated[Literal["", "json"] | dict[str, Any] | None, BeforeValidator(_json_or_schema)] = Field(
        default=None, description='"json", or a JSON schema'
    )
    think: bool | Literal["low", "medium", "high"] | None = Field(
        default=None, description="for the chat template, if it reads enable_thinking or reasoning_effort"
    )
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    keep_alive: Annotated[Any, Ignored("the model stays loaded")] = None
    truncate: Annotated[Any, Ignored("prompts are never shortened")] = None
    shift: Annotated[Any, Ignored("the context isn't shifted")] = None

    @property
    def unloads(self) -> bool:
        """Whether `keep_alive` is zero, which asks to unload the model."""
        return isinstance(self.keep_alive, str | int | float) and bool(_NO_TIME.fullmatch(str(self.keep_alive)))

    def _fields(self, served: str) -> dict[str, Any]:
        """What chats and completions share."""
        fields: dict[str, Any] = {"model": served, "stream": self.stream, **self.options.sampling()}
        if self.format:
            fields["structured_outputs"] = {"json_object": True} if self.format == "json" else {"json": self.format}
        return fields

    def _chat(
        self, served: str, messages: Sequence[RequestMessage], tools: list[Tool] | None = None
    ) -> ChatCompletionRequest:
        """The same request for the chat API; an assistant message at the end is the beginning of the answer."""
        begun = messages[-1].role == "assistant" and not messages[-1].tool_calls
        return ChatCompletionRequest.model_validate(
            {
                **self._fields(served),
                "messages": list(messages),
                "tools": tools or None,
                "add_generation_prompt": False if begun else None,
                "continue_final_message": begun or None,
                "enable_thinking": None if self.think is None else bool(self.think),
                "reasoning_effort": self.think if isinstance(self.think, str) else None,
                "logprobs": self.logprobs or self.top_logprobs > 0,
                "top_logprobs": self.top_logprobs,
            }
        )


class OllamaChatRequest(OllamaRequest):
    """`POST /api/chat`: a chat to answer; without messages, nothing but whether the model is loaded."""

    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES)] = Field(default_factory=list)
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None

    def as_chat(self, served: str) -> ChatCompletionRequest:
        """The same request for the chat API."""
        return self._chat(served, [message.as_message() for message in self.messages], self.tools)


class OllamaGenerateRequest(OllamaRequest):
    """`POST /api/generate`: a question, a gap to fill before `suffix`, or with `raw` a text to continue."""

    prompt: str = ""
    suffix: str = Field(default="", description="what follows: the answer fills the gap before it")
    system: str = ""
    raw: bool = Field(default=False, description="continue the prompt as it is, without the chat template")
    images: Annotated[list[Any] | None, _NO_IMAGES] = None
    template: Annotated[
        str | None, _refused("the model's own is used; raw: true continues a prompt that needs none")
    ] = None
    context: Annotated[list[Any] | None, _refused("no state is kept: send the whole chat to /api/chat")] = None

    @model_validator(mode="after")
    def _only_chats_have_a_system_message(self) -> OllamaGenerateRequest:
        if self.system and (self.raw or self.suffix):
            raise ValueError("system has no place in a prompt that is continued or has its gap filled: leave it out")
        return self

    def as_chat(self, served: str) -> ChatCompletionRequest:
        """The same request for the chat API."""
        system = [RequestMessage(role="system", content=self.system)] if self.system else []
        return self._chat(served, [*system, RequestMessage(role="user", content=self.prompt)])

    def as_completion(self, served: str) -> CompletionRequest:
        """The same request for the completions API."""
        scores = {"logprobs": self.top_logprobs} if self.logprobs or self.top_logprobs else {}
        return CompletionRequest.model_validate(
            {**self._fields(served), "prompt": self.prompt, "suffix": self.suffix, **scores}
        )


class ShowRequest(RequestModel):
    """`POST /api/show`: the name of a model."""

    model: Name | None = None
    name: Name | None = Field(default=None, description="the older name of model")
    verbose: Annotated[Any, Ignored("the tokenizer's vocabulary isn't shown")] = None

    @model_validator(mode="after")
    def _a_name(self) -> ShowRequest:
        if not (self.model or self.name):
            raise ValueError("model is missing")
        return self


class OllamaErrorBody(ResponseModel):
    """The body of an error response of these routes."""

    error: str


class OllamaVersion(ResponseModel):
    """The version of Ollama whose API this is."""

    version: str


class OllamaDetails(ResponseModel):
    """What kind of model it is."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(ResponseModel):
    """A model name that requests may use."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaTags(ResponseModel):
    """All model names that requests may use."""

    models: list[OllamaModel]


class RunningOllamaModel(OllamaModel):
    """The same, with where it runs."""

    expires_at: str
    size_vram: int
    context_length: int = Field(description="0 = unlimited")


class OllamaRunning(ResponseModel):
    """All model names again: the model is always loaded."""

    models: list[RunningOllamaModel]


class OllamaShow(ResponseModel):
    """What is known about the model."""

    modelfile: str
    parameters: str
    template: str = Field(description="the chat template; before it, where the model fills gaps, how")
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaLine(ResponseModel):
    """What every line of an answer has; the last one says how long it took, in nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load", "unload"] | None = None
    logprobs: list[dict[str, Any]] | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None


class OllamaAnswerMessage(ResponseModel):
    """What a line adds to the answer; calls are complete, their arguments an object."""

    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class OllamaChatLine(OllamaLine):
    """A piece of an answer to a chat, or all of it."""

    message: OllamaAnswerMessage


class OllamaGenerateLine(OllamaLine):
    """A piece of a text, or all of it."""

    response: str
    thinking: str | None = None


class LMStudioModel(ResponseModel):
    """A model name that requests may use, as LM Studio describes it."""

    id: str
    object: Literal["model"] = "model"
    type: Literal["llm"] = "llm"
    publisher: str
    arch: str
    compatibility_type: Literal["gguf"] = "gguf"
    quantization: str
    state: Literal["loaded"] = "loaded"
    max_context_length: int | None
    loaded_context_length: int | None
    capabilities: list[str]


class LMStudioModels(ResponseModel):
    """All model names that requests may use."""

    object: Literal["list"] = "list"
    data: list[LMStudioModel]
