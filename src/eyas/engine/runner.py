"""The model runner: the slots that sequences run in, and the passes over them.

It runs what the scheduler has decided: prefill chunks, and rounds. Other engines may use the same weights.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import compress
from typing import NamedTuple

import torch

from eyas.drafters.base import Drafter, SlotPairs
from eyas.engine.controller import RoundRecord
from eyas.engine.prefix_cache import PrefixCache
from eyas.engine.round import RoundOutput, Slots, Speculation, VerifiedDraft, observe_rows, run_first_round, run_round
from eyas.engine.scheduler import Move
from eyas.engine.sequence import PrefillBatch, SequenceState, slots_of
from eyas.engine.tree_planner import TreePlanner
from eyas.errors import InvariantError, PassMemoryError, UsageError
from eyas.runtime import out_of_memory, out_of_memory_as, to_device
from eyas.targets import PrefillChunk, Target
from eyas.targets.slots import COLUMNS, CacheRoom, Reshaping, SlotCache
from eyas.tree import TreeSpec
from eyas.types import DraftRound, Request
from eyas.verify import Sampler, WalkRule, prompt_logprobs
from eyas.verify.constraint import Constraint, await_any

_GRAMMAR_WAIT = 0.005
"""Seconds between two checks for new requests while all sequences wait for their grammars."""
_COPY_SECONDS = 0.05
"""Seconds that a step spends on copying caches to larger ones that aren't needed yet."""


