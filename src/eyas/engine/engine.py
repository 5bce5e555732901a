"""The engine: requests in, tokens out, offline and serving alike.

`step` is the engine: the scheduler decides who runs, the runner reads prompts a chunk further or advances all that
decode by a round, and what came of it is handed out as chunks. `generate` and the streams are loops over steps. Not
thread-safe: one thread owns an engine.

When a step fails: a sequence that can't be started ends with `error`; when a pass itself fails, all in slots do. When
memory runs out, they are read again, fewer at a time and in smaller passes; one that can't be run even alone ends with
`error`. A step that is interrupted (Ctrl-C) loses what the slots hold: the next one reads the sequences again.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from typing import Any

from eyas.engine.controller import Controller
from eyas.engine.round import RoundOutput, Speculation
from eyas.engine.runner import ModelRunner, draft_rounds, pass_tokens, staging_columns, state_columns
from eyas.engine.scheduler import Move, Scheduler
from eyas.engine.sequence import SequenceState
from eyas.errors import CacheMemoryError, InvariantError, PassMemoryError, RequestError, UsageError
from eyas.runtime import inference
from eyas.targets import Target
from eyas.targets.native.linears import lone_torch
from eyas.targets.slots import dense_columns
from eyas.targets.tokenizers import eos_token_ids, turn_end_ids
from eyas.types import Chunk, Completion, EngineState, Limits, Request
from eyas.verify import Grammar, SeededWalk, WalkRule, check_request, grammar_of


class Engine:
    """A target, perhaps a drafter, and the slots their sequences run in, which are this engine's alone."""

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
        """At most `batch_size` sequences run at once (1 by default), or what `limits` say.

        A pass reads at most `prefill_chunk` tokens of a prompt. A `controller` chooses the tree of each round instead
        of `speculation.tree`. Raises UsageError.
        """
        if limits is not None and batch_size is not None:
            raise UsageError("batch_size and limits both say how many sequences run: give one of them")
        for name, value in (("batch size", batch_size), ("prefill chunk", prefill_chunk)):
            if value is not None and value < 1:
                raise UsageError(f"{name} must be at least 1, got {value}")
        if controller is not None and speculation is None:
            raise UsageError("a controller plans drafts: it needs a drafter")
        if speculation is not None:  # the weights may serve other engines, the slots are this one's
            speculation = replace(speculation, drafter=speculation.drafter.fresh())
        self.target, self.tokenizer, self.speculation = target, tokenizer, speculation
        self.limits = limits or Limits(max_running=batch_size or 1)
        self.rule, self.controller, self.batch_size = rule or SeededWalk(), controller, self.limits.max_running
        self.eos_ids, self._turn_end_ids = eos_token_ids(target.model), turn_end_ids(tokenizer)
        self.outcome: RoundOutput | None = None
        """The output of the last step's round; None if it had none."""
        enough = target.dense_pass if target.head_is_exact else None
        self._scheduler = Scheduler(self.limits, dense_columns(target.device), enough)
        self._runner = ModelRunner(
            target, speculation, self.rule, controller, max_running=self.batch_size, prefill_chunk=prefill_chunk
        )
        self._scheduler.room.beside = state_columns(self._runner.cache)
        if self.limits.prefix_tokens:
            self.cache_prefixes(self.limits.prefix_tokens)
        self._unfinished: dict[int, SequenceState] = {}
        self._outbox: list[Chunk] = []  # for the next `step`
        self._inboxes: dict[int, deque[Chunk | Exception]] = {}  # of streams, which take their chunks here
        self._submitted = self._rounds = self._prompt_tokens = self._prefix_hits = self._generated = 0
        self._finished: Counter[str] = Counter()

    def cache_prefixes(self, tokens: int) -> None:
        """From now on keep up to `tokens` tokens' caches for requests that begin alike (prefix caching)."""
        self._runner.cache_prefixes(tokens)
        self._scheduler.room.beside = state_columns(self._runner.cache)

    def check(self, request: Request) -> None:
        """Raise RequestError when a request can't run."""
        check_request(request.params, request.prompt, self._stop_ids(request), self.target.vocab_size)
        room = self.target.max_length
        if room is not None and len(request.prompt) >= room + (request.params.max_tokens == 0):
            raise RequestError(
                f"the prompt has {len(request.prompt)} tokens, the model's context holds {room}: shorten the prompt"
            )
        if request.params.prompt_logprobs is not None and not self.target.head_is_exact:
            raise RequestError(f"{self.target.config.model_type}: prompt_logprobs can't be computed for this model")
        self._grammar(request)

    def submit(self, request: Request, *, deadline: float | None = None, queue_key: str = "") -> int:
        """Queue a request; returns its index, which its chunks carry.

        It ends with `deadline` when `deadline` seconds have passed. `queue_key` is `CLIENT` or `CLIENT/USER`: clients
        share the slots fairly, and users what their client gets. RequestError if it can't run, QueueFullError if too
        many wait.
        """
        self.check(request)
        limit = request.params.max_tokens
        if self.target.max_length is not None:
            limit = min(limit, self.target.max_length - len(request.prompt))
        expires = None if deadline is None else time.monotonic() + deadline
        stops = frozenset(self._stop_ids(request))
        sequence = SequenceState(self._submitted, request, limit, stops, queue_key, expires, self._grammar(request))
        self._scheduler.submit(sequence)
        self._submitted += 1
        self._unfinished[sequence.index] = sequence
        return sequence.index

    def cancel(self, index: int) -> None:
        """End a request now; its last chunk comes with the next step. Nothing happens if it has ended already."""
        if index in self._unfinished:
            self._end([self._unfinished[index]], "cancelled")

    def _stop_ids(self, request: Request) -> tuple[int, ...]:
        return request.params.stop_token_ids + (() if request.params.ignore_eos else self.end_ids(request))

    def end_ids(self, request: Request) -> tuple[int, ...]:
        """The tokens at which the answer to a request ends by itself: those of the model, and of its chats."""
        ids = self.eos_ids + (self._turn_end_ids if request.chat else ())
        if not ids and request.grammar is not None and self.tokenizer is not None:
            return tuple(token for token in (self.tokenizer.eos_token_id,) if token is not None)  # it has to end
        return ids

    def _grammar(self, request: Request) -> Grammar | None:
        if request.grammar is None:
            return None
        return grammar_of(request, self.tokenizer, self.end_ids(request), self.target.vocab_size)

    def step(self) -> list[Chunk]:
        """Advance everything by one step; returns what was added and what ended, by `submit`'s index."""
        self._advance()
        chunks, self._outbox = self._outbox, []
        return chunks

    @inference  # all of it: tensors that a pass allocates can't be changed outside
    def _advance(self) -> None:
        with lone_torch() if self.target.alone else nullcontext():
            self._run_step()

    def _run_step(self) -> None:
        """Admit, read a piece of the prompts, run one round. First tokens leave at once: they end the step."""
        scheduler, runner = self._scheduler, self._runner
        now = time.monotonic()
        self.outcome = None
        self._end(scheduler.expired(now), "deadline")
        if not scheduler.busy:
            return
        scheduler.begin(staging_columns(runner.tree), now)
        if not scheduler.in_slots:
            runner.reset_sampler()
        if not runner.intact:
            runner.empty(scheduler.room)
        intact = False
        try:
            ended = False
            if not scheduler.round_due():
                self._admit(now)
                ended = self._prefill()
            if not ended:
                self._decode()
            if not scheduler.busy and scheduler.shrink():  # the system gets memory back
                runner.reshape(scheduler.room)
            if not scheduler.busy and self.controller is not None:
                self.controller.gain.keep()
            scheduler.passes.succeeded()
            intact = True
        except (CacheMemoryError, PassMemoryError) as error:
            runner.intact = False
            if not scheduler.run_less(error):
                self._end(scheduler.in_slots, "error", error)
            runner.free_memory()
        except Exception as error:  # noqa: BLE001 - whatever breaks a pass ends those in it, not the engine
            runner.intact = False
            self._end(scheduler.in_slots, "error", error)
        finally:
            if not intact:
                runner.intact = False
                scheduler.preempt(scheduler.in_slots)

    def _admit(self, now: float) -> None:
        """Start waiting sequences as long as there is room, and no more known prompts to copy than may be read."""
        scheduler, chunk = self._scheduler, self.limits.prefill_chunk
        staging = staging_columns(self._runner.tree)
        while chunk is None or scheduler.copied < (1 if scheduler.crowded else chunk):
            sequence, moves = scheduler.admit(staging, now)
            if sequence is None:
                if not (crowding := scheduler.crowding(staging)):
                    return
                self._leave(crowding, scheduler.preempt)
                continue
            try:
                self._cover(0)
                self._runner.move((), moves)
                self._runner.start(sequence, self.end_ids(sequence.request))
            except CacheMemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - its own fault, whatever it is
                self._end([sequence], "error", error)
                continue
            scheduler.copied += sequence.cached
            if not sequence.tokens:  # else it ran before and was preempted
                self._prompt_tokens += len(sequence.request.prompt)
                self._prefix_hits += sequence.cached
                sequence.admitted(now)

    def _prefill(self) -> bool:
        """Read a piece of the prompts; returns whether that ends the step: first tokens came, or steps are short."""
        scheduler, runner = self._scheduler, self._runner
        self._cover(0)
        started = time.perf_counter()
        waiting, batches, first_rounds = list(scheduler.prefilling), scheduler.prefill_batches(), []
        for batch in batches:
            scored = any(one.unscored or not one.limit for one in batch.sequences)
            if batch.whole and self.target.head_is_exact and not scored:
                first_rounds.append((batch.sequences, runner.first_round(batch)))
            else:
                runner.prefill(batch)
        seconds = time.perf_counter() - started
        if batches:
            scheduler.charge_prompts(batches, seconds)
        for sequence in waiting:
            sequence.stats.prefill_seconds += seconds
        runner.cache_prefix([sequence for sequence in waiting if not sequence.unread], tail=False)
        scheduler.read(batches)
        for sequences, output in first_rounds:
            self._collect(sequences, output, None)
        self._end([one for one in scheduler.decoding if not one.limit], "length")
        return bool(first_rounds) or (scheduler.crowded and bool(batches) and bool(scheduler.decoding))

    def _decode(self) -> None:
        """Advance those that decode by a round, whoever must make room or wait for others left out."""
        scheduler, runner = self._scheduler, self._runner
        if victims := scheduler.overflow():
            self._leave(victims, scheduler.preempt)
        decoding = scheduler.turn(runner.ready)
        if not decoding:
            runner.await_grammars(scheduler.decoding)
            return
        started = time.perf_counter()
        tree, reading = runner.plan(decoding)
        if not scheduler.fits(staging_columns(tree)) or not scheduler.passes.fits(pass_tokens(len(decoding), tree)):
            tree = None  # a plain round costs less than reading a preempted sequence again
        self._cover(staging_columns(tree))
        self.outcome = runner.round(decoding, tree)
        self._rounds += 1
        seconds = time.perf_counter() - started
        scheduler.charge_round(decoding, seconds)
        self._collect(decoding, self.outcome, seconds - reading)

    def _collect(self, sequences: Sequence[SequenceState], output: RoundOutput, seconds: float | None) -> None:
        """Append a round's tokens to its sequences and hand them out; free the slots of the finished.

        `seconds` is what the round took; None if it came with prefill, whose time is counted already.
        """
        traced = [row for row, sequence in enumerate(sequences) if sequence.request.trace]
        drafts = draft_rounds(output.draft, [sequence.root for sequence in sequences], traced)
        for row, sequence in enumerate(sequences):
            taken, logprobs = sequence.take(output, row, seconds)
            self._generated += len(taken)
            if sequence.finish_reason is not None:
                self._finished[sequence.finish_reason] += 1
            accepted = min(output.accepted[row], len(taken))
            chunk = Chunk(sequence.index, tuple(taken), accepted, draft=drafts.get(row), logprobs=logprobs)
            self._hand_out(sequence, chunk)
        finished = [sequence for sequence in sequences if sequence.finish_reason is not None]
        self._leave(finished, self._scheduler.drop)

    @inference
    def _end(self, sequences: Collection[SequenceState], reason: str, error: Exception | None = None) -> None:
        """End sequences wherever they are; not while a round runs."""
        sequences = list(sequences)
        for sequence in sequences:
            sequence.finish_reason = reason
            self._finished[reason] += 1
            self._hand_out(sequence, Chunk(sequence.index, (), 0), error)
            if sequence in self._scheduler.waiting:
                self._scheduler.waiting.remove(sequence)
        self._leave([sequence for sequence in sequences if sequence.slot is not None], self._scheduler.drop)

    def _leave(self, gone: Collection[SequenceState], drop: Callable[[Collection[SequenceState]], list[Move]]) -> None:
        """Free the slots of sequences that the scheduler is to `drop`; the prefix cache keeps what they hold."""
        if gone:
            self._runner.keep(gone)
            slots = [sequence.slot for sequence in gone if sequence.slot is not None]
            self._runner.move(slots, drop(gone))

    def _hand_out(self, sequence: SequenceState, chunk: Chunk, error: Exception | None = None) -> None:
        """Put a chunk where it is waited for: in a stream's inbox, or in the outbox of `step`."""
        inbox = self._inboxes.get(sequence.index)
        if len(chunk.token_ids) == len(sequence.tokens):  # its first
            chunk = replace(chunk, prompt_logprobs=sequence.known_prompt_logprobs)
        if sequence.finish_reason is not None:
            rule = SeededWalk() if self.speculation is None else self.rule
            chunk = replace(chunk, completion=sequence.completion(self.tokenizer, rule, error))
            del self._unfinished[sequence.index]
            self._inboxes.pop(sequence.index, None)
        if inbox is None:
            self._outbox.append(chunk)
        else:
            inbox.append(chunk if error is None else error)

    def _cover(self, staging: int) -> None:
        """Let the caches grow to what those in slots need, `staging` columns of a round included."""
        scheduler = self._scheduler
        if scheduler.room.cover(scheduler.columns(staging), scheduler.expected):
            self._runner.reshape(scheduler.room)

    @property
    def idle(self) -> bool:
        """Whether nothing is left to run or to hand out."""
        return not self._scheduler.busy and not self._outbox

    def state(self) -> EngineState:
        """What runs and waits, what is cached, what was counted."""
        scheduler, prefixes = self._scheduler, self._runner.prefixes
        return EngineState(
            running=len(scheduler.decoding),
            prefilling=len(scheduler.prefilling),
            waiting=len(scheduler.waiting),
            cached_tokens=sum(sequence.cached for sequence in scheduler.in_slots),
            allocated_tokens=scheduler.room.tokens,
            cache_limit=scheduler.room.limit,
            prefix_tokens=0 if prefixes is None else prefixes.store.size,
            prefix_limit=0 if prefixes is None else prefixes.store.limit,
            preempted_total=scheduler.preempted_total,
            prompt_tokens_total=self._prompt_tokens,
            prefix_hit_tokens_total=self._prefix_hits,
            generated_tokens_total=self._generated,
            rounds_total=self._rounds,
            finished_total=dict(self._finished),
        )

    def check_invariants(self) -> None:
        """InvariantError if requests, scheduler, slots and caches disagree. Cheap; between steps only."""
        scheduler, unfinished = self._scheduler, self._unfinished.values()
        everyone = {*scheduler.in_slots, *scheduler.waiting}
        if everyone != set(unfinished) or len(everyone) != len(scheduler.in_slots) + len(scheduler.waiting):
            raise InvariantError("the unfinished requests are not those in slots and those waiting")
        scheduler.check()
        self._runner.check(scheduler.in_slots, scheduler.room)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Run all requests, `batch_size` at a time; completions in the order of the requests."""
        done = {chunk.index: chunk.completion for chunk in self.stream(requests) if chunk.completion is not None}
        return [done[i] for i in range(len(requests))]

    def stream(self, requests: Sequence[Request], stop: Callable[[], bool] = bool) -> Iterator[Chunk]:
        """Run all requests, yielding what each round adds to each sequence; `stop` as in `stream_from`."""
        for request in requests:
            self.check(request)
        waiting = iter(requests)
        yield from self.stream_from(lambda room: list(islice(waiting, room)), stop)

    def stream_from(self, take: Callable[[int], Sequence[Request]], stop: Callable[[], bool] = bool) -> Iterator[Chunk]:
        """Run requests as they come, until none runs and none comes.

        Before every round with free slots `take(room)` hands out at most `room` requests, so an answer can decide what
        is asked next. `Chunk.index` counts them. Raises RequestError for one that can't run (`check` it before), and
        what made a request end with `error`. Streams may run side by side, and beside `step`. Once `stop()` is true
        (`bool()`: never), what runs ends as `cancelled`, and nothing is taken any more.
        """
        inbox: deque[Chunk | Exception] = deque()
        mine: dict[int, int] = {}
        submitted = 0
        try:
            while True:
                room = 0 if stop() else self.limits.max_running - len(mine)
                for request in take(room) if room else ():
                    index = self.submit(request)
                    self._inboxes[index], mine[index] = inbox, submitted
                    submitted += 1
                if not mine:
                    return
                for index in mine if stop() else ():
                    self.cancel(index)
                self._advance()
                while inbox:
                    chunk = inbox.popleft()
                    if isinstance(chunk, Exception):
                        raise chunk
                    yield replace(chunk, index=mine[chunk.index] if chunk.completion is None else mine.pop(chunk.index))
        finally:
            for index in mine:
                self.cancel(index)
