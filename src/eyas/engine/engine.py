"""The engine: requests in, tokens out, for offline generation and serving alike.

In each `step` the scheduler decides which sequences run, the runner prefills a chunk of the prompts or advances all
decoding sequences by a round, and the results are handed out as chunks. `generate` and the streams are loops over
steps. An engine isn't thread-safe: one thread owns it.

Failures: a sequence that can't be started ends with `error`. If a pass fails, all sequences in slots end with `error`.
If memory runs out, they are preempted and read again, fewer at a time and in smaller passes; a sequence that can't run
even alone ends with `error`. A step that is interrupted (Ctrl-C) loses the slots' contents, and the next step reads the
sequences again.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from eyas.engine.controller import Controller
from eyas.engine.round import RoundOutput, Speculation
from eyas.engine.round_log import RoundLog
from eyas.engine.runner import ModelRunner, draft_rounds, pass_tokens, staging_columns, state_columns
from eyas.engine.scheduler import Move, Scheduler
from eyas.engine.sequence import InputProcessor, SequenceState
from eyas.engine.tree_planner import FixedTree
from eyas.errors import CacheMemoryError, InvariantError, PassMemoryError, UsageError
from eyas.runtime import inference
from eyas.targets import Target
from eyas.targets.slots import dense_columns
from eyas.types import Chunk, Completion, EngineState, Limits, Request
from eyas.verify import SeededWalk, WalkRule


class Engine:
    """A target, optionally a drafter, and slots to run sequences in, which no other engine uses."""

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
        """Run at most `batch_size` sequences at the same time (1 by default), or as many as `limits` allow.

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
        if speculation is not None:  # engines may share weights, but not slots
            speculation = replace(speculation, drafter=speculation.drafter.fresh())
        self.target = target
        self.tokenizer = tokenizer
        self.speculation = speculation
        self.limits = limits or Limits(max_running=batch_size or 1)
        self.rule = rule or SeededWalk()
        self.controller = controller
        self.batch_size = self.limits.max_running
        self._inputs = InputProcessor(target, tokenizer)
        self.eos_ids = self._inputs.eos_ids
        self._outputs = OutputProcessor(tokenizer, SeededWalk() if speculation is None else self.rule)
        runner = ModelRunner(
            target,
            speculation,
            self.rule,
            controller or FixedTree(None if speculation is None else speculation.tree),
            max_running=self.batch_size,
            prefill_chunk=prefill_chunk,
            step_tokens=self.limits.prefill_chunk,
        )
        self._core = EngineCore(self.limits, runner, self._inputs, self._outputs)
        self._submitted = 0
        if self.limits.prefix_tokens:
            self.cache_prefixes(self.limits.prefix_tokens)

    def cache_prefixes(self, tokens: int) -> None:
        """Enable prefix caching for requests with common prefixes: keep the caches of up to `tokens` tokens."""
        self._core.cache_prefixes(tokens)

    def check(self, request: Request) -> None:
        """Raise RequestError when a request can't run."""
        self._inputs.check(request)

    def end_ids(self, request: Request) -> tuple[int, ...]:
        """The tokens with which the model ends an answer: its EOS tokens and, in chats, its end-of-turn tokens."""
        return self._inputs.end_ids(request)

    @property
    def outcome(self) -> RoundOutput | None:
        """The output of the last step's round; None if it had none."""
        return self._core.outcome

    def submit(self, request: Request, *, deadline: float | None = None, queue_key: str = "") -> int:
        """Queue a request; returns its index, which its chunks carry.

        It ends with `deadline` when `deadline` seconds have passed. `queue_key` is `CLIENT` or `CLIENT/USER`: clients
        share the slots fairly, and users share what their client gets. Raises RequestError if the request can't run,
        QueueFullError if too many wait.
        """
        sequence = self._inputs.sequence(self._submitted, request, deadline, queue_key)
        self._core.submit(sequence)
        self._submitted += 1
        return sequence.index

    def cancel(self, index: int) -> None:
        """End a request now; its last chunk comes with the next step. Does nothing if it has ended already."""
        if index in self._outputs.unfinished:
            self._core.end([self._outputs.unfinished[index]], "cancelled")

    def step(self) -> list[Chunk]:
        """Advance everything by one step; returns what was added and what ended, by `submit`'s index."""
        self._advance()
        return self._outputs.take()

    @inference  # for the whole step: tensors that a pass allocates can't be changed outside of inference mode
    def _advance(self) -> None:
        with self.target.backend.running():
            self._core.step()

    @property
    def idle(self) -> bool:
        """Whether nothing is left to run or to hand out."""
        return not self._core.scheduler.busy and not self._outputs.outbox

    def state(self) -> EngineState:
        """A snapshot of running and waiting requests, caches and counters."""
        core = self._core
        scheduler = self._core.scheduler
        running = self._core.scheduler.running
        prefixes = core.runner.slots.prefixes
        return EngineState(
            running=len(running.decoding),
            prefilling=len(running.prefilling),
            waiting=len(scheduler.waiting),
            cached_tokens=sum(sequence.cached for sequence in running.sequences),
            allocated_tokens=scheduler.room.tokens,
            cache_limit=scheduler.room.limit,
            prefix_tokens=0 if prefixes is None else prefixes.store.size,
            prefix_limit=0 if prefixes is None else prefixes.store.limit,
            preempted_total=scheduler.preempted_total,
            prompt_tokens_total=core.prompt_tokens,
            prefix_hit_tokens_total=core.prefix_hits,
            generated_tokens_total=self._outputs.generated,
            rounds_total=core.rounds,
            finished_total=dict(self._outputs.finished),
        )

    def check_invariants(self) -> None:
        """Raise InvariantError if requests, scheduler, slots and caches disagree. Cheap; only valid between steps."""
        scheduler, in_slots = self._core.scheduler, self._core.scheduler.running.sequences
        everyone = [*in_slots, *scheduler.waiting]
        if set(everyone) != set(self._outputs.unfinished.values()) or len(everyone) != len(set(everyone)):
            raise InvariantError("the unfinished requests are not those in slots and those waiting")
        scheduler.check()
        self._core.runner.slots.check(in_slots, scheduler.room)

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
        """Run requests as `take` returns them, until none is running and none is left.

        Before every round with free slots, `take(room)` returns at most `room` requests, so an answer can decide what
        is asked next. `Chunk.index` counts them. Raises RequestError for a request that can't run (`check` it first),
        and the exception that ended a request with `error`. Several streams may run at once, also with `step`. Once
        `stop()` is true (`bool()`: never), running requests end as `cancelled`, and no more are taken.
        """
        inbox: deque[Chunk | Exception] = deque()
        mine: dict[int, int] = {}
        submitted = 0
        try:
            while True:
                room = 0 if stop() else self.limits.max_running - len(mine)
                for request in take(room) if room else ():
                    index = self.submit(request)
                    self._outputs.inboxes[index] = inbox
                    mine[index] = submitted
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


