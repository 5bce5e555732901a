"""A generation as the JSON of the chat and completions APIs: the full response, or the chunks of a stream."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from eyas.serve.api.generation import Generation, OutputDelta, ScoredToken, speculation_of
from eyas.serve.api.logprobs import (
    Echo,
    TokenTexts,
    chat_logprobs,
    completion_logprobs,
    echoed_logprobs,
    prompt_logprobs,
)
from eyas.serve.schema.chat import CompletionRequest
from eyas.serve.schema.request import GenerationRequest
from eyas.serve.tools.calling import Calling
from eyas.serve.tools.parser import CallPiece, TextPiece, ToolCallParser
from eyas.text.detokenizer import Detokenizer
from eyas.types import Chunk, DraftRound, Stats

_MIN_LOGPROB = -100.0
"""Written instead of smaller log-probabilities, because JSON has no infinity."""


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
        "logprob": [max(round(value, 4), _MIN_LOGPROB) for value in draft.logprob],
        "path": list(draft.path),
        "pieces": [_piece(tokenizer, *pair) for pair in zip(before, draft.tokens, strict=True)],
    }


def _piece(tokenizer: Any, before: int, token: int) -> str:
    """A node's text after its parent's, which decides about a leading space; special tokens appear by name."""
    shared = len(tokenizer.decode([before]))
    text: str = tokenizer.decode([before, token])[shared:]
    return text


Json = dict[str, Any]
_MAX_SCORED = 64
"""Maximum positions whose log-probabilities are written on the event loop; more go to a worker thread."""


@dataclass(frozen=True)
class ThoughtPiece:
    """Text of what the model thinks before it answers."""

    text: str


Part = TextPiece | CallPiece | ThoughtPiece


class ResponseWriter(ABC):
    """Writes a generation as JSON, as far as the two APIs are alike; subclasses write the fields of a choice."""

    object_name: str
    chunk_object_name: str

    def __init__(self, body: GenerationRequest, generation: Generation, response_id: str) -> None:
        self.generation = generation
        context = generation.context
        self._tokenizer = context.engine.tokenizer
        self._return_token_ids = bool(body.return_token_ids) or self._tokenizer is None  # without one there is no text
        self._usage_at_the_end = body.include_usage
        self._usage_always = body.continuous_usage
        self._prompt_alternatives = body.prompt_logprobs
        self._in_worker = context.in_worker
        self._speculation_level = context.settings.per_request_spec_decode_metrics
        self._traces = [RoundTrace(self._tokenizer) for _ in generation.outputs] if body.options.trace else None
        self._head = {
            "id": response_id,
            "created": int(time.time()),
            "model": body.model or context.settings.model_names[0],
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
    def chunk_fields(self, choice_index: int, parts: Sequence[Part], scored: Sequence[ScoredToken]) -> list[Json]:
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

    def parse(self, choice_index: int, delta: OutputDelta, last: bool) -> list[Part]:  # noqa: ARG002  # for chats
        """Split new text of a choice into thoughts, text and tool calls; `last` if no more text comes."""
        return [TextPiece(delta.text)] if delta.text else []

    async def full(self) -> Json:
        """Generate everything and return the full response."""
        count = len(self.generation.outputs)
        parts = [list[Part]() for _ in range(count)]
        scored = [list[ScoredToken]() for _ in range(count)]
        rounds: list[list[Json]] = [[] for _ in range(count)]
        ids: list[list[int]] = [[] for _ in range(count)]
        try:
            async for step in self.generation:
                index = step.choice_index
                parts[index] += self.parse(index, step.delta, step.last)
                scored[index] += step.delta.scored
                ids[index] += step.chunk.token_ids
                if self._traces is not None and step.counts:
                    rounds[index].append(self._traces[index].fields(step.chunk))
        finally:
            self.generation.close()

        def generated() -> Json:
            choices: list[Json] = [{"index": i} | self.full_fields(i, parts[i], scored[i]) for i in range(count)]
            if self._traces is not None:
                choices = [choice | {"eyas": {"rounds": r}} for choice, r in zip(choices, rounds, strict=True)]
            if self._return_token_ids:
                outputs = zip(choices, self.generation.outputs, strict=True)
                choices = [choice | {"token_ids": output.token_ids} for choice, output in outputs]
            return {"choices": choices} | self.common_fields()

        request = self.generation.request
        positions = sum(map(len, scored))
        if request.sequences[0].params.prompt_logprobs is not None:
            positions += request.n * request.prompt_tokens
        if positions > _MAX_SCORED:  # there may be a million log-probabilities
            fields = await self._in_worker(generated, characters=64 * positions)
        else:
            fields = generated()
        return (
            self._head
            | {"object": self.object_name}
            | fields
            | {"usage": self.generation.usage(), "eyas": {"seed": request.seed}}
            | _metrics(self.generation, self._speculation_level)
        )

    def common_fields(self) -> Json:
        """Fields next to the choices that only one of the APIs has."""
        return {}

    def prompt_fields(self, choice_index: int) -> Json:
        """The field `prompt_logprobs` of a choice's prompt, if it was requested."""
        if self._prompt_alternatives is None:
            return {}
        scored = self.generation.outputs[choice_index].prompt_logprobs or ()
        return {"prompt_logprobs": prompt_logprobs(self.token_texts, scored, self._prompt_alternatives)}

    async def events(self) -> AsyncGenerator[Json, None]:
        """Yield the chunks of a stream as they are generated; the first one has the seed."""
        try:
            seed: Json = {"eyas": {"seed": self.generation.request.seed}} | self.first_chunk_fields()
            for index in range(len(self.generation.outputs)):
                first = self.first_fields(index)
                if first is not None:
                    yield self._chunk(index, first) | seed
                    seed = {}
            async for step in self.generation:
                index = step.choice_index
                chunks = self.chunk_fields(index, self.parse(index, step.delta, step.last), step.delta.scored)
                if self._traces is not None and step.counts:
                    chunks = chunks or [self.empty_fields()]
                    chunks[-1]["eyas"] = self._traces[index].fields(step.chunk)
                if self._return_token_ids and step.delta.token_ids:
                    chunks = chunks or [self.empty_fields()]
                    chunks[-1]["token_ids"] = step.delta.token_ids
                if step.last:
                    chunks.append(self.last_fields(index))
                for fields in chunks:
                    yield self._chunk(index, fields) | seed
                    seed = {}
            if self._usage_at_the_end:
                yield (
                    self._chunk_with([])
                    | {"usage": self.generation.usage()}
                    | _metrics(self.generation, self._speculation_level)
                )
        finally:
            self.generation.close()

    def first_chunk_fields(self) -> Json:
        """Fields next to the choices that only one of the APIs has in the first chunk of a stream."""
        return {}

    def prompt_ids(self, choice_index: int) -> Json:
        """The field `prompt_token_ids` of a choice, if it was requested."""
        prompt = self.generation.request.sequences[choice_index].prompt
        return {"prompt_token_ids": list(prompt)} if self._return_token_ids else {}

    def _chunk(self, choice_index: int, fields: Json) -> Json:
        chunk = self._chunk_with([{"index": choice_index} | fields])
        return chunk | {"usage": self.generation.usage_so_far(choice_index)} if self._usage_always else chunk

    def _chunk_with(self, choices: list[Json]) -> Json:
        chunk = self._head | {"object": self.chunk_object_name, "choices": choices}
        return chunk | {"usage": None} if self._usage_at_the_end else chunk


