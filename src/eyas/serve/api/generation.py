"""One HTTP request while it is being generated: its sequences' chunks become the steps of its choices.

`Generation.start` hands the sequences to the engine's thread. Iterating over the generation detokenizes them, ends
choices at stop strings, reports to the observer, and raises an error if a sequence ended abnormally.

Text never ends inside a character, and a possible beginning of a stop string is held back until it is decided.
Speculation makes chunks of other sizes than plain decoding; the text does not depend on them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import Any, NamedTuple

from eyas.engine.fair_share import client_of
from eyas.errors import CacheMemoryError, PassMemoryError, RequestError
from eyas.serve.api.encode import EncodedRequest
from eyas.serve.context import RequestInfo, ServerContext
from eyas.serve.engine_thread import RequestHandle
from eyas.serve.errors import ApiError, too_late, unavailable
from eyas.serve.observe.observer import ReceivedSequence, SequenceClock
from eyas.serve.schema.request import SamplingFields
from eyas.text.detokenizer import Detokenizer, special_token_ids
from eyas.text.reasoning import Piece, ThoughtSplitter
from eyas.types import Chunk, PromptLogprobs, Stats, TokenLogprobs


@dataclass(frozen=True)
class ScoredToken:
    """A generated token's log-probabilities, and the offset in the output at which its text begins, in characters.

    Tokens that only together form a character all have that character's offset.
    """

    offset: int
    logprobs: TokenLogprobs


@dataclass
class OutputDelta:
    """What a chunk adds to the output."""

    pieces: list[Piece] = field(default_factory=list)
    """Text, in order; without a `ThoughtSplitter` it is all part of the answer."""
    token_ids: list[int] = field(default_factory=list)
    scored: list[ScoredToken] = field(default_factory=list)
    """Tokens whose text has begun to be emitted."""

    @property
    def text(self) -> str:
        """The text of the answer."""
        return "".join(piece.text for piece in self.pieces if not piece.thought)


class ChoiceOutput:
    """Detokenizes one sequence, cuts it at stop strings, and splits it into thought and answer.

    `finish_reason` is None until the output is complete.
    """

    def __init__(
        self,
        tokenizer: Any,
        body: SamplingFields,
        visible_specials: frozenset[int] = frozenset(),
        score_all: bool = False,
        splitter: ThoughtSplitter | None = None,
    ) -> None:
        """`body` says what ends the text and what belongs to it.

        `visible_specials`: special tokens that are part of the text, such as the markers of tool calls.

        `score_all`: also report log-probabilities of tokens without text, such as the end token.

        `splitter`: what finds thoughts in the text; None if there are none to be found.
        """
        special = special_token_ids(tokenizer)
        shown = special if body.skip_special_tokens is False else visible_specials
        self._detokenizer = Detokenizer(tokenizer, shown)
        self._left_out = {token: tokenizer.added_tokens_decoder[token].content for token in special - shown}
        self._stops = StopStrings(body.stop_strings, included=bool(body.include_stop_str_in_output))
        self._token_by_token = bool(body.stop_strings)
        self._score_all = score_all
        self._hidden_stops = (
            frozenset()
            if body.include_stop_str_in_output
            else (special - visible_specials) | {*(body.stop_token_ids or ())}
        )
        self._detokenized = 0  # characters
        self._emitted = 0  # characters
        self._scored: list[ScoredToken] = []
        self._splitter = splitter
        self._uncounted: deque[int] = deque()
        """Where the text of tokens begins that aren't known yet to belong to the thought or to the answer."""
        self.reasoning_tokens = 0
        """How many of the tokens belong to a thought, its marks included."""
        self.thought_end = 0
        """Where the last thought ends in the output so far, in characters; 0 if there is none."""
        self.token_ids: list[int] = []
        """The tokens of the output, including the one that ended it."""
        self.prompt_logprobs: tuple[PromptLogprobs, ...] | None = None
        """Log-probabilities of all prompt tokens but the first, if requested; set by the first chunk."""
        self.finish_reason: str | None = None
        self.stop_string: str | None = None
        """The stop string that ended the output, if one did."""
        self.stats: Stats | None = None
        """The sequence's statistics; None until the engine has ended it."""
        self.lossy = False
        """Whether the engine's rule of acceptance may have changed the output."""
        self.error: str | None = None

    def add(self, chunk: Chunk) -> OutputDelta:
        """Add a chunk; once the output is complete only its statistics count."""
        delta = OutputDelta()
        self.prompt_logprobs = chunk.prompt_logprobs or self.prompt_logprobs
        if self.finish_reason is None:
            self._add_tokens(chunk, delta)
        self.token_ids += delta.token_ids
        completion = chunk.completion
        if completion is not None:
            self.stats = completion.stats
            self.error = completion.error
            self.lossy = completion.lossy
            if self.finish_reason is None:
                self._add_text(self._detokenizer.finish(), delta)
                if self.finish_reason is None:
                    self._emit(self._stops.finish(), delta)
                    self.finish_reason = completion.finish_reason
        if self.finish_reason is not None:
            self._finish_splitting(delta)
        if self.finish_reason is not None and self._score_all:
            delta.scored += self._scored
            self._scored = []
        return delta

    def _add_tokens(self, chunk: Chunk, delta: OutputDelta) -> None:
        tokens = chunk.token_ids
        stopped = chunk.completion is not None and chunk.completion.finish_reason == "stop"
        shown = len(tokens) - (stopped and bool(tokens) and tokens[-1] in self._hidden_stops)
        counting = self._splitter is not None and not self._splitter.settled
        if not (self._token_by_token or counting) and chunk.logprobs is None:
            delta.token_ids += tokens
            self._add_text(self._detokenizer.push(*tokens[:shown]), delta)
            return
        for i, token in enumerate(tokens):
            delta.token_ids.append(token)
            if counting:
                self._uncounted.append(self._detokenized)
            if chunk.logprobs is not None:
                self._scored.append(ScoredToken(self._detokenized, chunk.logprobs[i]))
            if i < shown:
                self._add_text(self._detokenizer.push(token), delta)
            if token in self._left_out:  # stop strings are looked for in the whole text
                self._end_at(self._stops.push(self._left_out[token], shown=False), delta)
            if self.finish_reason is not None:
                return

    def _add_text(self, text: str, delta: OutputDelta) -> None:
        self._detokenized += len(text)
        self._end_at(self._stops.push(text), delta)

    def _end_at(self, cut: CutText, delta: OutputDelta) -> None:
        self._emit(cut.text, delta)
        if cut.stop is not None:
            self.finish_reason = "stop"
            self.stop_string = cut.stop

    def _emit(self, text: str, delta: OutputDelta) -> None:
        self._emitted += len(text)
        if self._splitter is not None:
            self._add_pieces(self._splitter.feed(text), delta)
        elif text:
            delta.pieces.append(Piece(text, False, self._emitted))
        while self._scored and self._scored[0].offset < self._emitted:
            delta.scored.append(self._scored.pop(0))

    def _add_pieces(self, pieces: Sequence[Piece], delta: OutputDelta) -> None:
        delta.pieces += pieces
        for piece in pieces:
            if piece.thought:
                self.thought_end = piece.stop
            while self._uncounted and self._uncounted[0] < piece.stop:
                self._uncounted.popleft()
                self.reasoning_tokens += piece.thought

    def _finish_splitting(self, delta: OutputDelta) -> None:
        """Split what was held back. Tokens without text, such as the end token, belong to what they end."""
        if self._splitter is None:
            return
        self._add_pieces(self._splitter.finish(), delta)
        if self._splitter.thinking:
            self.reasoning_tokens += len(self._uncounted)
        self._uncounted.clear()
        self._splitter = None