class EngineCore:
    """The step: the scheduler decides, the runner runs, and the results go to the outputs."""

    def __init__(self, limits: Limits, runner: ModelRunner, inputs: InputProcessor, outputs: OutputProcessor) -> None:
        self.runner = runner
        self._inputs = inputs
        self._outputs = outputs
        enough = runner.target.dense_pass if runner.target.head_is_exact else None
        self.scheduler = Scheduler(limits, dense_columns(runner.target.device), enough)
        self.scheduler.room.state_columns = state_columns(runner.slots.cache)
        if runner.target.max_length is not None:
            self.scheduler.room.context = runner.target.max_length
        self.outcome: RoundOutput | None = None
        self._round_log = RoundLog.from_environment()
        self.rounds = self.prompt_tokens = self.prefix_hits = 0
        """Counts since the start: rounds, prompt tokens, and prompt tokens reused from the prefix cache."""

    def cache_prefixes(self, tokens: int) -> None:
        """Keep up to `tokens` tokens of prefixes; copies of recurrent states take memory besides the slots' columns."""
        self.runner.slots.cache_prefixes(tokens)
        self.scheduler.room.state_columns = state_columns(self.runner.slots.cache)

    def submit(self, sequence: SequenceState) -> None:
        """Queue a sequence; raises RequestError and QueueFullError as `Engine.submit` does."""
        self.scheduler.submit(sequence)
        self._outputs.unfinished[sequence.index] = sequence

    def step(self) -> None:
        """Admit sequences, prefill a chunk, run a round. First tokens end the step, so they wait for no round."""
        scheduler, runner = self.scheduler, self.runner
        slots = runner.slots
        now = time.monotonic()
        self.outcome = None
        self.end(scheduler.expired(now), "deadline")
        if not scheduler.busy:
            return
        scheduler.begin(staging_columns(runner.planner.tree), now)
        if not scheduler.running:
            slots.reset_sampler()
        if not slots.intact:
            slots.empty(scheduler.room)
        intact = False
        try:
            ended = False
            self._grow_ahead()
            if not scheduler.budget.round_due(scheduler.running, scheduler.waiting):
                self._admit(now)
                ended = self._prefill()
            if not ended:
                self._decode()
            if not scheduler.busy:
                slots.prepare(None)
                if scheduler.shrink():  # gives memory back to the system
                    slots.reshape(scheduler.room)
            if not scheduler.busy:
                runner.planner.keep()
            scheduler.passes.succeeded()
            intact = True
        except (CacheMemoryError, PassMemoryError) as error:
            slots.intact = False
            if not scheduler.reduce_load(error):
                self.end(scheduler.running.sequences, "error", error)
            slots.free_memory()
        except Exception as error:  # noqa: BLE001 - an error in a pass ends its sequences, not the engine
            slots.intact = False
            self.end(scheduler.running.sequences, "error", error)
        finally:
            if not intact:
                slots.intact = False
                scheduler.preempt(scheduler.running.sequences)

    def _admit(self, now: float) -> None:
        """Start waiting sequences while there is room and no more prompt tokens are copied than may be read."""
        scheduler = self.scheduler
        slots = self.runner.slots
        chunk = self.scheduler.limits.prefill_chunk
        staging = staging_columns(self.runner.planner.tree)
        while chunk is None or scheduler.budget.copied < (1 if scheduler.budget.crowded else chunk):
            sequence, moves = scheduler.admit(staging, now)
            if sequence is None:
                if not (crowded_out := scheduler.crowded_out(staging)):
                    return
                self._free_slots(crowded_out, scheduler.preempt)
                continue
            try:
                # in this order: the last slot that sequences move to may be new, and `start` fills the one they free
                self._grow_caches(0)
                slots.move((), moves)
                expected = scheduler.running.expected(len(scheduler.waiting))
                sequence.observed = self.runner.observes(sequence.request, expected)
                slots.start(sequence, self._inputs.end_ids(sequence.request))
            except CacheMemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - only this sequence is affected
                self.end([sequence], "error", error)
                continue
            scheduler.budget.copied += sequence.cached
            if not sequence.tokens:  # not counted again after a preemption
                self.prompt_tokens += len(sequence.request.prompt)
                self.prefix_hits += sequence.cached
                sequence.admitted(now)

    def _prefill(self) -> bool:
        """Prefill a chunk; returns whether that ends the step, because first tokens came or steps are short."""
        scheduler, runner = self.scheduler, self.runner
        self._grow_caches(0)
        started = time.perf_counter()
        waiting = list(scheduler.running.prefilling)
        batches = scheduler.prefill_batches()
        first_rounds = []
        for batch in batches:
            scored = any(one.unscored or not one.limit for one in batch.sequences)
            if batch.whole and runner.target.head_is_exact and not scored:
                first_rounds.append((batch.sequences, runner.first_round(batch)))
            else:
                runner.prefill(batch)
        seconds = time.perf_counter() - started
        scheduler.budget.charge_prompts(batches, seconds)
        for sequence in waiting:
            sequence.stats.prefill_seconds += seconds
        runner.slots.cache_prefix([sequence for sequence in waiting if not sequence.unread], tail=False)
        scheduler.running.promote()
        for sequences, output in first_rounds:
            self._collect(sequences, output, None)
        self.end([one for one in scheduler.running.decoding if not one.limit], "length")
        return bool(first_rounds) or (scheduler.budget.crowded and bool(batches) and bool(scheduler.running.decoding))

    def _decode(self) -> None:
        """Advance the decoding sequences by a round, except those that must make room or wait for others."""
        scheduler, runner = self.scheduler, self.runner
        # first, because preemption changes the slots of those that decode
        if victims := scheduler.running.overflow():
            self._free_slots(victims, scheduler.preempt)
        decoding = scheduler.budget.turn(scheduler.running.decoding, runner.ready)
        if not decoding:
            runner.await_grammars(scheduler.running.decoding)
            return
        started = time.perf_counter()
        plan = runner.plan(decoding)
        tree = plan.tree
        columns = scheduler.columns(staging_columns(tree))
        tokens = pass_tokens(len(decoding), tree)
        if not (scheduler.room.fits(columns) and scheduler.passes.fits(tokens)):
            tree = None  # a plain round costs less than reading a preempted sequence again
        self._grow_caches(staging_columns(tree))
        self.outcome = runner.round(decoding, tree, plan.drafting)
        self.rounds += 1
        seconds = time.perf_counter() - started
        scheduler.budget.charge_round(decoding, seconds)
        self._collect(decoding, self.outcome, seconds - plan.reading)

    def _collect(self, sequences: Sequence[SequenceState], output: RoundOutput, seconds: float | None) -> None:
        """Append a round's tokens to its sequences and hand them out; free the slots of the finished.

        `seconds` is what the round took; None if it came with prefill, whose time is counted already.
        """
        # roots and logs come first: `take` adds the round's tokens to the sequences
        traced = [row for row, sequence in enumerate(sequences) if sequence.request.trace]
        roots = [sequence.root for sequence in sequences]
        drafts = draft_rounds(output.draft, roots, traced)
        if self._round_log is not None:
            self._round_log.add(self.rounds, sequences, output, draft_rounds(output.draft, roots, range(len(roots))))
        for row, sequence in enumerate(sequences):
            taken, logprobs = sequence.take(output, row, seconds)
            accepted = min(output.accepted[row], len(taken))
            chunk = Chunk(sequence.index, tuple(taken), accepted, draft=drafts.get(row), logprobs=logprobs)
            self._outputs.hand_out(sequence, chunk)
        finished = [sequence for sequence in sequences if sequence.finish_reason is not None]
        self._free_slots(finished, self.scheduler.running.remove)

    @inference
    def end(self, sequences: Collection[SequenceState], reason: str, error: Exception | None = None) -> None:
        """End sequences wherever they are; not while a round runs."""
        sequences = list(sequences)
        for sequence in sequences:
            sequence.finish_reason = reason
            self._outputs.hand_out(sequence, Chunk(sequence.index, (), 0), error)
            if sequence in self.scheduler.waiting:
                self.scheduler.waiting.remove(sequence)
        self._free_slots(
            [sequence for sequence in sequences if sequence.slot is not None], self.scheduler.running.remove
        )

    def _free_slots(
        self, gone: Collection[SequenceState], drop: Callable[[Collection[SequenceState]], list[Move]]
    ) -> None:
        """Free the slots of sequences that the scheduler is to `drop`; the prefix cache keeps their contents."""
        if gone:
            # before `drop`, which takes the sequences' slots and resets what they have cached
            slots = self.runner.slots
            slots.keep(gone)
            freed = [sequence.slot for sequence in gone if sequence.slot is not None]
            slots.move(freed, drop(gone))

    def _grow_ahead(self) -> None:
        """Copy a part of the caches to larger ones needed soon, because copying all at once takes seconds on a CPU."""
        room = self.scheduler.room
        if self.runner.target.device.type == "cpu":
            self.scheduler.plan_growth(staging_columns(self.runner.planner.tree))
            if not self.scheduler.budget.alone:  # otherwise the step is for clients that don't need it
                room.ready = self.runner.slots.prepare(room.planned)

    def _grow_caches(self, staging: int) -> None:
        """Grow the caches to what the sequences in slots need, including a round's `staging` columns."""
        if self.scheduler.cover(staging):
            self.runner.slots.reshape(self.scheduler.room)


