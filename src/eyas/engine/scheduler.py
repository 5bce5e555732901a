"""The scheduler: admission, chunked prefill, preemption, and how large the slot caches are. It holds no tensors.

Sequences in slots stand in this order: those that decode, then those whose prompt isn't read yet, first come first.
A step's prefill goes to the prefilling ones in that order, and no more are admitted than it reaches, so whoever is
done next is always the first behind the decoding ones and becomes one of them where it lies.

When the cache is full the youngest sequence loses its slot and waits at the head of the queue; what it has emitted
is kept, and read again later. The last one never loses its slot, so the oldest always ends and everyone does.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from eyas.engine.fair_queue import FairQueue
from eyas.engine.sequence import SequenceState
from eyas.errors import CacheMemoryError, InvariantError, PassMemoryError, QueueFullError, RequestError
from eyas.types import Limits

_HEADROOM = 64
"""Tokens every running sequence must be able to grow by when another is admitted: else it is soon preempted."""

Move = tuple[int, int]
"""A move of a sequence: from slot, to slot."""


class PrefillBatch(NamedTuple):
    """Sequences in neighbouring slots that prefill in the same passes, `counts` tokens of each."""

    sequences: list[SequenceState]
    counts: list[int]

    @property
    def rows(self) -> range:
        """The range of their slots."""
        first = self.sequences[0].slot
        assert first is not None
        return range(first, first + len(self.sequences))

    @property
    def whole(self) -> bool:
        """Whether all of them can decode after it."""
        return all(one.unread == count for one, count in zip(self.sequences, self.counts, strict=True))

    def windows(self) -> list[list[int]]:
        """The tokens that each reads, and the one after them."""
        spans = zip(self.sequences, self.counts, strict=True)
        return [one.window(one.cached, one.cached + count + 1) for one, count in spans]

    def before_last(self, most: int) -> PrefillBatch:
        """What is to be read before a pass of at most `most` tokens of each can read the rest and the roots."""
        return PrefillBatch(self.sequences, [max(0, count + 1 - most) for count in self.counts])


class Scheduler:
    """The sequences that wait, prefill and decode, and which of them go on."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.room = CacheRoom(limits.max_running, limits.max_cached_tokens)
        self.passes = PassSize(limits.max_running, limits.prefill_chunk)
        self.waiting = FairQueue()
        self.decoding: list[SequenceState] = []
        self.prefilling: list[SequenceState] = []
        self.preempted_total = 0
        self._pace: float | None = None  # seconds between admissions while some wait
        self._admitted_at: float | None = None

    @property
    def in_slots(self) -> list[SequenceState]:
        """All sequences in slots; the index in this list is the slot."""
        return self.decoding + self.prefilling

    @property
    def busy(self) -> bool:
        """Whether any sequence is waiting or in a slot."""
        return bool(self.decoding or self.prefilling or self.waiting)

    @property
    def expected(self) -> int:
        """Number of sequences that will be in slots when those that wait have come, as far as passes take them."""
        return min(len(self.in_slots) + len(self.waiting), self.passes.rows)

    def shrink(self) -> bool:
        """Forget what memory allowed when nothing is left to run; whether the caches should be made smaller."""
        self.passes.restore()
        return self.room.shrink()

    def submit(self, sequence: SequenceState) -> None:
        """Queue a new sequence. RequestError if it could never fit, QueueFullError if too many wait."""
        limit = self.room.limit
        if limit is not None and sequence.longest > limit:
            raise RequestError(
                f"prompt and answer can come to {sequence.longest} tokens, the cache holds {limit}: shorten the prompt "
                "or ask for fewer tokens"
            )
        most, waiting = self.limits.max_waiting, len(self.waiting)
        if most is not None:
            most += self.limits.max_running - len(self.decoding) - len(self.prefilling)
            if waiting >= most and (self.waiting.count(sequence.key) or waiting >= 2 * most):
                raise QueueFullError(f"{waiting} requests are waiting already: try again later", self.retry_after())
        self.waiting.push(sequence)

    def retry_after(self) -> float:
        """Seconds after which about a quarter of the queue should have been admitted, between 1 and 60."""
        return min(60.0, max(1.0, (self._pace or 0.0) * len(self.waiting) / 4))

    def admit(self, staging: int, now: float) -> SequenceState | None:
        """Give the next waiting sequence a slot; None if none waits or there is no room for it in this step.

        `staging` is how many columns a decoding pass takes beyond the longest sequence.
        """
        sequence, in_slots = self.waiting.peek(), self.in_slots
        if sequence is None or len(in_slots) >= self.passes.rows:
            return None
        chunk = self.passes.prefill_chunk
        if chunk is not None and sum(other.unread for other in self.prefilling) >= chunk:
            return None
        columns = max(min(one.known + _HEADROOM, one.longest) for one in (*in_slots, sequence)) + staging
        if in_slots and not self.room.fits(len(in_slots) + 1, columns):
            return None
        self.waiting.pop()
        sequence.slot, sequence.cached = len(in_slots), 0
        self.prefilling.append(sequence)
        self._note_admission(now)
        return sequence

    def prefill_batches(self) -> list[PrefillBatch]:
        """What to prefill in this step. Neighbours share passes unless most of the padded batch would be empty."""
        left = self.passes.prefill_chunk
        batches: list[PrefillBatch] = []
        for sequence in self.prefilling:
            count = sequence.unread if left is None else min(sequence.unread, left)
            if left is not None:
                left -= count
            if not count:
                continue
            if batches and self._shareable(batches[-1], sequence, count):
                batches[-1].sequences.append(sequence)
                batches[-1].counts.append(count)
            else:
                batches.append(PrefillBatch([sequence], [count]))
        return batches

    def promote(self) -> None:
        """Let the sequences that have read their prompt decode."""
        while self.prefilling and not self.prefilling[0].unread:
            self.decoding.append(self.prefilling.pop(0))

    def columns(self, staging: int) -> int:
        """Cache columns that the sequences in slots need for their next pass."""
        decoding = max((one.known + staging for one in self.decoding), default=0)
        reading = max((one.known + 1 for one in self.prefilling), default=0)  # with the root: `PrefillBatch.whole`
        together = max((_columns(batch.sequences, batch.counts) for batch in self.prefill_batches()), default=0)
        return max(decoding, reading, together)

    def fits(self, staging: int) -> bool:
        """Whether the cache has room for the next round of all sequences in slots."""
        return self.room.fits(len(self.decoding) + len(self.prefilling), self.columns(staging))

    def overflow(self) -> list[SequenceState]:
        """The youngest sequences, as many as must leave so that the others have room for a plain round; never all."""
        left, gone = sorted(self.in_slots, key=lambda one: one.index), []
        while len(left) > 1 and not self.room.fits(len(left), max(one.known for one in left) + 1):
            gone.append(left.pop())
        return gone

    def drop(self, gone: Collection[SequenceState]) -> list[Move]:
        """Take sequences out of their slots; the moves close the gaps, each into a slot that is free by then.

        The last decoding sequence takes over a gap among its kind; the prefilling ones move up in their order.
        """
        for slot in reversed(range(len(self.decoding))):
            if self.decoding[slot] in gone:
                last = self.decoding.pop()
                if slot < len(self.decoding):
                    self.decoding[slot] = last
        self.prefilling = [one for one in self.prefilling if one not in gone]
        for sequence in gone:
            sequence.slot, sequence.cached = None, 0
        moves = []
        for slot, sequence in enumerate(self.in_slots):
            assert sequence.slot is not None
            if sequence.slot != slot:
                moves.append((sequence.slot, slot))
                sequence.slot = slot
        return moves

    def preempt(self, victims: Iterable[SequenceState]) -> list[Move]:
        """Send sequences back to the head of the queue; what they have emitted is read again later."""
        victims = list(victims)
        moves = self.drop(victims)
        for sequence in victims:
            self.waiting.push_front(sequence)
        self.preempted_total += len(victims)
        return moves

    def run_less(self, error: CacheMemoryError | PassMemoryError) -> bool:
        """After memory ran out: run fewer sequences, or smaller passes. False if one alone can't be helped by that."""
        if isinstance(error, CacheMemoryError):
            alone = self.room.slots == 1
            self.room.exhausted()
        else:
            alone = len(self.in_slots) == 1 and error.tokens <= self.passes.LEAST
            self.passes.exhausted(error.tokens)
            self.room.empty()
        return not alone

    def expired(self, now: float) -> list[SequenceState]:
        """The sequences whose deadline has passed at time `now`."""
        return [one for one in (*self.in_slots, *self.waiting) if one.expires is not None and one.expires <= now]

    def check(self) -> None:
        """InvariantError unless slots, their order and the cache limit are as described above."""
        in_slots = self.in_slots
        if len(in_slots) > self.limits.max_running:
            raise InvariantError(f"{len(in_slots)} sequences are in slots, at most {self.limits.max_running} may be")
        if not self.room.fits(self.room.slots, self.room.columns):
            raise InvariantError(f"the cache holds {self.room.tokens} tokens, more than {self.room.limit}")
        for slot, sequence in enumerate(in_slots):
            if sequence.slot != slot:
                raise InvariantError(f"slot {slot} is held by a sequence of slot {sequence.slot}")
            if (sequence.unread == 0) != (slot < len(self.decoding)) or sequence.cached > sequence.known:
                raise InvariantError(f"slot {slot}: {sequence.cached} of {sequence.known} tokens cached, out of order")
        if any(sequence.slot is not None or sequence.cached for sequence in self.waiting):
            raise InvariantError("a waiting sequence has a slot")

    def _shareable(self, batch: PrefillBatch, sequence: SequenceState, count: int) -> bool:
        if sequence.slot != batch.rows.stop:  # somebody between them has nothing to read
            return False
        if batch.whole and count < sequence.unread:  # it would keep the others from their first tokens
            return False
        sequences, counts = [*batch.sequences, sequence], [*batch.counts, count]
        columns = _columns(sequences, counts)
        full = sum(one.cached for one in sequences) + sum(counts)
        return len(sequences) * columns <= 2 * full and self.room.fits(len(self.in_slots), columns)

    def _note_admission(self, now: float) -> None:
        if self._admitted_at is not None and self.waiting:
            gap = now - self._admitted_at
            self._pace = gap if self._pace is None else 0.9 * self._pace + 0.1 * gap
        self._admitted_at = now


