"""A generation as the JSON of the chat and completions APIs: the full response, or the chunks of a stream."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from functools import cached_property
from typing import Any

from eyas.serve.api.logprobs import TokenTexts, chat_logprobs, completion_logprobs
from eyas.serve.api.schema.request import GenerationRequest
from eyas.serve.choice_output import ScoredToken
from eyas.serve.context import ServerContext
from eyas.serve.generation import Generation
from eyas.serve.tools.calling import Calling
from eyas.serve.tools.parser import CallPiece, TextPiece, ToolCallParser
from eyas.text.detokenizer import Detokenizer
from eyas.types import Chunk, DraftRound

Json = dict[str, Any]
Part = TextPiece | CallPiece
_LEAST_LOGPROB = -100.0
"""Written instead of smaller log-probabilities in traces: JSON has no infinity."""


class ResponseWriter(ABC):
    """Writes a generation as JSON, in what the two APIs have in common; subclasses write the fields of a choice."""

    object_name: str
    chunk_object_name: str

    def __init__(
        self, context: ServerContext, body: GenerationRequest, generation: Generation, response_id: str
    ) -> None:
        self.generation = generation
        self._tokenizer = context.engine.tokenizer
        self._usage_at_the_end = body.include_usage
        self._traces = [RoundTrace(self._tokenizer) for _ in generation.outputs] if body.options.trace else None
        self._head = {
            "id": response_id,
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": context.fingerprint,
        }

    @cached_property
    def token_texts(self) -> TokenTexts:
        """The texts of single tokens, for log-probabilities."""
        return TokenTexts(self._tokenizer)

    @abstractmethod
    def first_fields(self, choice_index: int) -> Json | None:
        """The fields of a choice's first chunk, before there is any text; None for no such chunk."""

    @abstractmethod
    def chunk_fields(self, parts: Sequence[Part], scored: Sequence[ScoredToken]) -> list[Json]:
        """The fields that new output adds to a choice, one object for each chunk."""

    @abstractmethod
    def empty_fields(self) -> Json:
        """The fields of a chunk that adds no output."""

    @abstractmethod
    def last_fields(self, choice_index: int) -> Json:
        """The fields of a choice's last chunk, which has the finish reason."""

    @abstractmethod
    def full_fields(self, choice_index: int, parts: Sequence[Part], scored: Sequence[ScoredToken]) -> Json:
        """The fields of a complete choice."""

    def parse(self, choice_index: int, text: str, last: bool) -> list[Part]:  # noqa: ARG002  # for chats with tools
        """Split new text of a choice into text and tool calls; `last` if no more text comes."""
        return [TextPiece(text)] if text else []

    async def full(self) -> Json:
        """Generate everything and return the full response."""
        count = len(self.generation.outputs)
        parts, scored = [list[Part]() for _ in range(count)], [list[ScoredToken]() for _ in range(count)]
        rounds: list[list[Json]] = [[] for _ in range(count)]
        ids: list[list[int]] = [[] for _ in range(count)]
        try:
            async for step in self.generation:
                index = step.choice_index
                parts[index] += self.parse(index, step.delta.text, step.last)
                scored[index] += step.delta.scored
                ids[index] += step.chunk.token_ids
                if self._traces is not None and step.counts:
                    rounds[index].append(self._traces[index].fields(step.chunk))
        finally:
            self.generation.close()
        choices = []
        for index in range(count):
            choice: Json = {"index": index} | self.full_fields(index, parts[index], scored[index])
            if self._tokenizer is None:  # the output has no text
                choice["token_ids"] = ids[index]
            choices.append(choice if self._traces is None else choice | {"eyas": {"rounds": rounds[index]}})
        return self._head | {
            "object": self.object_name,
            "choices": choices,
            "usage": self.generation.usage(),
            "eyas": {"seed": self.generation.request.seed},
        }

    async def events(self) -> AsyncGenerator[Json, None]:
        """Yield the chunks of a stream as they are generated; the first one has the seed."""
        try:
            seed: Json = {"eyas": {"seed": self.generation.request.seed}}
            for index in range(len(self.generation.outputs)):
                first = self.first_fields(index)
                if first is not None:
                    yield self._chunk(index, first) | seed
                    seed = {}
            async for step in self.generation:
                index = step.choice_index
                chunks = self.chunk_fields(self.parse(index, step.delta.text, step.last), step.delta.scored)
                if self._traces is not None and step.counts:
                    chunks = chunks or [self.empty_fields()]
                    chunks[-1]["eyas"] = self._traces[index].fields(step.chunk)
                if self._tokenizer is None:
                    chunks = [self.empty_fields() | {"token_ids": list(step.chunk.token_ids)}]
                if step.last:
                    chunks.append(self.last_fields(index))
                for fields in chunks:
                    yield self._chunk(index, fields) | seed
                    seed = {}
            if self._usage_at_the_end:
                yield self._chunk_with([]) | {"usage": self.generation.usage()}
        finally:
            self.generation.close()

    def _chunk(self, choice_index: int, fields: Json) -> Json:
        return self._chunk_with([{"index": choice_index} | fields])

    def _chunk_with(self, choices: list[Json]) -> Json:
        chunk = self._head | {"object": self.chunk_object_name, "choices": choices}
        return chunk | {"usage": None} if self._usage_at_the_end else chunk


