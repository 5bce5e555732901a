"""The engine: requests in, tokens out, offline and serving alike.

`generate` and the streams are loops over steps. Not thread-safe: one thread owns an engine.
How a step goes, and what happens when something in it fails, is in `stepper.py`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from eyas.engine.controller import Controller
from eyas.engine.round import RoundOutput, Speculation
from eyas.engine.sequence import SequenceState
from eyas.engine.stepper import Stepper
from eyas.errors import RequestError, UsageError
from eyas.targets import Target
from eyas.types import Chunk, Completion, EngineState, Limits, Request
from eyas.verify import Grammar, SeededWalk, WalkRule, check_request, grammar_of


class Engine:
    """A target, perhaps a drafter, and the slots their sequences run in."""

    def __init__(
        self,
        target: Target,
        tokenizer: Any = None,
        speculation: Speculation | None = None,
        *,
        batch_size: int | None = None,
        rule: WalkRule | None = None,
        prefill_chunk: int = 512,
        controller: Controller | None = None,
        limits: Limits | None = None,
    ) -> None:
        """`batch_size` sequences run at once (1 by default), or what `limits` say; `prefill_chunk` tokens of a prompt
        go through a pass. A `controller` chooses each round's tree instead of `speculation.tree`.

        Raises UsageError.
        """
        if limits is not None and batch_size is not None:
            raise UsageError("batch_size and limits both say how many sequences run: give one of them")
        if batch_size is not None and batch_size < 1:
            raise UsageError(f"batch size must be at least 1, got {batch_size}")
        if prefill_chunk < 1:
            raise UsageError(f"prefill chunk must be at least 1, got {prefill_chunk}")
        if controller is not None and speculation is None:
            raise UsageError("a controller plans drafts: it needs a drafter")
        self.target, self.tokenizer, self.speculation = target, tokenizer, speculation
        self.limits = limits or Limits(max_running=batch_size or 1)
        self.batch_size = self.limits.max_running
        self.rule, self.prefill_chunk, self.controller = rule or SeededWalk(), prefill_chunk, controller
        self.eos_ids = _eos_ids(target, tokenizer)
        self._stepper = Stepper(target, speculation, self.rule, self.eos_ids, self.limits, prefill_chunk, controller)
        self._live: dict[int, SequenceState] = {}
        self._outbox: list[Chunk] = []  # for the next `step`
        self._inboxes: dict[int, deque[Chunk | Exception]] = {}  # of streams, which take their chunks here
        self._submitted = 0

    def reuse_prefixes(self, tokens: int) -> None:
        """From now on keep up to `tokens` tokens' caches for requests that begin alike, if that isn't done yet."""
        self._stepper.reuse_prefixes(tokens)

    def check(self, request: Request) -> None:
        """Raise RequestError when a request can't run."""
        check_request(request.params, request.prompt, self._stop_ids(request), self.target.vocab_size)
        room = self.target.max_length
        if room is not None and len(request.prompt) >= room:
            raise RequestError(
                f"the prompt has {len(request.prompt)} tokens, the model's context holds {room}: shorten the prompt"
            )
        self._grammar(request)

    def submit(self, request: Request, *, deadline: float | None = None, queue_key: str = "") -> int:
        """Queue a request; returns its index, which its chunks carry.

        It ends with `deadline` when `deadline` seconds have passed. Requests of different `queue_key`s share the
        slots fairly. RequestError if it can't run, QueueFullError if too many wait.
        """
        self.check(request)
        limit = request.params.max_tokens
        if self.target.max_length is not None:
            limit = min(limit, self.target.max_length - len(request.prompt))
        expires = None if deadline is None else time.monotonic() + deadline
        stops = frozenset(self._stop_ids(request))
        grammar = self._grammar(request)
        sequence = SequenceState(self._submitted, request, limit, stops, queue_key, expires, grammar=grammar)
        self._stepper.scheduler.submit(sequence)
        self._submitted += 1
        self._live[sequence.index] = sequence
        return sequence.index

    def cancel(self, index: int) -> None:
        """End a request now; its last chunk comes with the next step. Nothing happens if it has ended already."""
        if index in self._live:
            self._stepper.end([self._live[index]], "cancelled")
            self._hand_out()

    def step(self) -> list[Chunk]:
        """Advance everything by one round; what was added, and the ends of requests, by `submit`'s index."""
        self._advance()
        chunks, self._outbox = self._outbox, []
        return chunks

    @property
    def idle(self) -> bool:
        """Is there nothing left to run or to hand out?"""
        return not self._stepper.scheduler.busy and not self._outbox

    def state(self) -> EngineState:
        """What runs and waits, what is cached, what was counted."""
        return self._stepper.state()

    @property
    def outcome(self) -> RoundOutput | None:
        """What the last step's round did; None if it had none."""
        return self._stepper.outcome

    def check_invariants(self) -> None:
        """InvariantError if slots, caches and scheduler disagree. Cheap; between steps only."""
        self._stepper.check(self._live.values())

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Run all requests, `batch_size` at a time; completions in the order of the requests."""
        done = {chunk.index: chunk.completion for chunk in self.stream(requests) if chunk.completion is not None}
        return [done[i] for i in range(len(requests))]

    def stream(self, requests: Sequence[Request]) -> Iterator[Chunk]:
        """Run all requests, yielding what each round adds to each sequence."""
        for request in requests:
            self.check(request)
        waiting = iter(requests)
        yield from self.stream_from(lambda room: list(islice(waiting, room)))

    def stream_from(self, take: Callable[[int], Sequence[Request]]) -> Iterator[Chunk]:
        """Run requests as they come, until none runs and none comes.

        Before every round with free slots `take(room)` hands out at most `room` requests, so an answer can decide what
        is asked next. `Chunk.index` counts them. Raises RequestError for one that can't run (`check` it before), and
        what made a request end with `error`. Streams may run side by side, and beside `step`.
        """
        inbox: deque[Chunk | Exception] = deque()
        mine: dict[int, int] = {}
        asked = 0
        try:
            while True:
                room = self.limits.max_running - len(mine)
                for request in take(room) if room else ():
                    index = self.submit(request)
                    self._inboxes[index], mine[index] = inbox, asked
                    asked += 1
                if not mine:
                    return
                self._advance()
                while inbox:
                    chunk = inbox.popleft()
                    if isinstance(chunk, Exception):
                        raise chunk
                    place = mine[chunk.index]
                    if chunk.completion is not None:
                        del mine[chunk.index]
                    yield replace(chunk, index=place)
        finally:
            for index in mine:
                self.cancel(index)

    def _advance(self) -> None:
        self._stepper.advance()
        self._hand_out()

    def _hand_out(self) -> None:
        """Put what was added where it is waited for."""
        for added in self._stepper.take():
            sequence, done = added.sequence, None
            inbox = self._inboxes.get(sequence.index)
            if added.last:
                done = self._completion(sequence, added.error)
                del self._live[sequence.index]
                self._inboxes.pop(sequence.index, None)
            chunk = Chunk(sequence.index, added.tokens, added.accepted, done, added.draft, added.logprobs)
            if inbox is None:
                self._outbox.append(chunk)
            else:
                inbox.append(chunk if added.error is None else added.error)

    def _stop_ids(self, request: Request) -> tuple[int, ...]:
        return request.params.stop_token_ids + (() if request.params.ignore_eos else self.eos_ids)

    def _grammar(self, request: Request) -> Grammar | None:
        return grammar_of(request, self.tokenizer, self.eos_ids, self.target.vocab_size)

    def _completion(self, sequence: SequenceState, error: Exception | None) -> Completion:
        return Completion(
            id=sequence.request.id,
            token_ids=sequence.tokens,
            text=self.tokenizer.decode(sequence.tokens, skip_special_tokens=True) if self.tokenizer else "",
            finish_reason=sequence.finish_reason or "length",
            stats=sequence.stats,
            lossy=self.speculation is not None and not self.rule.lossless,
            error=sequence.error if error is None else f"{type(error).__name__}: {error}",
            logprobs=None if sequence.request.params.logprobs is None else tuple(sequence.logprobs),
        )


def _eos_ids(target: Target, tokenizer: Any) -> tuple[int, ...]:
    """Every id that ends an answer: the generation config's, else the model config's, and the tokenizer's."""
    generation = getattr(target.model, "generation_config", None)
    found = getattr(generation, "eos_token_id", None)
    if found is None:
        found = getattr(target.config, "eos_token_id", None)
    ids = [] if found is None else [found] if isinstance(found, int) else list(found)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    return tuple(sorted(set(ids)))


# A conversation: each turn reads only what is new since the one before.


_TOKENS = 32768
"""Kept where the model doesn't say how long a context may become."""


class Conversation:
    """Turns of one chat. An engine may have several, and other requests beside them."""

    def __init__(self, engine: Engine) -> None:
        engine.reuse_prefixes(engine.target.max_length or _TOKENS)
        self._engine = engine

    def turn(self, request: Request) -> Iterator[Chunk]:
        """Stream the answer to a prompt that (usually) continues the last one."""
        yield from self._engine.stream([request])