class SlotManager:
    """Everything stored by slot (caches of target and drafter, sampler state), and the prefix cache."""

    def __init__(self, target: Target, drafter: Drafter | None, rule: WalkRule, max_running: int) -> None:
        self._target = target
        self._drafter = drafter
        self._rule = rule
        self._max_running = max_running
        self.prefixes: PrefixCache | None = None
        self.cache = target.allocate(0)
        if drafter is not None:
            drafter.pairs.attach(self.cache)
        self._caches: list[SlotCache | SlotPairs] = [self.cache, *(() if drafter is None else (drafter.pairs,))]
        self.intact = False
        """Whether the slots hold what the scheduler assumes; if not, the next step begins with `empty`."""
        self.reset_sampler()

    def cache_prefixes(self, tokens: int) -> None:
        """Enable prefix caching: keep copies of the caches of up to `tokens` tokens."""
        if self.prefixes is None:
            self.prefixes = PrefixCache(self.cache, self._drafter, tokens)

    def reset_sampler(self) -> None:
        """Forget all sampling state; no sequence may be in a slot."""
        self.sampler = Sampler(self._max_running, self._target.vocab_size, self._target.device)
        self.view = Slots(self._target, self.cache, self.sampler, self._rule)

    def empty(self, room: CacheRoom) -> None:
        """Empty all slots after an aborted pass, and set `room` to what is allocated."""
        room.slots = self.cache.slots
        room.columns = self.cache.capacity
        if not room.fits([room.columns] * room.slots):
            self.cache.reshape(0, COLUMNS)
            room.slots = 0
            room.columns = COLUMNS
        for cache in self._caches:
            for slot in range(cache.slots):
                cache.truncate(slot, 0)
        self.reshape(room)
        self.intact = True

    def reshape(self, room: CacheRoom) -> None:
        """Give all caches the shape of `room`, keeping their contents."""
        for cache in self._caches:
            cache.reshape(room.slots, room.columns)

    def prepare(self, planned: tuple[int, int] | None) -> bool:
        """Copy a part of the target's cache to one of the `planned` shape, ahead of `reshape`.

        Returns whether little remains to be copied. The drafter's cache is small enough to be copied at once later.
        `planned` None: no larger cache is needed.
        """
        cache = self.cache
        if planned is None:
            cache.reshaping = None
        elif cache.reshaping is None or cache.reshaping.shape != planned:
            cache.reshaping = Reshaping(cache, *planned, layers=1)
        return cache.reshaping is None or cache.reshaping.catch_up(cache.lengths, _COPY_SECONDS)

    def free_memory(self) -> None:
        """Free all cache memory, including the slots' contents and the prefixes."""
        self.cache.reshape(0, COLUMNS)
        if self._drafter is not None:
            self._drafter.pairs.resize(0)
        if self.prefixes is not None:
            self.prefixes.clear()
        if self._target.device.type == "cuda":
            torch.cuda.empty_cache()  # torch may hold free memory in pieces that are too small

    def start(self, sequence: SequenceState, eos_ids: Sequence[int]) -> None:
        """Begin a sequence in its slot, with its cached prefix. Raises RequestError if it can't be sampled."""
        assert sequence.slot is not None
        request = sequence.request
        self.sampler.admit(sequence.slot, request.params, request.prompt, eos_ids, sequence.tokens, sequence.grammar)
        if self._drafter is not None and sequence.observed:
            self._drafter.pairs.begin(sequence.slot, request.prompt, sequence.owner, request.prediction)
        if self.prefixes is not None and not sequence.unscored:  # cached tokens aren't read, so they can't be scored
            sequence.cached = self.prefixes.load(sequence)

    def cache_prefix(self, sequences: Iterable[SequenceState], *, tail: bool) -> None:
        """Copy the contents of sequences' slots into the prefix cache; without `tail`, whole blocks only.

        If there is no memory for the copies, all prefixes are dropped.
        """
        if self.prefixes is not None and self.intact:
            try:
                for sequence in sequences:
                    self.prefixes.save(sequence, tail)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                self.prefixes.clear()

    def keep(self, leaving: Collection[SequenceState]) -> None:
        """Keep what other sequences may reuse from those `leaving`, whose slots are about to be freed."""
        self.cache_prefix([one for one in leaving if one.finish_reason != "error"], tail=True)
        if self._drafter is None or not self.intact:
            return
        for sequence in leaving:
            if sequence.finish_reason in ("stop", "length") and sequence.observed and sequence.slot is not None:
                self._drafter.finish(sequence.slot)

    def move(self, freed: Iterable[int], moves: Iterable[Move]) -> None:
        """Empty the freed slots, and move sequences to close the gaps."""
        if not self.intact:
            return
        for slot in freed:  # before the moves, which go into freed slots
            for cache in self._caches:
                cache.truncate(slot, 0)
        for source, destination in moves:
            self.sampler.move(source, destination)
            for cache in self._caches:
                cache.move(source, destination)

    def constraint(self, sequence: SequenceState) -> Constraint | None:
        """What a sequence's grammar allows next; None if it has no slot, or may write anything."""
        return None if sequence.slot is None else self.sampler.constraint(sequence.slot)

    def check(self, running: Sequence[SequenceState], room: CacheRoom) -> None:
        """Raise InvariantError unless slots hold as many tokens as their sequences say, and prefixes are consistent."""
        if self.prefixes is not None:
            self.prefixes.store.check()
        if not self.intact:
            return
        columns = self.cache.capacity
        if columns != room.columns and self.cache.slots:
            raise InvariantError(f"the target's cache has {columns} columns, the scheduler counts {room.columns}")
        for cache in self._caches:
            name = type(cache).__name__
            if cache.slots != room.slots:
                raise InvariantError(f"{name} has {cache.slots} slots, the scheduler counts {room.slots}")
            for slot in range(cache.slots):
                used = slot < len(running) and (cache is self.cache or running[slot].observed)
                expected = running[slot].cached if used else 0
                if cache.length(slot) != expected:
                    raise InvariantError(f"{name} holds {cache.length(slot)} in slot {slot}, expected {expected}")


class RoundPlan(NamedTuple):
    """How the next round runs."""

    tree: TreeSpec | None
    """The shape of its draft trees; None = a plain round."""
    drafting: list[bool]
    """[R] the rows that it drafts for."""
    reading: float = 0.0
    """The seconds for which the drafter has read deferred pairs."""