class ChatResponseWriter(ResponseWriter):
    """Writes text and tool calls as assistant messages and their deltas."""

    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(
        self,
        context: ServerContext,
        body: GenerationRequest,
        generation: Generation,
        response_id: str,
        tools: Calling | None,
    ) -> None:
        super().__init__(context, body, generation, response_id)
        self._tools = tools
        self._parsers = [] if tools is None else [ToolCallParser(tools.style) for _ in generation.outputs]

    def first_fields(self, choice_index: int) -> Json | None:  # noqa: ARG002  # all begin alike
        return self._fields({"role": "assistant", "content": ""})

    def parse(self, choice_index: int, text: str, last: bool) -> list[Part]:
        if self._tools is None:
            return super().parse(choice_index, text, last)
        parser = self._parsers[choice_index]
        parts = parser.feed(text) + (parser.finish() if last else [])
        if not self._tools.parallel and parser.calls > 1:
            self.generation.stop(choice_index)
        return [part for part in parts if self._shows(part, self._tools)]

    @staticmethod
    def _shows(part: Part, tools: Calling) -> bool:
        return not tools.forced if isinstance(part, TextPiece) else tools.parallel or part.index == 0

    def chunk_fields(self, parts: Sequence[Part], scored: Sequence[ScoredToken]) -> list[Json]:
        deltas = [_delta(part) for part in parts]
        if scored and not deltas:
            deltas = [{}]
        chunks = [self._fields(delta) for delta in deltas]
        if scored:
            chunks[0]["logprobs"] = self._logprobs(scored)
        return chunks

    def empty_fields(self) -> Json:
        return self._fields({})

    def last_fields(self, choice_index: int) -> Json:
        return self._fields({}) | {"finish_reason": self._finish_reason(choice_index)}

    def full_fields(self, choice_index: int, parts: Sequence[Part], scored: Sequence[ScoredToken]) -> Json:
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
        return {
            "message": message,
            "logprobs": self._logprobs(scored),
            "finish_reason": self._finish_reason(choice_index),
        }

    def _finish_reason(self, choice_index: int) -> str | None:
        reason = self.generation.outputs[choice_index].finish_reason
        called = bool(self._parsers) and self._parsers[choice_index].calls > 0
        return "tool_calls" if called and reason == "stop" else reason

    def _fields(self, delta: Json) -> Json:
        return {"delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, scored: Sequence[ScoredToken]) -> Json | None:
        return chat_logprobs(self.token_texts, scored) if self.generation.with_logprobs else None


class CompletionResponseWriter(ResponseWriter):
    """Writes plain text; `echoes` are the texts that the choices begin with, none without `echo`."""

    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def __init__(
        self,
        context: ServerContext,
        body: GenerationRequest,
        generation: Generation,
        response_id: str,
        echoes: Sequence[str],
    ) -> None:
        super().__init__(context, body, generation, response_id)
        self._echoes = echoes

    def first_fields(self, choice_index: int) -> Json | None:
        return self._fields(self._echoes[choice_index]) if self._echoes else None

    def chunk_fields(self, parts: Sequence[Part], scored: Sequence[ScoredToken]) -> list[Json]:
        return [self._fields(_text(parts), self._logprobs(scored))] if parts or scored else []

    def empty_fields(self) -> Json:
        return self._fields("")

    def last_fields(self, choice_index: int) -> Json:
        return self._fields("") | {"finish_reason": self.generation.outputs[choice_index].finish_reason}

    def full_fields(self, choice_index: int, parts: Sequence[Part], scored: Sequence[ScoredToken]) -> Json:
        return {
            "text": (self._echoes[choice_index] if self._echoes else "") + _text(parts),
            "logprobs": self._logprobs(scored),
            "finish_reason": self.generation.outputs[choice_index].finish_reason,
        }

    def _fields(self, text: str, logprobs: Json | None = None) -> Json:
        return {"text": text, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, scored: Sequence[ScoredToken]) -> Json | None:
        return completion_logprobs(self.token_texts, scored) if self.generation.with_logprobs else None


class RoundTrace:
    """The trace of one choice for `eyas.trace`; the `pieces` of all its rounds, joined, are the choice's text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = Detokenizer(tokenizer)

    def fields(self, chunk: Chunk) -> Json:
        """The JSON of one round: `accepted`, `token_ids`, `pieces` and, if a tree was drafted, `draft`.

        The first `accepted` of the tokens were drafted; the one after them is the target's own.
        """
        pieces = [self._detokenizer.push(token) for token in chunk.token_ids]
        if chunk.completion is not None and pieces:
            pieces[-1] += self._detokenizer.finish()
        fields: Json = {"accepted": chunk.accepted, "token_ids": list(chunk.token_ids), "pieces": pieces}
        if chunk.draft is not None:
            fields["draft"] = draft_fields(chunk.draft, self._tokenizer)
        return fields


def draft_fields(draft: DraftRound, tokenizer: Any) -> Json:
    """The JSON of a draft tree: an entry for each node in `tokens`, `parents`, `logprob` and `pieces`.

    `path` lists the accepted nodes, from the root down.
    """
    before = [draft.root if parent < 0 else draft.tokens[parent] for parent in draft.parents]
    return {
        "tokens": list(draft.tokens),
        "parents": list(draft.parents),
        "logprob": [max(round(value, 4), _LEAST_LOGPROB) for value in draft.logprob],
        "path": list(draft.path),
        "pieces": [_piece(tokenizer, *pair) for pair in zip(before, draft.tokens, strict=True)],
    }


def _piece(tokenizer: Any, before: int, token: int) -> str:
    """A node's text after its parent's, which decides about a leading space; special tokens by their names."""
    shared = len(tokenizer.decode([before]))
    text: str = tokenizer.decode([before, token])[shared:]
    return text


def _delta(part: Part) -> Json:
    return {"content": part.text} if isinstance(part, TextPiece) else {"tool_calls": [part.delta()]}


def _text(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, TextPiece))
