"""A generation as JSON, all at once or piece by piece; what chats and completions have in common."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from eyas.serve.answer import Scored
from eyas.serve.api.logprobs import TokenNames
from eyas.serve.api.schema.sampling import SamplingFields
from eyas.serve.context import Context
from eyas.serve.generation import Generation
from eyas.serve.tools.parser import CallPiece, TextPiece
from eyas.text.detokenizer import Detokenizer
from eyas.types import Chunk, DraftRound

Json = dict[str, Any]
Part = TextPiece | CallPiece


class Reply(ABC):
    """One HTTP request's answer."""

    object_name: str
    chunk_name: str

    def __init__(self, context: Context, asked: SamplingFields, generation: Generation, reply_id: str) -> None:
        self.generation, self.names = generation, TokenNames(context.engine.tokenizer)
        self._usage_at_the_end = asked.wants_usage
        places = range(len(generation.answers))
        self._tracers = [Tracer(context.engine.tokenizer) for _ in places] if asked.options.trace else None
        self._head = {
            "id": reply_id,
            "created": int(time.time()),
            "model": asked.model,
            "system_fingerprint": context.fingerprint,
        }

    @abstractmethod
    def first(self, place: int) -> Json | None:
        """What a stream's first chunk says about a choice, before there is any text."""

    def parse(self, place: int, text: str, last: bool) -> list[Part]:  # noqa: ARG002  # for those who read more in it
        """What more text means; `last` when no more comes."""
        return [TextPiece(text)] if text else []

    @abstractmethod
    def pieces(self, parts: Sequence[Part], scored: Sequence[Scored]) -> list[Json]:
        """The choice's fields for what is new, one object a chunk."""

    @abstractmethod
    def empty(self) -> Json:
        """The fields of a chunk that adds nothing."""

    @abstractmethod
    def end(self, place: int) -> Json:
        """The fields of a choice's last chunk, its finish reason among them."""

    @abstractmethod
    def choice(self, place: int, parts: Sequence[Part], scored: Sequence[Scored]) -> Json:
        """A whole choice's fields."""

    async def whole(self) -> Json:
        """All at once."""
        count = len(self.generation.answers)
        parts, scored = [list[Part]() for _ in range(count)], [list[Scored]() for _ in range(count)]
        rounds: list[list[Json]] = [[] for _ in range(count)]
        try:
            async for step in self.generation:
                parts[step.place] += self.parse(step.place, step.delta.text, step.ends)
                scored[step.place] += step.delta.scored
                if self._tracers is not None and step.counts:
                    rounds[step.place].append(self._tracers[step.place].fields(step.chunk))
        finally:
            self.generation.close()
        choices = []
        for place in range(count):
            choice = {"index": place} | self.choice(place, parts[place], scored[place])
            choices.append(choice if self._tracers is None else choice | {"eyas": {"rounds": rounds[place]}})
        return self._head | {
            "object": self.object_name,
            "choices": choices,
            "usage": self.generation.usage(),
            "eyas": {"seed": self.generation.job.seed},
        }

    async def events(self) -> AsyncGenerator[Json, None]:
        """Piece by piece; the first chunk tells the seed."""
        try:
            seed: Json = {"eyas": {"seed": self.generation.job.seed}}
            for place in range(len(self.generation.answers)):
                first = self.first(place)
                if first is not None:
                    yield self._chunk(place, first) | seed
                    seed = {}
            async for step in self.generation:
                parts = self.parse(step.place, step.delta.text, step.ends)
                pieces = self.pieces(parts, step.delta.scored)
                if self._tracers is not None and step.counts:
                    pieces = pieces or [self.empty()]
                    pieces[-1]["eyas"] = self._tracers[step.place].fields(step.chunk)
                if step.ends:
                    pieces.append(self.end(step.place))
                for fields in pieces:
                    yield self._chunk(step.place, fields) | seed
                    seed = {}
            if self._usage_at_the_end:
                yield self._outer([]) | {"usage": self.generation.usage()}
        finally:
            self.generation.close()

    def _chunk(self, place: int, fields: Json) -> Json:
        return self._outer([{"index": place} | fields])

    def _outer(self, choices: list[Json]) -> Json:
        outer = self._head | {"object": self.chunk_name, "choices": choices}
        return outer | {"usage": None} if self._usage_at_the_end else outer


# What a traced request is told about each round: its tokens one by one, and the draft tree they came from.


_LEAST = -100.0  # JSON has no infinity


class Tracer:
    """The trace of one answer; `pieces` of all its chunks, joined, are the answer's text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._text = Detokenizer(tokenizer)

    def fields(self, chunk: Chunk) -> dict[str, Any]:
        """The JSON of one chunk: `accepted`, `token_ids`, `pieces` and, if a tree was offered, `draft`.

        The first `accepted` of the tokens were drafted, the one after them is the target's own.
        """
        pieces = [self._text.push(token) for token in chunk.token_ids]
        if chunk.completion is not None and pieces:
            pieces[-1] += self._text.finish()
        found: dict[str, Any] = {"accepted": chunk.accepted, "token_ids": list(chunk.token_ids), "pieces": pieces}
        if chunk.draft is not None:
            found["draft"] = draft_fields(chunk.draft, self._tokenizer)
        return found


def draft_fields(draft: DraftRound, tokenizer: Any) -> dict[str, Any]:
    """A tree's JSON: one entry a node in `tokens`, `parents`, `logprob`, `pieces`; `path` = the accepted nodes."""
    before = [draft.root if parent < 0 else draft.tokens[parent] for parent in draft.parents]
    return {
        "tokens": list(draft.tokens),
        "parents": list(draft.parents),
        "logprob": [max(round(value, 4), _LEAST) for value in draft.logprob],
        "path": list(draft.path),
        "pieces": [_piece(tokenizer, *pair) for pair in zip(before, draft.tokens, strict=True)],
    }


def _piece(tokenizer: Any, before: int, token: int) -> str:
    """A node's text behind its parent's, which decides about a leading space; special tokens by their names."""
    shared = len(tokenizer.decode([before]))
    text: str = tokenizer.decode([before, token])[shared:]
    return text