class OutputProcessor:
    """Hands out the chunks of requests, and counts what was generated and how requests finished."""

    def __init__(self, tokenizer: Any, rule: WalkRule) -> None:
        self.unfinished: dict[int, SequenceState] = {}
        self.outbox: list[Chunk] = []
        """For the next `Engine.step`."""
        self.inboxes: dict[int, deque[Chunk | Exception]] = {}
        """The chunks that streams haven't taken yet, by request index."""
        self.generated = 0
        self.finished: Counter[str] = Counter()
        self._tokenizer = tokenizer
        self._rule = rule

    def take(self) -> list[Chunk]:
        """The chunks of all steps since the last call; each is handed out once."""
        chunks = self.outbox
        self.outbox = []
        return chunks

    def hand_out(self, sequence: SequenceState, chunk: Chunk, error: Exception | None = None) -> None:
        """Deliver a chunk to its stream's inbox, or to the outbox of `step`."""
        self.generated += len(chunk.token_ids)
        inbox = self.inboxes.get(sequence.index)
        if len(chunk.token_ids) == len(sequence.tokens):  # its first chunk
            chunk = replace(chunk, prompt_logprobs=sequence.known_prompt_logprobs)
        if sequence.finish_reason is not None:
            self.finished[sequence.finish_reason] += 1
            chunk = replace(chunk, completion=sequence.completion(self._tokenizer, self._rule, error))
            del self.unfinished[sequence.index]
            self.inboxes.pop(sequence.index, None)
        if inbox is None:
            self.outbox.append(chunk)
        else:
            inbox.append(chunk if error is None else error)
