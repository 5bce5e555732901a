"""Replies of the chat API."""

from __future__ import annotations

from collections.abc import Sequence

from eyas.serve.answer import Scored
from eyas.serve.logprobs import chat_logprobs
from eyas.serve.reply import Json, Reply


class ChatReply(Reply):
    """Text as messages and their deltas."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def first(self, place: int) -> Json | None:  # noqa: ARG002  # all begin alike
        return self._fields({"role": "assistant", "content": ""})

    def piece(self, place: int, text: str, scored: Sequence[Scored], last: bool) -> list[Json]:  # noqa: ARG002
        if not text and not scored:
            return []
        return [self._fields({"content": text}, self._logprobs(scored))]

    def empty(self) -> Json:
        return self._fields({})

    def end(self, place: int) -> Json:
        return self._fields({}) | {"finish_reason": self.generation.answers[place].finish_reason}

    def choice(self, place: int, text: str, scored: Sequence[Scored]) -> Json:
        return {
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._logprobs(scored),
            "finish_reason": self.generation.answers[place].finish_reason,
        }

    def _fields(self, delta: Json, logprobs: Json | None = None) -> Json:
        return {"delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, scored: Sequence[Scored]) -> Json | None:
        return chat_logprobs(self.names, scored) if self.generation.scored else None
