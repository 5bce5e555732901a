"""A step of the engine: sequences are admitted, prompts read a piece further, and all that decode advance by a round.
A step that reaches first tokens ends with them, and the next one is a round alone.

A sequence that can't be admitted ends with `error`, the others go on. When a pass itself fails, all in slots end with
`error`; the slots start over empty and those waiting go on. When memory for the cache is missing, several
sequences are read again, fewer at a time, and one that is alone ends with `error`. A step that is interrupted (Ctrl-C)
loses what the slots hold and nothing else: the next step reads the sequences again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from eyas.engine.caches import SlotCaches, staging_columns
from eyas.engine.controller import Controller, RoundRecord
from eyas.engine.prefix_cache import PrefixReuse
from eyas.engine.round import RoundOutput, Speculation, VerifiedDraft, run_first_round, run_round
from eyas.engine.scheduler import Move, Piece, Scheduler
from eyas.engine.sequence import SequenceState
from eyas.errors import CacheMemoryError, InvariantError, RequestError
from eyas.targets import Target
from eyas.tree import TreeSpec
from eyas.types import DraftRound, EngineState, Limits, TokenLogprobs
from eyas.verify import WalkRule


class Added(NamedTuple):
    """What a step added to a sequence; after its `last` it is finished."""

    sequence: SequenceState
    last: bool
    tokens: tuple[int, ...] = ()
    accepted: int = 0
    draft: DraftRound | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: Exception | None = None


class Stepper:
    """The scheduler, the slots it rules, and what runs in them."""

    def __init__(
        self,
        target: Target,
        speculation: Speculation | None,
        rule: WalkRule,
        eos_ids: Sequence[int],
        limits: Limits,
        prefill_chunk: int,
        controller: Controller | None,
    ) -> None:
        self.scheduler = Scheduler(limits)
        self.outcome: RoundOutput | None = None
        """What the last step's round did; None if it had none."""
        self._target, self._speculation, self._rule, self._eos_ids = target, speculation, rule, eos_ids
        self._prefill_chunk, self._controller = prefill_chunk, controller
        self._drafter = None if speculation is None else speculation.drafter
        self._tree = None if speculation is None else speculation.tree  # the shape of the last round
        self._caches = SlotCaches(target, self._drafter, limits.max_running)
        self._reuse: PrefixReuse | None = None
        if limits.prefix_tokens:
            self.reuse_prefixes(limits.prefix_tokens)
        self._added: list[Added] = []
        self._round_due = False  # the last step ended with first tokens: those who decode come before the next prompts
        self._rounds = self._prompt_tokens = self._hits = self._generated = 0
        self._finished: Counter[str] = Counter()

    def reuse_prefixes(self, tokens: int) -> None:
        """From now on keep up to `tokens` tokens' caches for requests that begin alike, if that isn't done yet."""
        if self._reuse is None:
            self._reuse = PrefixReuse(self._target, self._drafter, tokens)

    @torch.inference_mode()  # all of it: what a pass allocates can't be changed outside
    def advance(self) -> None:
        """One step."""
        scheduler, now = self.scheduler, time.monotonic()
        self.outcome = None
        self.end(scheduler.expired(now), "deadline")
        if not scheduler.busy:
            return
        if not scheduler.placed:
            self._caches.renew_sampler()
        if not self._caches.claim(scheduler.room):
            scheduler.preempt(scheduler.placed)
        intact = False
        try:
            if not self._round_due or not scheduler.decoding:
                self._admit(now)
                self._round_due = self._prefill()
            else:
                self._round_due = False
            if not self._round_due:  # first tokens leave at once, not after a round of those who have theirs
                self._decode()
            self._shrink()
            intact = True
        except CacheMemoryError as error:
            self._caches.release(intact=False)
            if scheduler.room.slots == 1:  # it can't be tried with less
                self.end(scheduler.placed, "error", error)
            scheduler.room.exhausted()
            self._caches.give_back()
        except Exception as error:  # noqa: BLE001 - whatever breaks a pass ends those in it, not the engine
            self._caches.release(intact=False)
            self.end(scheduler.placed, "error", error)
        finally:
            self._caches.release(intact)
            if not intact:
                scheduler.preempt(scheduler.placed)

    def take(self) -> list[Added]:
        """Hand out what was added since the last call."""
        added, self._added = self._added, []
        return added

    @torch.inference_mode()
    def end(self, sequences: Collection[SequenceState], reason: str, error: Exception | None = None) -> None:
        """End sequences wherever they are; not while a round runs."""
        for sequence in sequences:
            self._finish(sequence, reason)
            self._added.append(Added(sequence, True, error=error))
            if sequence in self.scheduler.waiting:
                self.scheduler.waiting.remove(sequence)
        self._leave([sequence for sequence in sequences if sequence.slot is not None], self.scheduler.drop)

    def state(self) -> EngineState:
        """What runs and waits, what is cached, what was counted."""
        scheduler, store = self.scheduler, None if self._reuse is None else self._reuse.store
        return EngineState(
            running=len(scheduler.decoding),
            prefilling=len(scheduler.prefilling),
            waiting=len(scheduler.waiting),
            cached_tokens=sum(one.cached for one in scheduler.placed),
            allocated_tokens=scheduler.room.tokens,
            cache_limit=scheduler.room.limit,
            prefix_tokens=0 if store is None else store.size,
            prefix_limit=0 if store is None else store.limit,
            preempted_total=scheduler.preempted_total,
            prompt_tokens_total=self._prompt_tokens,
            prefix_hit_tokens_total=self._hits,
            generated_tokens_total=self._generated,
            rounds_total=self._rounds,
            finished_total=dict(self._finished),
        )

    def check(self, live: Collection[SequenceState]) -> None:
        """InvariantError unless scheduler, slots, caches and prefixes agree, and `live` are all there is."""
        scheduler, placed = self.scheduler, self.scheduler.placed
        everyone = {*placed, *scheduler.waiting}
        if everyone != set(live) or len(everyone) != len(placed) + len(scheduler.waiting):
            raise InvariantError("the live requests are not those in slots and those waiting")
        if any(sequence.finish_reason is not None for sequence in live):
            raise InvariantError("a finished sequence is still there")
        scheduler.check()
        if self._reuse is not None:
            self._reuse.store.check()
        if self._caches.held:
            self._caches.check(placed, scheduler.room)

    def _admit(self, now: float) -> None:
        scheduler, staging = self.scheduler, staging_columns(self._tree)
        while (sequence := scheduler.admit(staging, now)) is not None:
            try:
                self._enter(sequence, now)
            except CacheMemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - its own fault, whatever it is
                self.end([sequence], "error", error)

    def _enter(self, sequence: SequenceState, now: float) -> None:
        """Begin a sequence in its slot."""
        self._cover(0)
        self._caches.enter(sequence, self._eos_ids)
        if self._reuse is not None:
            sequence.cached = self._reuse.load(sequence)
        if not sequence.tokens:  # else it was here before
            self._prompt_tokens += len(sequence.request.prompt)
            self._hits += sequence.cached
            sequence.stats.reused_tokens = sequence.cached
            sequence.stats.queue_seconds = max(0.0, now - sequence.arrived)

    def _prefill(self) -> bool:
        """Read on; True if there are first tokens."""
        self._cover(0)
        began = time.perf_counter()
        reading, first_rounds = list(self.scheduler.prefilling), []
        for piece in self.scheduler.pieces():
            if piece.whole and self._target.head_is_exact:
                first_rounds.append((piece.sequences, self._first_round(piece)))
            else:
                self._caches.prefill(piece, self._prefill_chunk, self._tree is not None)
        for sequence in reading:
            sequence.stats.prefill_seconds += time.perf_counter() - began
            if self._reuse is not None and not sequence.unread:
                self._reuse.save(sequence, tail=False)
        self.scheduler.promote()
        for sequences, outcome in first_rounds:
            self._collect(sequences, outcome, None)
        return bool(first_rounds)

    def _first_round(self, piece: Piece) -> RoundOutput:
        """Read prompts to their ends, and choose what follows."""
        if any((early := piece.before_last(self._prefill_chunk)).counts):
            self._caches.prefill(early, self._prefill_chunk, self._tree is not None)
        rest = Piece(piece.sequences, [sequence.unread for sequence in piece.sequences])
        told = [sequence.request.speculate for sequence in rest.sequences]
        reading = [self._tree is not None and hears for hears in told]
        outcome = run_first_round(
            self._target, self._drafter, self._caches.sampler, rest.rows, rest.windows(), self._rule, reading, told
        )
        for sequence in rest.sequences:
            sequence.cached = sequence.known
        return outcome

    def _decode(self) -> None:
        scheduler = self.scheduler
        if not scheduler.decoding:
            return
        tree = self._plan()
        if victims := scheduler.overflow():
            self._leave(victims, scheduler.preempt)
            if not scheduler.decoding:
                return
            tree = self._plan()
        if not scheduler.fits(staging_columns(tree)):
            tree = None  # a plain round costs less than reading somebody's tokens again
        self._cover(staging_columns(tree))
        decoding = list(scheduler.decoding)
        self.outcome, seconds = self._round(decoding, tree)
        self._rounds += 1
        self._collect(decoding, self.outcome, seconds)

    def _plan(self) -> TreeSpec | None:
        """The shape of the next round's trees; None if nobody may draft, which needs no thought."""
        decoding = self.scheduler.decoding
        if not any(map(self._may_draft, decoding)):
            return None
        if self._controller is not None:
            sampled = [sequence.request.params.temperature > 0.0 for sequence in decoding]
            self._tree = self._controller.plan(len(decoding), [sequence.cached for sequence in decoding], sampled)
        return self._tree

    def _round(self, decoding: Sequence[SequenceState], tree: TreeSpec | None) -> tuple[RoundOutput, float]:
        began = time.perf_counter()
        live = [self._may_draft(sequence) for sequence in decoding]
        tree = tree if any(live) else None
        speculation = None if self._speculation is None else replace(self._speculation, tree=tree)
        roots = torch.tensor([sequence.root for sequence in decoding], device=self._target.device)
        rows = range(len(decoding))
        told = [sequence.request.speculate for sequence in decoding]
        outcome = run_round(self._target, speculation, self._caches.sampler, rows, roots, self._rule, live, told)
        seconds = time.perf_counter() - began
        if self._controller is not None and any(live):
            record = RoundRecord(
                rows=len(decoding),
                lengths=[sequence.cached for sequence in decoding],
                spec=tree,
                draft=outcome.draft,
                draft_seconds=outcome.draft_seconds,
                pass_seconds=outcome.pass_seconds,
                tokens=outcome.pass_tokens,
                emitted=sum(outcome.accepted) + len(decoding),
                seconds=seconds,
                drafting=live,
            )
            self._controller.learn(record)
        return outcome, seconds

    def _may_draft(self, sequence: SequenceState) -> bool:
        """Under a controller a first token doesn't wait for a draft: its round costs what a plain one costs."""
        return sequence.request.speculate and (self._controller is None or bool(sequence.tokens))

    def _collect(self, decoding: Sequence[SequenceState], outcome: RoundOutput, seconds: float | None) -> None:
        """Give everyone what the round of `seconds` emitted (None: it belongs to prefill); let go of the finished."""
        traced = [row for row, sequence in enumerate(decoding) if sequence.request.trace]
        drafts = draft_rounds(outcome.draft, [sequence.root for sequence in decoding], traced)
        for row, sequence in enumerate(decoding):
            sequence.cached += outcome.accepted[row] + 1
            taken = sequence.extend(outcome.tokens[row])
            sequence.stats.tokens += len(taken)
            if seconds is None:
                sequence.stats.prefill_tokens += len(taken)
            else:
                sequence.stats.record(outcome.accepted[row], outcome.offered[row])
                sequence.stats.decode_seconds += seconds
            self._generated += len(taken)
            scored = outcome.logprobs.get(row)
            scored = None if scored is None else scored[: len(taken)]
            sequence.logprobs += scored or ()
            if row in outcome.failed and sequence.finish_reason is None:
                sequence.finish_reason = "error"
                sequence.error = f"{RequestError.__name__}: {outcome.failed[row]}"
            if sequence.finish_reason is not None:
                self._finish(sequence, sequence.finish_reason)
            accepted = min(outcome.accepted[row], len(taken))
            last = sequence.finish_reason is not None
            self._added.append(Added(sequence, last, tuple(taken), accepted, drafts.get(row), scored))
        self._leave([sequence for sequence in decoding if sequence.finish_reason is not None], self.scheduler.drop)

    def _finish(self, sequence: SequenceState, reason: str) -> None:
        sequence.finish_reason = reason
        self._finished[reason] += 1

    def _leave(self, gone: Collection[SequenceState], drop: Callable[[Collection[SequenceState]], list[Move]]) -> None:
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

    def _cover(self, staging: int) -> None:
        """Let the caches grow to what those in slots need."""
        scheduler = self.scheduler
        running = len(scheduler.placed)
        if scheduler.room.cover(running, scheduler.columns(staging), running + len(scheduler.waiting)):
            self._caches.cover(scheduler.room)

    def _shrink(self) -> None:
        """Give back memory when nobody is left."""
        if not self.scheduler.busy and self.scheduler.room.shrink():
            self._caches.cover(self.scheduler.room)