def _columns(sequences: list[SequenceState], counts: list[int]) -> int:
    """Cache columns that a prefill batch reaches up to, roots included."""
    return max(one.cached for one in sequences) + max(counts) + 1


class PassSize:
    """How many tokens a pass may hold: any number, until memory runs out in one; then half as many as that one held.

    After a while without such a failure twice as many are tried.
    """

    LEAST = 16
    """A pass of one sequence alone and no more tokens than these can't be made small enough."""
    _RECOVERY = 256
    """Steps without a failure until more is tried."""

    def __init__(self, max_running: int, prefill_chunk: int | None) -> None:
        self._max_running, self._prefill_chunk = max_running, prefill_chunk
        self._most: int | None = None
        self._failed = self._steps = 0

    @property
    def rows(self) -> int:
        """The most sequences in slots."""
        return self._max_running if self._most is None else min(self._max_running, self._most)

    @property
    def prefill_chunk(self) -> int | None:
        """The most prompt tokens that a step reads; None = all."""
        return min((n for n in (self._prefill_chunk, self._most) if n is not None), default=None)

    def fits(self, tokens: int) -> bool:
        """Whether a pass may hold so many tokens."""
        return self._most is None or tokens <= self._most

    def exhausted(self, tokens: int) -> None:
        """Memory ran out in a pass of so many tokens."""
        self._failed = max(self._failed, tokens)
        self._most = max(1, min(tokens, self._most or tokens) // 2)
        self._steps = 0

    def succeeded(self) -> None:
        """A step has gone well."""
        if self._most is None:
            return
        self._steps += 1
        if self._steps == self._RECOVERY:
            self._most, self._steps = 2 * self._most, 0
            if self._most > self._failed:
                self.restore()

    def restore(self) -> None:
        """Forget that memory has run out: nothing runs any more."""
        self._most, self._failed, self._steps = None, 0, 0


_GRANULE, _FLOOR = 64, 256
_MOST_MORE = 4096
"""Columns that are added at once beyond those needed: of long sequences, copies are rare all the same."""


class CacheRoom:
    """How large the slot caches should be: slots x columns, grown on demand within a limit.

    The cache is a rectangle, so its memory is slots x columns whatever the sequences' lengths. The limit holds for that
    product: it is memory, not the number of tokens in use.
    """

    def __init__(self, most_slots: int, limit: int | None) -> None:
        self.slots = 0
        self.columns = 0
        self.limit = limit
        self._most_slots = most_slots
        self._peak = (0, 0)
        self._found: int | None = None  # what memory turned out to have room for

    @property
    def tokens(self) -> int:
        """Number of tokens allocated, used or not."""
        return self.slots * self.columns

    def fits(self, slots: int, columns: int) -> bool:
        """Whether the limits allow such a rectangle; one slot may always try what the configured limit allows."""
        most = self._most(slots)
        return most is None or slots * columns <= most

    def cover(self, slots: int, columns: int, expected: int = 0) -> bool:
        """Grow to hold at least `slots` x `columns`, which must fit; True if the rectangle changed.

        It doubles, by at most `_MOST_MORE` columns, so that copying is seldom paid for, and makes room for the slots
        `expected` soon; close to the limit it takes what is left.
        """
        self._peak = (max(self._peak[0], slots), max(self._peak[1], columns))
        if slots <= self.slots and columns <= self.columns:
            return False
        wide, long = self.slots, self.columns
        if slots > wide:
            wide = max(slots, min(max(2 * wide, expected), self._most_slots))
        if columns > long:
            long = max(columns, long + min(long, _MOST_MORE))
            long += -long % _GRANULE
        if not self.fits(wide, long):
            most = self._most(slots)
            wide, long = slots, long if most is None else min(long, most // slots)
        self.slots, self.columns = wide, max(long, columns)
        return True

    def exhausted(self) -> None:
        """There was no memory for the rectangle that `cover` promised: stay well below until the engine is idle."""
        self._found, self.slots = self.tokens // 2, 0

    def empty(self) -> None:
        """The rectangle was given back: the next `cover` makes one for those that run then."""
        self.slots = 0

    def _most(self, slots: int) -> int | None:
        bounds = (self.limit, self._found if slots > 1 else None)
        return min((bound for bound in bounds if bound is not None), default=None)

    def shrink(self) -> bool:
        """Give back what the busy time that ends now hasn't needed; True if the rectangle changed."""
        (slots, columns), self._peak, self._found = self._peak, (0, 0), None
        columns = min(self.columns, max(columns + -columns % _GRANULE, _FLOOR))
        if slots * columns * 2 > self.tokens:
            return False
        self.slots, self.columns = slots, columns
        return True