class ModelRunner:
    """The passes of a target, and optionally a drafter, over the slots of one engine's sequences."""

    def __init__(
        self,
        target: Target,
        speculation: Speculation | None,
        rule: WalkRule,
        planner: TreePlanner,
        *,
        max_running: int,
        prefill_chunk: int,
        step_tokens: int | None = None,
    ) -> None:
        """A round reads about `step_tokens` deferred pairs; None = any number."""
        self.target = target
        self.speculation = speculation
        self.planner = planner
        self.drafter: Drafter | None = None if speculation is None else speculation.drafter
        if self.drafter is not None:
            target.check_taps(self.drafter.taps)
            _check_rule(rule, self.drafter, None if speculation is None else speculation.tree)
        self._forgets = self.drafter is not None and self.drafter.pairs.forgets
        self.slots = SlotManager(target, self.drafter, rule, max_running)
        self._prefill_chunk = prefill_chunk
        self._step_tokens = step_tokens
        self._prompt_pairs = 0
        self._planned_at = self._overhead = 0.0

    def ready(self, sequence: SequenceState) -> bool:
        """Whether a round with a sequence needn't wait for its grammar."""
        return sequence.grammar is None or (constraint := self.slots.constraint(sequence)) is None or constraint.ready

    def await_grammars(self, sequences: Sequence[SequenceState]) -> None:
        """Wait until one of the sequences is ready, for at most as long as a short round takes."""
        await_any([self.slots.constraint(sequence) for sequence in sequences], _GRAMMAR_WAIT)

    def observes(self, request: Request, rows: int) -> bool:
        """Whether the drafter observes a request that will be one of `rows`; if not, it is decoded plainly."""
        if self.drafter is None or not request.speculate:
            return False
        if self.drafter.needs_hint and not request.prediction and request.grammar is None:
            return False
        return self.planner.observes(rows)

    def prefill(self, batch: PrefillBatch) -> None:
        """Prefill a batch, `prefill_chunk` tokens per pass; the drafter defers unless a network drafts."""
        observed = [sequence.observed for sequence in batch.sequences]
        drafter = self.drafter if any(observed) else None
        taps = () if drafter is None else drafter.taps
        starts = [sequence.cached for sequence in batch.sequences]
        with _pass_of(sum(min(count, self._prefill_chunk) for count in batch.counts)):
            for chunk in self.target.prefill(self.slots.cache, batch.rows, batch.windows(), taps, self._prefill_chunk):
                for row, sequence in enumerate(batch.sequences):
                    self._score(sequence, starts[row], chunk, row)
                    starts[row] += chunk.counts[row]
                if drafter is not None:
                    reading = [self._drafts] * len(observed)
                    following = chunk.next_on_host if drafter.reads_on_host else chunk.next_tokens
                    observe_rows(drafter, batch.rows, following, chunk.taps, chunk.counts, observed, reading)
                    self._prompt_pairs += sum(chunk.counts)
                # before `cache_prefix`, which copies as many tokens as are cached
                for sequence, count in zip(batch.sequences, chunk.counts, strict=True):
                    sequence.cached += count
                if drafter is not None and self._forgets:  # before the next chunk's pairs overwrite these
                    self.slots.cache_prefix(batch.sequences, tail=False)

    def _score(self, sequence: SequenceState, start: int, chunk: PrefillChunk, row: int) -> None:
        """Add the log-probabilities of the prompt tokens that a chunk has read, from position `start` on."""
        begin = len(sequence.prompt_logprobs)
        stop = len(sequence.prompt_logprobs) + sequence.unscored
        span = slice(max(0, begin - start), min(chunk.counts[row], stop - start))  # some may be read a second time
        alternatives = sequence.request.params.prompt_logprobs
        if alternatives is not None and span.start < span.stop:
            states, following = chunk.final[row, span], chunk.next_tokens[row, span]
            sequence.prompt_logprobs += prompt_logprobs(self.target, states, following, alternatives)

    def first_round(self, batch: PrefillBatch) -> RoundOutput:
        """Read prompts to their ends and choose the tokens that follow, in the same pass."""
        if any((early := batch.before_last(self._prefill_chunk)).counts):
            self.prefill(early)
        rest = PrefillBatch(batch.sequences, [sequence.unread for sequence in batch.sequences])
        observed = [sequence.observed for sequence in rest.sequences]
        # no first token waits for the drafter, unless it forgets pairs: then it reads now, for the prefix cache
        reading = [speculates and self._drafts and self._forgets for speculates in observed]
        with _pass_of(sum(rest.counts) + len(rest.counts)):  # with the roots
            output = run_first_round(self.slots.view, self.drafter, rest.rows, rest.windows(), reading, observed)
        self._prompt_pairs += sum(rest.counts) * any(observed)
        for sequence in rest.sequences:
            sequence.cached = sequence.known
        return output

    def plan(self, decoding: Sequence[SequenceState]) -> RoundPlan:
        """Plan the next round, and let the drafter read the deferred pairs that it needs for that.

        While a network drafts, it reads the prompts of rows that have just got their first tokens. If
        all rows have, and not all rounds draft, it waits for the plan. Rows with many deferred pairs are read over
        several steps, and decode without drafts until then.
        """
        drafting = [self._drafts_for(sequence) for sequence in decoding]
        if self.drafter is None or not any(drafting):
            return RoundPlan(None, drafting)
        rows = slots_of(decoding)
        reading = 0.0
        begun = [sequence.observed and len(sequence.tokens) == 1 for sequence in decoding]
        if self._drafts and any(begun) and (self.planner.always_drafts or not all(begun)):
            reading = self._catch_up(decoding, self._fitting_a_step(rows, begun))
        self._planned_at = time.perf_counter()
        tree = self.planner.plan(
            [sequence.index for sequence in decoding],
            [sequence.cached for sequence in decoding],
            [sequence.request.params.temperature > 0.0 for sequence in decoding],
            [self.drafter.pairs.unread(row) for row in rows],
        )
        if tree is None or tree.found_only:  # no network guesses, so none needs to read any pairs
            # `drafting` stays as it is, because the planner learns from plain rounds of these rows, too
            return RoundPlan(tree, drafting, reading)
        reached = self._fitting_a_step(rows, drafting)
        if reached != drafting or any(self._exceeding_a_step(rows, reached)):
            seconds = self._catch_up(decoding, reached)
            late = self._exceeding_a_step(rows, reached)
            drafting = [reach and not behind for reach, behind in zip(reached, late, strict=True)]
            reading += seconds
            self._planned_at += seconds  # reading isn't planning
        return RoundPlan(tree, drafting, reading)

    def _fitting_a_step(self, rows: range, wanted: list[bool]) -> list[bool]:
        """The `wanted` rows [R] whose deferred pairs can be read in one step, the fewest pairs first; at least one."""
        if self._step_tokens is None or self.drafter is None:
            return wanted
        unread = self.drafter.pairs.unread
        total = 0
        reached = [False] * len(rows)
        for row in sorted(range(len(rows)), key=lambda row: unread(rows[row])):
            if wanted[row] and total < self._step_tokens:
                reached[row] = True
                total += unread(rows[row])
        return reached

    def _exceeding_a_step(self, rows: range, wanted: list[bool]) -> list[bool]:
        """Which of the `wanted` rows [R] have more deferred pairs than a step reads."""
        if self._step_tokens is None or self.drafter is None:
            return [False] * len(rows)
        unread = self.drafter.pairs.unread
        return [want and unread(row) > self._step_tokens for row, want in zip(rows, wanted, strict=True)]

    def _catch_up(self, decoding: Sequence[SequenceState], wanted: list[bool]) -> float:
        """Let the drafter read the `wanted` rows' [R] deferred pairs, as many as a step has time for.

        Returns the seconds it took.
        """
        if self.drafter is None:
            return 0.0
        rows = slots_of(decoding)
        started = time.perf_counter()
        with _pass_of(sum(self.drafter.pairs.unread(row) for row in compress(rows, wanted))):
            self.drafter.catch_up(rows, wanted, self._step_tokens)
        seconds = time.perf_counter() - started
        for sequence in compress(decoding, wanted):
            sequence.stats.prefill_seconds += seconds
        return seconds

    def round(self, decoding: Sequence[SequenceState], tree: TreeSpec | None, drafting: Sequence[bool]) -> RoundOutput:
        """Advance all sequences by a round, those that are `drafting` [R] with draft trees of shape `tree`."""
        started = time.perf_counter()
        speculation = None if self.speculation is None else replace(self.speculation, tree=tree)
        roots = to_device([sequence.root for sequence in decoding], self.target.device)
        rows = slots_of(decoding)
        observed = [sequence.observed for sequence in decoding]
        with _pass_of(pass_tokens(len(decoding), tree)):
            output = run_round(self.slots.view, speculation, rows, roots, drafting, observed)
        seconds = time.perf_counter() - started
        self.planner.decoded(len(decoding))
        if any(drafting):
            record = RoundRecord(
                texts=[sequence.index for sequence in decoding],
                lengths=[sequence.cached for sequence in decoding],
                spec=tree,
                draft=output.draft,
                draft_seconds=output.draft_seconds,
                pass_seconds=output.pass_seconds,
                tokens=output.pass_tokens,
                emitted=sum(output.accepted) + len(decoding),
                seconds=seconds,
                drafting=drafting,
                overhead=self._overhead,
                prompt_pairs=self._prompt_pairs,
            )
            self.planner.learn(record)
            self._overhead = time.perf_counter() - self._planned_at - seconds  # reported with the next record
            self._prompt_pairs = 0
        return output

    @property
    def _drafts(self) -> bool:
        """Whether a network drafts, not counting trials while rounds are plain."""
        tree = self.planner.tree
        return tree is not None and not tree.found_only and not self.planner.probing

    def _drafts_for(self, sequence: SequenceState) -> bool:
        """Whether a sequence is drafted for. Unless all rounds draft, a first token waits for no draft."""
        constraint = None if sequence.grammar is None else self.slots.constraint(sequence)
        # with a slow grammar drafting gains nothing
        if not sequence.observed or (constraint is not None and constraint.slow):
            return False
        return self.planner.always_drafts or bool(sequence.tokens)


