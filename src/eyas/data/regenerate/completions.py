"""OpenAI chat completions: converts questions into request bodies, and response bodies into answers."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eyas.config import StrictModel
from eyas.data.regenerate.entries import Answer, Question
from eyas.text.chats import FunctionCall, Message, ToolCall
from eyas.types import SamplingParams

_DEFAULTS = SamplingParams()


class GarbageError(Exception):
    """A response that is not a chat completion. Answerers handle it: they retry, or give up the chat."""


class CompletionSettings(StrictModel):
    """The model, sampling and other request fields that are the same for all questions."""

    model: str
    sampling: SamplingParams
    keep_reasoning: bool = True
    tool_choice: str | None = None
    """`auto`, `none` or `required`; sent with chats that have tools."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Fields merged into every request body, overriding others; null removes a field."""

    def body(self, question: Question) -> dict[str, Any]:
        """The JSON body of the request for a question."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [as_sent(message) for message in question.messages],
            **sampling_fields(self.sampling, question.seed(self.sampling.seed)),
        }
        if question.tools:
            body["tools"] = list(question.tools)
            if self.tool_choice is not None:
                body["tool_choice"] = self.tool_choice
        return {name: value for name, value in (body | self.extra_body).items() if value is not None}

    def answer(self, question: Question, body: Any) -> Answer:
        """The answer in a response body. Raises GarbageError if it is not a chat completion, or is empty."""
        try:
            response = _Response.model_validate(body)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "body"
            raise GarbageError(f"the response is not a chat completion: {where}: {first['msg']}") from error
        if not response.choices:
            raise GarbageError("the response has no choices")
        choice = response.choices[0]
        said = choice.message
        if said.content is None and not said.tool_calls and said.refusal is None and said.thoughts is None:
            raise GarbageError("the response's message is empty")
        calls = tuple(call.kept() for call in said.tool_calls or ()) or None
        content = said.refusal if said.content is None else said.content
        message = Message(
            role="assistant",
            content="" if content is None and calls is None else content,
            reasoning_content=said.thoughts if self.keep_reasoning else None,
            tool_calls=calls,
        )
        return Answer(
            id=question.id,
            turn=question.turn,
            asked=question.digest,
            message=message,
            finish_reason=choice.finish_reason or "stop",
            refused=said.refusal is not None,
            count=response.usage.completion_tokens if response.usage is not None else 0,
        )


class _Read(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _Function(_Read):
    name: str
    arguments: str | dict[str, Any] = ""


class _Call(_Read):
    id: str | None = None
    function: _Function

    def kept(self) -> ToolCall:
        arguments = self.function.arguments
        if isinstance(arguments, str):
            try:
                parsed = json.loads(arguments or "{}")
            except ValueError:
                parsed = None
            arguments = parsed if isinstance(parsed, dict) else arguments
        return ToolCall(id=self.id, function=FunctionCall(name=self.function.name, arguments=arguments))


class _Said(_Read):
    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None

    @property
    def thoughts(self) -> str | None:
        """The reasoning text, which servers send under different names; None if there is none."""
        return self.reasoning_content if self.reasoning_content is not None else self.reasoning


class _Choice(_Read):
    message: _Said
    finish_reason: str | None = None


class _Usage(_Read):
    completion_tokens: int = 0


class _Response(_Read):
    choices: list[_Choice]
    usage: _Usage | None = None


def as_sent(message: Message) -> dict[str, Any]:
    """A message in the API's form, in which arguments of tool calls are JSON text."""
    sent = message.for_template()
    for call in sent.get("tool_calls", ()):
        if not isinstance(call["function"]["arguments"], str):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    if message.role == "assistant":
        sent.setdefault("content", None)
    return sent


def sampling_fields(params: SamplingParams, seed: int) -> dict[str, Any]:
    """Sampling parameters in the API's form.

    Parameters that OpenAI's API doesn't have are sent under the names that vLLM and SGLang use, and only if they differ
    from the defaults.
    """
    fields: dict[str, Any] = {"max_tokens": params.max_tokens, "temperature": params.temperature, "seed": seed}
    defaults = _DEFAULTS.model_dump(mode="json")
    return fields | {
        name: v for name, v in params.model_dump(mode="json").items() if name not in fields and v != defaults[name]
    }