class CutText(NamedTuple):
    """Text that may be emitted, and the stop string that ends it."""

    text: str
    stop: str | None = None


class StopStrings:
    """Cuts a text before the stop string that completes first, or before the longest of several that do.

    Stop strings are matched character by character (Knuth-Morris-Pratt), however the text is split into pieces.
    """

    def __init__(self, stops: Sequence[str], included: bool = False) -> None:
        """`included`: cut after the stop string instead."""
        self._included = included
        self._patterns = [_Pattern(stop) for stop in stops]
        self._held = ""  # may be the beginning of a stop string
        self._shown: list[bool] = []  # by character of the held text

    def push(self, piece: str, shown: bool = True) -> CutText:
        """Add a piece and return the text up to where a stop string begins or may begin.

        A piece that isn't `shown`, such as a special token's text, may be part of a stop string, but is never returned
        outside of one.
        """
        start = len(self._held)
        self._held += piece
        self._shown += [shown] * len(piece)
        for end, character in enumerate(piece if self._patterns else "", start=start + 1):
            complete = [pattern.text for pattern in self._patterns if pattern.step(character)]
            if complete:
                longest = max(complete, key=len)
                text = self._take(end - len(longest))
                self._held = ""
                self._shown = []
                return CutText(text + longest if self._included else text, longest)
        return CutText(self._take(len(self._held) - max((pattern.matched for pattern in self._patterns), default=0)))

    def finish(self) -> str:
        """Return what was held back, at the end of the text."""
        return self._take(len(self._held))

    def _take(self, count: int) -> str:
        """Remove the first `count` characters of the held text and return those that are shown."""
        text = "".join(compress(self._held[:count], self._shown))
        self._held = self._held[count:]
        self._shown = self._shown[count:]
        return text


