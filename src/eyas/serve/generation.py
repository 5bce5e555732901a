"""One HTTP request while it is being generated: its sequences' chunks become the steps of its choices.

`Generation.start` hands the sequences to the engine's thread. Reading the generation detokenizes them, ends choices at
stop strings, reports to the observer, and raises what ended a sequence that wasn't its own end.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import NamedTuple

from eyas.engine.fair_queue import client_of
from eyas.errors import CacheMemoryError, PassMemoryError, RequestError
from eyas.serve.api.encode import EncodedRequest
from eyas.serve.choice_output import ChoiceOutput, OutputDelta
from eyas.serve.context import ServerContext
from eyas.serve.engine_thread import RequestHandle
from eyas.serve.http.errors import ApiError, too_late, unavailable
from eyas.serve.observe.observer import ReceivedSequence, SequenceClock
from eyas.types import Chunk, Stats

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
    """Iterate over its steps, and `close` it in any case, so that nothing is generated for nobody."""

    def __init__(
        self, request: EncodedRequest, handle: RequestHandle, outputs: list[ChoiceOutput], clocks: list[SequenceClock]
    ) -> None:
        self.request, self.outputs = request, outputs
        self.with_logprobs = request.sequences[0].params.logprobs is not None
        """Whether log-probabilities were requested."""
        self._handle, self._clocks = handle, clocks
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
        received: float,
    ) -> Generation:
        """Hand the sequences to the engine; ApiError 400 if there are too many, and all of `EngineThread.submit`.

        `received` is when the request arrived (`time.monotonic`), from which on its time counts. Where there are API
        keys, each has prefixes of its own.
        """
        count, most = len(request.sequences), context.settings.max_choices
        if count > most:
            message = f"{count} answers are requested at once; a request may have at most {most}"
            raise ApiError(400, message, code="too_many_choices", param="n")
        salt = client_of(queue_key) if context.settings.api_keys else ""
        handle = await context.thread.submit(
            [replace(sequence, cache_salt=salt) for sequence in request.sequences],
            deadline=context.seconds_left(received),
            queue_key=queue_key,
        )
        clocks = []
        for sequence in request.sequences:
            info = ReceivedSequence(
                id=sequence.id,
                endpoint=endpoint,
                prompt_tokens=len(sequence.prompt),
                max_tokens=sequence.params.max_tokens,
                temperature=sequence.params.temperature,
                stream=stream,
                speculate=sequence.speculate,
            )
            clocks.append(SequenceClock(context.observer, info, received))
        return cls(request, handle, [new_output() for _ in request.sequences], clocks)

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
        first_choices = self.outputs[:: self.request.n]  # each prompt counts once
        cached = sum(output.stats.reused_tokens for output in first_choices if output.stats)
        completion = sum(len(output.token_ids) for output in self.outputs)
        return {
            "prompt_tokens": self.request.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.request.prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
            "eyas": speculation,
        }

    def usage_so_far(self, choice_index: int) -> dict[str, object]:
        """The tokens of one choice and its prompt, at any time."""
        prompt = len(self.request.sequences[choice_index].prompt)
        completion = len(self.outputs[choice_index].token_ids)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


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
        why = "this server hasn't enough memory for the request, even alone: shorten the prompt or lower max_tokens"
        return ApiError(503, why, code="out_of_memory", headers={"Retry-After": "60"})
    if output.finish_reason == "error":
        return ApiError(500, f"the engine failed on this request: {output.error}", code="engine_error")
    return None
