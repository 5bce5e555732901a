"""Replies of the completions API."""

from __future__ import annotations

from collections.abc import Sequence

from eyas.serve.answer import Scored
from eyas.serve.logprobs import completion_logprobs
from eyas.serve.reply import Json, Part, Reply
from eyas.serve.tools import TextPiece


class CompletionReply(Reply):
    """Plain text; `echoes` has what each choice's text begins with."""

    object_name = "text_completion"
    chunk_name = "text_completion"
    echoes: Sequence[str] = ()

    def first(self, place: int) -> Json | None:
        return self._fields(self.echoes[place]) if self.echoes else None

    def pieces(self, parts: Sequence[Part], scored: Sequence[Scored]) -> list[Json]:
        return [self._fields(_text(parts), self._logprobs(scored))] if parts or scored else []

    def empty(self) -> Json:
        return self._fields("")

    def end(self, place: int) -> Json:
        return self._fields("") | {"finish_reason": self.generation.answers[place].finish_reason}

    def choice(self, place: int, parts: Sequence[Part], scored: Sequence[Scored]) -> Json:
        return {
            "text": (self.echoes[place] if self.echoes else "") + _text(parts),
            "logprobs": self._logprobs(scored),
            "finish_reason": self.generation.answers[place].finish_reason,
        }

    def _fields(self, text: str, logprobs: Json | None = None) -> Json:
        return {"text": text, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, scored: Sequence[Scored]) -> Json | None:
        return completion_logprobs(self.names, scored) if self.generation.scored else None


def _text(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, TextPiece))
