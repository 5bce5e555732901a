"""Replies of the chat API."""

from __future__ import annotations

from collections.abc import Sequence

from eyas.serve.answer import Scored
from eyas.serve.calling import Calling
from eyas.serve.context import Context
from eyas.serve.generation import Generation
from eyas.serve.logprobs import chat_logprobs
from eyas.serve.reply import Json, Part, Reply
from eyas.serve.tools import TextPiece, ToolCallParser
from eyas.serve.wire.chat import ChatRequest


class ChatReply(Reply):
    """Text and tool calls as messages and their deltas."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(
        self, context: Context, asked: ChatRequest, generation: Generation, reply_id: str, tools: Calling | None
    ) -> None:
        super().__init__(context, asked, generation, reply_id)
        self._tools = tools
        self._parsers = [] if tools is None else [ToolCallParser(tools.style) for _ in generation.answers]

    def first(self, place: int) -> Json | None:  # noqa: ARG002  # all begin alike
        return self._fields({"role": "assistant", "content": ""})

    def parse(self, place: int, text: str, last: bool) -> list[Part]:
        if self._tools is None:
            return super().parse(place, text, last)
        parser = self._parsers[place]
        parts = parser.feed(text) + (parser.finish() if last else [])
        if self._tools.parallel:
            return parts
        if parser.calls > 1:
            self.generation.stop(place)
        return [part for part in parts if isinstance(part, TextPiece) or part.index == 0]

    def pieces(self, parts: Sequence[Part], scored: Sequence[Scored]) -> list[Json]:
        deltas = [_delta(part) for part in parts]
        if scored and not deltas:
            deltas = [{}]
        found = [self._fields(delta) for delta in deltas]
        if scored:
            found[0]["logprobs"] = self._logprobs(scored)
        return found

    def empty(self) -> Json:
        return self._fields({})

    def end(self, place: int) -> Json:
        return self._fields({}) | {"finish_reason": self._reason(place)}

    def choice(self, place: int, parts: Sequence[Part], scored: Sequence[Scored]) -> Json:
        content, calls = "", list[Json]()
        for part in parts:
            if isinstance(part, TextPiece):
                content += part.text
            elif part.name is not None:
                function = {"name": part.name, "arguments": part.arguments}
                calls.append({"id": part.id, "type": "function", "function": function})
            else:
                calls[part.index]["function"]["arguments"] += part.arguments
        message: Json = {"role": "assistant", "content": None if calls and not content.strip() else content}
        message |= {"refusal": None} | ({"tool_calls": calls} if calls else {})
        return {"message": message, "logprobs": self._logprobs(scored), "finish_reason": self._reason(place)}

    def _reason(self, place: int) -> str | None:
        reason = self.generation.answers[place].finish_reason
        called = bool(self._parsers) and self._parsers[place].calls > 0
        return "tool_calls" if called and reason == "stop" else reason

    def _fields(self, delta: Json) -> Json:
        return {"delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, scored: Sequence[Scored]) -> Json | None:
        return chat_logprobs(self.names, scored) if self.generation.scored else None


def _delta(part: Part) -> Json:
    return {"content": part.text} if isinstance(part, TextPiece) else {"tool_calls": [part.delta()]}