# From a round's tree and path to what a traced request is told.
#
# Shapes: R rows, N nodes. A place counts the root as 0 and node i as i + 1.


def draft_rounds(draft: VerifiedDraft | None, roots: Sequence[int], rows: Sequence[int]) -> dict[int, DraftRound]:
    """What the round offered to those of `rows` that were offered anything; `roots` has one token for every row.

    Two copies to the host, so nobody pays who didn't ask.
    """
    if draft is None or not rows or not draft.tree.size:
        return {}
    tree = draft.tree
    chosen = torch.tensor(list(rows), device=tree.tokens.device)
    whole = torch.stack((tree.valid.long(), tree.tokens, tree.parents))[:, chosen].tolist()  # [3][rows][N]
    logprobs = tree.logprob[chosen].tolist()
    found = {}
    for row, valid, tokens, parents, logprob in zip(rows, *whole, logprobs, strict=True):
        kept = [node for node, is_valid in enumerate(valid) if is_valid]
        if not kept:
            continue
        new = {node: index for index, node in enumerate(kept)}
        found[row] = DraftRound(
            root=roots[row],
            tokens=tuple(tokens[node] for node in kept),
            parents=tuple(new.get(parents[node], -1) for node in kept),
            logprob=tuple(logprob[node] for node in kept),
            path=tuple(new[place - 1] for place in draft.paths[row] if place > 0),
        )
    return found
