"""One HTTP request being answered: its sequences' chunks become deltas of its choices, watched and cut short."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

from eyas.errors import RequestError
from eyas.serve.answer import Answer, Delta
from eyas.serve.encode import Job
from eyas.serve.engine_thread import Ticket
from eyas.serve.http.errors import ApiError, unavailable
from eyas.serve.observe.observer import Watch
from eyas.types import Chunk, Stats


class Step(NamedTuple):
    """What a round did for one choice."""

    place: int
    chunk: Chunk
    delta: Delta
    counts: bool
    """False once the choice has ended: the engine only tells its statistics."""
    ends: bool
    """The choice ends with this step."""


class Generation:
    """Iterate over its steps; `close` it whatever happens, so that nothing runs on for nobody."""

    def __init__(self, job: Job, ticket: Ticket, answer: Callable[[], Answer], watches: list[Watch]) -> None:
        self.job = job
        self.answers = [answer() for _ in job.requests]
        self.scored = job.requests[0].params.logprobs is not None
        """Were log-probabilities asked for?"""
        self._ticket, self._watches = ticket, watches
        self._ended: set[int] = set()

    async def __aiter__(self) -> AsyncIterator[Step]:
        async for place, chunk in self._ticket:
            answer = self.answers[place]
            counts = place not in self._ended
            delta = answer.add(chunk)
            ends = counts and answer.finish_reason is not None
            if ends:
                self._ended.add(place)
            self._watch(self._watches[place], answer, chunk)
            if ends and chunk.completion is None:
                self._ticket.cancel(place)  # a stop string; the engine knows only tokens
            failure = _failure(answer)
            if failure is not None:
                raise failure
            yield Step(place, chunk, delta, counts, ends)

    def _watch(self, watch: Watch, answer: Answer, chunk: Chunk) -> None:
        if chunk.completion is not None and answer.finish_reason != chunk.completion.finish_reason:
            watch.end(answer.finish_reason or "", answer.stats)  # "stop", where the engine says "cancelled"
        watch.add(chunk)

    def stop(self, place: int) -> None:
        """End a choice here; its last step comes with the engine's end of it."""
        self.answers[place].finish_reason = "stop"
        self._ticket.cancel(place)

    def close(self) -> None:
        """Cancel what still runs."""
        self._ticket.cancel()
        for watch in self._watches:
            watch.end("cancelled")

    def usage(self) -> dict[str, object]:
        """The usage of all choices."""
        stats = Stats()
        for answer in self.answers:
            stats.merge(answer.stats or Stats())
        told = stats.as_dict()
        del told["tokens"]
        reused = sum(answer.stats.reused_tokens for answer in self.answers[:: self.job.n] if answer.stats)
        completion = sum(answer.tokens for answer in self.answers)
        return {
            "prompt_tokens": self.job.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.job.prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": reused},
            "eyas": told,
        }


def _failure(answer: Answer) -> ApiError | None:
    """Endings that are no answers."""
    if answer.finish_reason == "deadline":
        return ApiError(504, "the request took longer than this server allows", code="deadline_exceeded")
    if answer.finish_reason == "cancelled":
        return unavailable("the server cancelled the request: it is going down")
    blamed, _, why = (answer.error or "").partition(": ")
    if answer.finish_reason == "error" and blamed == RequestError.__name__:
        return ApiError(400, why, code="request_failed")
    if answer.finish_reason == "error":
        return ApiError(500, f"the engine failed on this request: {answer.error}", code="engine_error")
    return None
