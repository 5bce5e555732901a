"""The engine: requests in, tokens out, offline and serving alike.

A step is: the scheduler decides, prompts are read a piece further, every decoding sequence advances by one round, and
who is finished leaves. `generate` and the streams are loops over steps. Not thread-safe: one thread owns an engine.

A request that can't be admitted ends with `error`, the others go on. So do those waiting when a pass itself fails:
all in slots end with `error` and the slots start over empty. A step that is interrupted (Ctrl-C) loses the slots'
contents, nothing else: the sequences are read again by the next step.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from eyas.engine.caches import SlotCaches
from eyas.engine.controller import Controller, RoundRecord
from eyas.engine.draft_round import draft_rounds
from eyas.engine.limits import Limits
from eyas.engine.reuse import PrefixReuse
from eyas.engine.round import Outcome, Speculation, run_round
from eyas.engine.scheduler import Move, Scheduler
from eyas.engine.sequence import LiveSequence
from eyas.engine.staging import staging_columns
from eyas.engine.state import EngineState
from eyas.errors import InvariantError, RequestError, UsageError
from eyas.target import Target
from eyas.tree import TreeSpec
from eyas.types import Chunk, Completion, Request
from eyas.verify import SeededWalk, WalkRule, check_request


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
        self._scheduler = Scheduler(self.limits)
        drafter = None if speculation is None else speculation.drafter
        self._caches = SlotCaches(target, drafter, self.limits.max_running)
        self._reuse: PrefixReuse | None = None
        self._hits = 0
        if self.limits.prefix_tokens:
            self.reuse_prefixes(self.limits.prefix_tokens)
        self._tree = None if speculation is None else speculation.tree
        """The shape of the last round."""
        self.outcome: Outcome | None = None
        """What the last step's round did; None if it had none."""
        self._live: dict[int, LiveSequence] = {}
        self._outbox: list[Chunk] = []  # for the next `step`
        self._inboxes: dict[int, deque[Chunk | Exception]] = {}  # of streams, which take their chunks here
        self._submitted = self._rounds = self._prompt_tokens = self._generated = 0
        self._finished: Counter[str] = Counter()

    def reuse_prefixes(self, tokens: int) -> None:
        """From now on keep up to `tokens` tokens' caches for requests that begin alike, if that isn't done yet."""
        if self._reuse is None:
            drafter = None if self.speculation is None else self.speculation.drafter
            self._reuse = PrefixReuse(self.target, drafter, tokens)

    def check(self, request: Request) -> None:
        """Raise RequestError when a request can't run."""
        check_request(request.params, request.prompt, self._stop_ids(request), self.target.vocab_size)
        room = self.target.max_length
        if room is not None and len(request.prompt) >= room:
            raise RequestError(
                f"the prompt has {len(request.prompt)} tokens, the model's context holds {room}: shorten the prompt"
            )

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
        sequence = LiveSequence(self._submitted, request, limit, stops, queue_key, expires)
        self._scheduler.submit(sequence)
        self._submitted += 1
        self._live[sequence.index] = sequence
        return sequence.index

    @torch.inference_mode()
    def cancel(self, index: int) -> None:
        """End a request now; its last chunk comes with the next step. Nothing happens if it has ended already."""
        if index in self._live:
            self._end([self._live[index]], "cancelled")

    def step(self) -> list[Chunk]:
        """Advance everything by one round; what was added, and the ends of requests, by `submit`'s index."""
        self._advance()
        chunks, self._outbox = self._outbox, []
        return chunks

    @property
    def idle(self) -> bool:
        """Is there nothing left to run or to hand out?"""
        return not self._scheduler.busy and not self._outbox

    def state(self) -> EngineState:
        """What runs and waits, what is cached, what was counted."""
        scheduler = self._scheduler
        return EngineState(
            running=len(scheduler.decoding),
            prefilling=len(scheduler.prefilling),
            waiting=len(scheduler.waiting),
            cached_tokens=sum(one.cached for one in scheduler.placed),
            allocated_tokens=scheduler.room.tokens,
            cache_limit=scheduler.room.limit,
            prefix_tokens=0 if self._reuse is None else self._reuse.store.size,
            prefix_limit=0 if self._reuse is None else self._reuse.store.limit,
            preempted_total=scheduler.preempted_total,
            prompt_tokens_total=self._prompt_tokens,
            prefix_hit_tokens_total=self._hits,
            generated_tokens_total=self._generated,
            rounds_total=self._rounds,
            finished_total=dict(self._finished),
        )

    def check_invariants(self) -> None:
        """InvariantError if slots, caches and scheduler disagree. Cheap; between steps only."""
        scheduler, placed = self._scheduler, self._scheduler.placed
        live = {*placed, *scheduler.waiting}
        if live != set(self._live.values()) or len(live) != len(placed) + len(scheduler.waiting):
            raise InvariantError("the live requests are not those in slots and those waiting")
        if len(placed) > self.limits.max_running:
            raise InvariantError(f"{len(placed)} sequences are in slots, at most {self.limits.max_running} may be")
        if not scheduler.room.fits(scheduler.room.slots, scheduler.room.columns):
            raise InvariantError(f"the cache holds {scheduler.room.tokens} tokens, more than {scheduler.room.limit}")
        for slot, sequence in enumerate(placed):
            if sequence.slot != slot or sequence.finish_reason is not None:
                raise InvariantError(f"slot {slot} is held by a sequence of slot {sequence.slot}")
            if (sequence.unread == 0) != (slot < len(scheduler.decoding)):
                raise InvariantError(f"slot {slot}: {sequence.unread} tokens unread, out of order")
        if self._reuse is not None:
            self._reuse.store.check()
        if self.target.holder is self._caches:
            self._caches.check(placed, scheduler.room)

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

    @torch.inference_mode()  # all of it: what a pass allocates can't be changed outside
    def _advance(self) -> None:
        scheduler, now = self._scheduler, time.monotonic()
        self.outcome = None
        if expired := scheduler.expired(now):
            self._end(expired, "deadline")
        if not scheduler.busy:
            return
        if not scheduler.placed:
            self._caches.renew_sampler()
        if not self._caches.claim(scheduler.room):
            scheduler.preempt(scheduler.placed)
        intact = False
        try:
            self._admit(now)
            self._prefill()
            self._decode()
        except Exception as error:  # noqa: BLE001 - whatever breaks a pass ends those in it, not the engine
            self._end(scheduler.placed, "error", error)
        else:
            intact = True
        finally:
            self._caches.release(intact)

    def _admit(self, now: float) -> None:
        scheduler, staging = self._scheduler, staging_columns(self._tree)
        while (sequence := scheduler.admit(staging, now)) is not None:
            try:
                self._enter(sequence)
            except Exception as error:  # noqa: BLE001 - its own fault, whatever it is
                self._end([sequence], "error", error)

    def _enter(self, sequence: LiveSequence) -> None:
        """Begin a sequence in its slot."""
        self._cover(1)
        self._caches.enter(sequence, self.eos_ids)
        if self._reuse is not None:
            sequence.cached = self._reuse.load(sequence)
        if not sequence.tokens:  # else it was here before
            self._prompt_tokens += len(sequence.request.prompt)
            self._hits += sequence.cached

    def _prefill(self) -> None:
        scheduler = self._scheduler
        self._cover(1)
        began = time.perf_counter()
        reading = list(scheduler.prefilling)
        for piece in scheduler.pieces():
            self._caches.prefill(piece, self.prefill_chunk, self._tree is not None)
            for sequence, count in zip(piece.sequences, piece.counts, strict=True):
                sequence.cached += count
        for sequence in reading:
            sequence.stats.prefill_seconds += time.perf_counter() - began
            if self._reuse is not None and not sequence.unread:
                self._reuse.save(sequence, tail=False)
        scheduler.promote()

    def _decode(self) -> None:
        scheduler = self._scheduler
        if not scheduler.decoding:
            return
        tree = self._plan()
        if victims := scheduler.overflow(staging_columns(tree)):
            self._leave(victims, scheduler.preempt)
            tree = self._plan() if scheduler.decoding else None
        if not scheduler.decoding:
            return
        if not scheduler.fits(staging_columns(tree)):
            tree = None
        self._cover(staging_columns(tree))
        decoding = list(scheduler.decoding)
        self.outcome, seconds = self._round(decoding, tree)
        self._rounds += 1
        self._collect(decoding, self.outcome, seconds)

    def _plan(self) -> TreeSpec | None:
        """The shape of the next round's trees."""
        if self.speculation is None or self.controller is None:
            return self._tree
        decoding = self._scheduler.decoding
        sampled = [sequence.request.params.temperature > 0.0 for sequence in decoding]
        self._tree = self.controller.plan(len(decoding), [sequence.cached for sequence in decoding], sampled)
        return self._tree

    def _round(self, decoding: Sequence[LiveSequence], tree: TreeSpec | None) -> tuple[Outcome, float]:
        lengths = [sequence.cached for sequence in decoding]
        live = [sequence.request.speculate for sequence in decoding]
        began = time.perf_counter()
        speculation = None if self.speculation is None else replace(self.speculation, tree=tree)
        roots = torch.tensor([sequence.root for sequence in decoding], device=self.target.device)
        rows = range(len(decoding))
        outcome = run_round(self.target, speculation, self._caches.sampler, rows, roots, self.rule, live)
        seconds = time.perf_counter() - began
        if self.controller is not None:
            record = RoundRecord(
                rows=len(decoding),
                lengths=lengths,
                spec=tree,
                evidence=outcome.evidence,
                draft_seconds=outcome.draft_seconds,
                pass_seconds=outcome.pass_seconds,
                tokens=outcome.pass_tokens,
                emitted=sum(outcome.accepted) + len(decoding),
                seconds=seconds,
            )
            self.controller.learn(record)
        return outcome, seconds

    def _collect(self, decoding: Sequence[LiveSequence], outcome: Outcome, seconds: float) -> None:
        """Give everyone what the round emitted; let go of those that are finished."""
        traced = [row for row, sequence in enumerate(decoding) if sequence.request.trace]
        drafts = draft_rounds(outcome.evidence, [sequence.root for sequence in decoding], traced)
        for row, sequence in enumerate(decoding):
            sequence.cached += outcome.accepted[row] + 1
            taken = sequence.extend(outcome.tokens[row], outcome.accepted[row], outcome.offered[row], seconds)
            self._generated += len(taken)
            done = None if sequence.finish_reason is None else self._finish(sequence, sequence.finish_reason)
            accepted = min(outcome.accepted[row], len(taken))
            self._post(Chunk(sequence.index, tuple(taken), accepted, done, drafts.get(row)))
        self._leave([sequence for sequence in decoding if sequence.finish_reason is not None], self._scheduler.drop)

    def _cover(self, staging: int) -> None:
        """Let the caches grow to what those in slots need."""
        scheduler = self._scheduler
        if scheduler.room.cover(len(scheduler.placed), scheduler.columns(staging)):
            self._caches.cover(scheduler.room)

    def _end(self, sequences: Sequence[LiveSequence], reason: str, error: Exception | None = None) -> None:
        """End sequences wherever they are, between rounds."""
        for sequence in sequences:
            if error is not None and (inbox := self._inboxes.get(sequence.index)) is not None:
                inbox.append(error)
            self._post(Chunk(sequence.index, (), 0, self._finish(sequence, reason, error)))
            if sequence in self._scheduler.waiting:
                self._scheduler.waiting.remove(sequence)
        self._leave([sequence for sequence in sequences if sequence.slot is not None], self._scheduler.drop)

    def _finish(self, sequence: LiveSequence, reason: str, error: Exception | None = None) -> Completion:
        """The end of a sequence."""
        sequence.finish_reason = reason
        del self._live[sequence.index]
        self._finished[reason] += 1
        return self._completion(sequence, error)

    def _post(self, chunk: Chunk) -> None:
        inbox = self._inboxes.get(chunk.index)
        if inbox is None:
            self._outbox.append(chunk)
        else:
            inbox.append(chunk)
            if chunk.completion is not None:
                del self._inboxes[chunk.index]

    def _leave(self, gone: Collection[LiveSequence], drop: Callable[[Collection[LiveSequence]], list[Move]]) -> None:
        """Free the slots of sequences that the scheduler is to `drop`; what they hold may be of use to others."""
        if not gone:
            return
        held = self._caches.held  # another engine may have taken the slots since the last step
        if held and self._reuse is not None:
            for sequence in gone:
                if sequence.finish_reason != "error":
                    self._reuse.save(sequence, tail=True)
        slots = [sequence.slot for sequence in gone if sequence.slot is not None]
        moves = drop(gone)
        if held:
            self._caches.move(slots, moves)

    def _stop_ids(self, request: Request) -> tuple[int, ...]:
        return request.params.stop_token_ids + (() if request.params.ignore_eos else self.eos_ids)

    def _completion(self, sequence: LiveSequence, error: Exception | None) -> Completion:
        return Completion(
            id=sequence.request.id,
            token_ids=sequence.tokens,
            text=self.tokenizer.decode(sequence.tokens, skip_special_tokens=True) if self.tokenizer else "",
            finish_reason=sequence.finish_reason or "length",
            stats=sequence.stats,
            lossy=self.speculation is not None and not self.rule.lossless,
            error=None if error is None else f"{type(error).__name__}: {error}",
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