def _metrics(generation: Generation, level: str) -> Json:
    """The field `metrics`, if enabled on the server; as in vLLM, only for a single choice."""
    if level == "none" or len(generation.outputs) > 1:
        return {}
    stats = generation.outputs[0].stats or Stats()
    return {"metrics": {"speculative_decoding": speculation_of(stats, detailed=level == "detailed")}}


class ChatResponseWriter(ResponseWriter):
    """Writes text and tool calls as assistant messages and their deltas."""

    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def __init__(
        self, body: GenerationRequest, generation: Generation, response_id: str, tools: Calling | None
    ) -> None:
        super().__init__(body, generation, response_id)
        self._tools = tools
        self._shows_thoughts = body.shows_thoughts
        self.unwritten: list[ScoredToken] = []
        """Tokens read by `shown_parts` whose log-probabilities are not written yet."""
        style, schemas = (tools.style, tools.schemas) if tools is not None else (None, [])
        self._parsers = [] if style is None else [ToolCallParser(style, tools=schemas) for _ in generation.outputs]

    def first_fields(self, choice_index: int) -> Json | None:  # noqa: ARG002  # all begin alike
        return self._fields({"role": "assistant", "content": ""})

    def parse(self, choice_index: int, delta: OutputDelta, last: bool) -> list[Part]:
        parts: list[Part] = []
        for thought, pieces in groupby(delta.pieces, lambda piece: piece.thought):
            text = "".join(piece.text for piece in pieces)
            if not thought:
                parts += self._parse_answer(choice_index, text)
            elif text and self._shows_thoughts:
                parts.append(ThoughtPiece(text))
        return parts + self._parse_answer(choice_index, "", last=True) if last else parts

    def _parse_answer(self, choice_index: int, text: str, last: bool = False) -> list[Part]:
        """Split new text of an answer into text and tool calls."""
        if self._tools is None or not self._parsers:
            return [TextPiece(text)] if text else []
        parser = self._parsers[choice_index]
        parts = parser.feed(text) + (parser.finish() if last else [])
        if not self._tools.parallel and parser.calls > 1:
            self.generation.stop(choice_index)
        return [part for part in parts if self._shows(part, self._tools)]

    async def shown_parts(self) -> AsyncGenerator[Part, None]:
        """Yield the parts of the only choice; whitespace is held back until text follows, and dropped before others."""
        space = ""
        in_text = False
        shown = False
        async for step in self.generation:
            self.unwritten += step.delta.scored
            for part in self.parse(0, step.delta, step.last):
                in_text = isinstance(part, TextPiece) and (in_text or bool(part.text.strip()))
                if isinstance(part, TextPiece) and not in_text:
                    space += part.text
                    continue
                yield TextPiece(space + part.text) if isinstance(part, TextPiece) else part
                space, shown = "", True
        if space and not shown:
            yield TextPiece(space)

    @staticmethod
    def _shows(part: TextPiece | CallPiece, tools: Calling) -> bool:
        return not tools.forced if isinstance(part, TextPiece) else tools.parallel or part.index == 0

    def chunk_fields(
        self,
        choice_index: int,  # noqa: ARG002  # all alike
        parts: Sequence[Part],
        scored: Sequence[ScoredToken],
    ) -> list[Json]:
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
        content = thought = ""
        calls: list[Json] = []
        for part in parts:
            if isinstance(part, TextPiece):
                content += part.text
            elif isinstance(part, ThoughtPiece):
                thought += part.text
            elif part.name is not None:
                function = {"name": part.name, "arguments": part.arguments}
                calls.append({"id": part.id, "type": "function", "function": function})
            else:
                calls[part.index]["function"]["arguments"] += part.arguments
        message: Json = {"role": "assistant", "content": None if calls and not content.strip() else content}
        message |= {"refusal": None} | (_reasoning(thought) if thought else {})
        message |= {"tool_calls": calls} if calls else {}
        return {
            "message": message,
            "logprobs": self._logprobs(scored),
            "finish_reason": self._finish_reason(choice_index),
        }

    def common_fields(self) -> Json:
        return self.prompt_fields(0) | self.prompt_ids(0)

    def first_chunk_fields(self) -> Json:
        return self.prompt_ids(0)

    def _finish_reason(self, choice_index: int) -> str | None:
        reason = self.generation.outputs[choice_index].finish_reason
        called = bool(self._parsers) and self._parsers[choice_index].calls > 0
        return "tool_calls" if called and reason == "stop" else reason

    def _fields(self, delta: Json) -> Json:
        return {"delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, scored: Sequence[ScoredToken]) -> Json | None:
        return chat_logprobs(self.token_texts, scored) if self.generation.with_logprobs else None


class CompletionResponseWriter(ResponseWriter):
    """Writes plain text; `echoes` are the prompts that the choices begin with, empty without `echo`."""

    object_name = "text_completion"
    chunk_object_name = "text_completion"

    def __init__(
        self, body: CompletionRequest, generation: Generation, response_id: str, echoes: Sequence[Echo]
    ) -> None:
        super().__init__(body, generation, response_id)
        self._echoes = echoes
        self._alternatives = body.logprobs
        self._begun: set[int] = set()

    def first_fields(self, choice_index: int) -> Json | None:
        if not self._echoes or self._alternatives is not None:  # log-probabilities come with the first output
            return None
        return self._fields(self._echoes[choice_index].text)

    def chunk_fields(self, choice_index: int, parts: Sequence[Part], scored: Sequence[ScoredToken]) -> list[Json]:
        chunks = []
        if self._echoes and self._alternatives is not None and choice_index not in self._begun:
            chunks.append(self._fields(self._echoes[choice_index].text, self._echoed_logprobs(choice_index)))
        if parts or scored:
            chunks.append(self._fields(_text(parts), self._logprobs(choice_index, scored)))
        return chunks

    def _chunk(self, choice_index: int, fields: Json) -> Json:
        if choice_index not in self._begun:
            self._begun.add(choice_index)
            fields = fields | self.prompt_ids(choice_index)
        return super()._chunk(choice_index, fields)

    def empty_fields(self) -> Json:
        return self._fields("")

    def last_fields(self, choice_index: int) -> Json:
        return self._fields("") | {"finish_reason": self.generation.outputs[choice_index].finish_reason}

    def full_fields(self, choice_index: int, parts: Sequence[Part], scored: Sequence[ScoredToken]) -> Json:
        text = _text(parts)
        logprobs = self._logprobs(choice_index, scored)
        if self._echoes:
            text = self._echoes[choice_index].text + text
        if self._echoes and logprobs is not None:
            echoed = self._echoed_logprobs(choice_index)
            logprobs = {name: echoed[name] + values for name, values in logprobs.items()}
        reason = self.generation.outputs[choice_index].finish_reason
        fields = {"text": text, "logprobs": logprobs, "finish_reason": reason}
        return fields | self.prompt_fields(choice_index) | self.prompt_ids(choice_index)

    def _fields(self, text: str, logprobs: Json | None = None) -> Json:
        return {"text": text, "logprobs": logprobs, "finish_reason": None}

    def _logprobs(self, choice_index: int, scored: Sequence[ScoredToken]) -> Json | None:
        before = len(self._echoes[choice_index].text) if self._echoes else 0
        return None if self._alternatives is None else completion_logprobs(self.token_texts, scored, before)

    def _echoed_logprobs(self, choice_index: int) -> Json:
        first = self.generation.request.sequences[choice_index].prompt[0]
        rest = self.generation.outputs[choice_index].prompt_logprobs or ()
        return echoed_logprobs(self.token_texts, self._echoes[choice_index], first, rest, self._alternatives or 0)


def _delta(part: Part) -> Json:
    if isinstance(part, ThoughtPiece):
        return _reasoning(part.text)
    return {"content": part.text} if isinstance(part, TextPiece) else {"tool_calls": [part.delta()]}


def _reasoning(text: str) -> Json:
    """A thought under both its names: llama-server's, SGLang's and DeepSeek's, and vLLM's newer one."""
    return {"reasoning_content": text, "reasoning": text}


def _text(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, TextPiece))