class _Pattern:
    """A stop string, and the length of its longest prefix that the text so far ends with."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._fallback = [0] * len(text)  # [i] = length of the longest proper border of text[: i + 1]
        border = 0
        for i in range(1, len(text)):
            while border and text[i] != text[border]:
                border = self._fallback[border - 1]
            border += text[i] == text[border]
            self._fallback[i] = border

    def step(self, character: str) -> bool:
        """Add a character; returns whether it completes the stop string."""
        while self.matched and self.text[self.matched] != character:
            self.matched = self._fallback[self.matched - 1]
        self.matched += self.text[self.matched] == character
        return self.matched == len(self.text)


_NO_MEMORY = (CacheMemoryError.__name__, PassMemoryError.__name__)


class ChoiceStep(NamedTuple):
    """What a round of the engine did for one choice."""

    choice_index: int
    chunk: Chunk
    delta: OutputDelta
    counts: bool
    """False if the choice had ended before: the engine only reports its statistics."""
    last: bool
    """Whether the choice ends with this step."""


class Generation:
    """The choices of a request: iterate over their steps, and always `close` it, so that no gone client is served."""

    def __init__(
        self,
        context: ServerContext,
        request: EncodedRequest,
        handle: RequestHandle,
        outputs: list[ChoiceOutput],
        clocks: list[SequenceClock],
    ) -> None:
        self.context = context
        self.request = request
        self.outputs = outputs
        self.with_logprobs = request.sequences[0].params.logprobs is not None
        """Whether log-probabilities were requested."""
        self._handle = handle
        self._clocks = clocks
        self._ended: set[int] = set()

    @classmethod
    async def start(
        cls,
        context: ServerContext,
        request: EncodedRequest,
        new_output: Callable[[], ChoiceOutput],
        *,
        endpoint: str,
        stream: bool,
        queue_key: str,
        info: RequestInfo,
    ) -> Generation:
        """Hand the sequences to the engine. Raises ApiError 400 if they are too many, or as `EngineThread.submit`.

        The request's time limit counts from when it was received. With API keys, cached prefixes are only reused by
        requests with the same key.
        """
        count = len(request.sequences)
        most = context.settings.max_choices
        if count > most:
            message = f"{count} answers are requested at once; a request may have at most {most}"
            raise ApiError(400, message, code="too_many_choices", param="n")
        salt = client_of(queue_key) if context.settings.api_keys else ""
        handle = await context.thread.submit(
            [replace(sequence, cache_salt=salt, private=info.private) for sequence in request.sequences],
            deadline=context.seconds_left(info.received),
            queue_key=queue_key,
        )
        clocks = []
        for sequence in request.sequences:
            seen = ReceivedSequence(
                id=sequence.id,
                endpoint=endpoint,
                prompt_tokens=len(sequence.prompt),
                max_tokens=sequence.params.max_tokens,
                temperature=sequence.params.temperature,
                stream=stream,
                speculate=sequence.speculate,
                top_p=sequence.params.top_p,
                top_k=sequence.params.top_k,
                seed=sequence.params.seed,
                received=info.received,
                trace_headers=info.trace_headers,
            )
            clocks.append(SequenceClock(context.observer, seen, info.received))
        return cls(context, request, handle, [new_output() for _ in request.sequences], clocks)

    async def __aiter__(self) -> AsyncIterator[ChoiceStep]:
        async for choice_index, chunk in self._handle:
            output = self.outputs[choice_index]
            counts = choice_index not in self._ended
            delta = output.add(chunk)
            last = counts and output.finish_reason is not None
            if last:
                self._ended.add(choice_index)
            self._report(self._clocks[choice_index], output, chunk)
            if last and chunk.completion is None:
                self._handle.cancel(choice_index)  # at a stop string; the engine knows only tokens
            failure = _failure(output)
            if failure is not None:
                raise failure
            yield ChoiceStep(choice_index, chunk, delta, counts, last)

    def _report(self, clock: SequenceClock, output: ChoiceOutput, chunk: Chunk) -> None:
        if chunk.completion is not None and output.finish_reason != chunk.completion.finish_reason:
            clock.end(output.finish_reason or "", output.stats)  # "stop", where the engine says "cancelled"
        clock.add(chunk)

    def stop(self, choice_index: int) -> None:
        """End a choice here, as a stop string would; its last step comes with the next chunk of its sequence."""
        self.outputs[choice_index].finish_reason = "stop"
        self._handle.cancel(choice_index)

    def close(self) -> None:
        """Cancel the sequences that are still running."""
        self._handle.cancel()
        for clock in self._clocks:
            clock.end("cancelled")

    def usage(self) -> dict[str, object]:
        """The `usage` of the response, all choices pooled."""
        stats = Stats()
        for output in self.outputs:
            stats.merge(output.stats or Stats())
        speculation = stats.as_dict()
        del speculation["tokens"]
        if any(output.lossy for output in self.outputs):
            speculation["lossy"] = True
        first_choices = self.outputs[:: self.request.n]  # each prompt counts once
        cached = sum(output.stats.reused_tokens for output in first_choices if output.stats)
        completion = sum(len(output.token_ids) for output in self.outputs)
        return {
            "prompt_tokens": self.request.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.request.prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {
                "reasoning_tokens": sum(output.reasoning_tokens for output in self.outputs),
                "accepted_prediction_tokens": stats.predicted_accepted,
                "rejected_prediction_tokens": stats.predicted_rejected,
            },
            "eyas": speculation,
        }

    def usage_so_far(self, choice_index: int) -> dict[str, object]:
        """The token counts of one choice and its prompt so far."""
        prompt = len(self.request.sequences[choice_index].prompt)
        completion = len(self.outputs[choice_index].token_ids)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def speculation_of(stats: Stats, detailed: bool = False) -> dict[str, object]:
    """A sequence's `metrics.speculative_decoding` as in vLLM's #48915, over the rounds that drafted.

    Draft tokens are counted by a tree's depth, as in `usage.eyas`. `detailed`: with the counts of each round.
    """
    rounds = (stats.offered_by_depth or [0])[0]
    most = len(stats.offered_by_depth)
    by_accepted = (stats.accepted_histogram + [0] * (most + 1))[: most + 1]
    by_accepted[0] -= stats.target_passes - rounds
    every = {
        "per_step_accepted": [accepted for _, accepted in stats.steps],
        "per_step_drafted": [offered for offered, _ in stats.steps],
    }
    return {
        "mean_acceptance_length": 1.0 + stats.walked / rounds if rounds else 1.0,
        "draft_acceptance_rate": stats.acceptance_rate,
        "acceptance_histogram": by_accepted,
        "num_spec_steps": rounds,
        "num_accepted_draft_tokens": stats.walked,
        "num_draft_tokens": stats.drafted_depth,
        "num_spec_tokens": most,
        **(every if detailed else {}),
    }


def _failure(output: ChoiceOutput) -> ApiError | None:
    """The error to answer with if the sequence was ended by something other than the model, a limit or a stop."""
    if output.finish_reason == "deadline":
        return too_late()
    if output.finish_reason == "cancelled":
        return unavailable("the server cancelled the request: it is going down")
    blamed, _, why = (output.error or "").partition(": ")
    if output.finish_reason == "error" and blamed == RequestError.__name__:
        return ApiError(400, why, code="request_failed")
    if output.finish_reason == "error" and blamed in _NO_MEMORY:
        why = "the server lacks the memory for this request, even alone: shorten the prompt or lower max_tokens"
        return ApiError(503, why, code="out_of_memory", headers={"Retry-After": "60"})
    if output.finish_reason == "error":
        return ApiError(500, f"the engine failed on this request: {output.error}", code="engine_error")
    return None