def _check_rule(rule: WalkRule, drafter: Drafter, tree: TreeSpec | None) -> None:
    """Raise UsageError if a rule needs draws and the drafter makes none, or the trees aren't chains."""
    if rule.seeded:
        return
    if not drafter.draws:
        raise UsageError("the rejection rule needs a drafter that draws from distributions: a network, not copied text")
    if tree is None or not tree.is_chain:
        raise UsageError("the rejection rule needs chains of a fixed length, such as chain:4")


def _pass_of(tokens: int) -> AbstractContextManager[None]:
    """Context for passes of at most `tokens` tokens: raises PassMemoryError if memory runs out."""
    return out_of_memory_as(lambda: PassMemoryError(tokens))


def pass_tokens(rows: int, spec: TreeSpec | None) -> int:
    """Maximum number of tokens that the target pass of a round holds; one per row if it is plain."""
    return rows if spec is None else spec.pass_tokens(rows)


def state_columns(cache: SlotCache) -> int:
    """The memory of a slot's recurrent states, in cache columns, including copies for prefixes.

    0 if no layer has keys and values, because a limit in tokens has no meaning then.
    """
    states, column = cache.states, cache.column_bytes
    return 0 if states is None or not column else -(-states.copies.max_copies * states.slot_bytes // column)


def staging_columns(spec: TreeSpec | None) -> int:
    """Maximum number of cache columns that a round with trees of `spec` takes beyond the committed ones."""
    return 1 if spec is None else spec.columns


def draft_rounds(draft: VerifiedDraft | None, roots: Sequence[int], rows: Collection[int]) -> dict[int, DraftRound]:
    """The draft trees of traced `rows` for `Chunk.draft`; scratch nodes, and rows without a tree, are left out.

    `roots` has the root token of every row.
    """
    if draft is None or not rows or not draft.tree.size:
        return {}
    tree = draft.tree
    chosen = torch.tensor(list(rows))
    table = torch.stack((tree.acceptable.long(), tree.tokens, tree.parents))[:, chosen].tolist()  # [3][rows][N]
    logprobs = tree.logprob[chosen].tolist()
    found = {}
    for row, acceptable, tokens, parents, logprob in zip(rows, *table, logprobs, strict=True):
        kept = [node for node, wanted in enumerate(acceptable) if wanted]
        if not kept:
            continue
        renumbered = {node: index for index, node in enumerate(kept)}
        found[row] = DraftRound(
            root=roots[row],
            tokens=tuple(tokens[node] for node in kept),
            parents=tuple(renumbered.get(parents[node], -1) for node in kept),
            logprob=tuple(logprob[node] for node in kept),
            path=tuple(renumbered[node - 1] for node in draft.paths[row] if node > 0),
        )
    return found
