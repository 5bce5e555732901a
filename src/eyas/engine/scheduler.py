"""The scheduler: admission, chunked prefill, preemption, and how large the slot caches are. It holds no tensors.

Sequences in slots stand in this order: those that decode, then those whose prompt isn't read yet, first come first.
A step's prefill goes to the prefilling ones in that order, and no more are admitted than it reaches, so whoever is
done next is always the first behind the decoding ones and becomes one of them where it lies. Between two rounds a
number of prompt tokens may be read, in as many passes as first tokens can be had from without waste.

When the cache is full the youngest sequence loses its slot and waits at the head of its user's queue; what it has
emitted is kept, and read again later. The last one never loses its slot, so the oldest always ends and everyone does.
Where no slot is free for a client that has fewer than another, the youngest of the one with most makes room.

A step may be for some clients alone, or bounded for one that has many requests (`TimeShares`): then others' prompts
wait, also those that are half read, and decoding rows take turns.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from eyas.engine.fair_queue import FairQueue, StepPlan, TimeShares
from eyas.engine.sequence import PrefillBatch, SequenceState
from eyas.errors import CacheMemoryError, InvariantError, PassMemoryError, QueueFullError, RequestError
from eyas.types import Limits

_HEADROOM = 64
"""Tokens every running sequence must be able to grow by when another is admitted: else it is soon preempted."""

_LEAST_HELD = 8
"""Slots that a client with many requests may hold, however few of its rows a short round takes."""

Move = tuple[int, int]
"""A move of a sequence: from slot, to slot."""


class Scheduler:
    """The sequences that wait, prefill and decode, and which of them go on."""

    def __init__(self, limits: Limits, dense: int | None = None, enough: int | None = None) -> None:
        """`dense` as in `CacheRoom`; a pass that ends prompts needs no more than `enough` tokens, None = it shares."""
        self.limits, self._enough = limits, enough
        self.room = CacheRoom(limits.max_running, limits.max_cached_tokens, dense)
        self.passes = PassSize(limits.max_running, limits.prefill_chunk)
        self.waiting = FairQueue[SequenceState]()
        self.decoding: list[SequenceState] = []
        self.prefilling: list[SequenceState] = []
        self.preempted_total = 0
        self.copied = 0
        """Prompt tokens that were copied in since the last round."""
        self._read = 0  # and those that were read
        self._time, self._step = TimeShares(), StepPlan()
        self._turn = 0  # the slot of the row that decodes next where rows take turns
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
        limit, beside = self.room.limit, self.room.beside
        if limit is not None and sequence.longest + beside > limit:
            states = f", and its recurrent states take as much memory as {beside}" if beside else ""
            raise RequestError(
                f"prompt and answer can come to {sequence.longest} tokens{states}; the cache holds {limit}: shorten "
                "the prompt or ask for fewer tokens"
            )
        most, waiting = self.limits.max_waiting, len(self.waiting)
        if most is not None:
            most += self.limits.max_running - len(self.decoding) - len(self.prefilling)
            share = most // len({*self.waiting.clients, sequence.client})  # of a full queue
            if waiting >= most and (0 < share <= self.waiting.count(sequence.client) or waiting >= 2 * most):
                raise QueueFullError(f"{waiting} requests are waiting already: try again later", self.retry_after())
        self.waiting.push(sequence)

    def retry_after(self) -> float:
        """Seconds after which about a quarter of the queue should have been admitted, between 1 and 60."""
        return min(60.0, max(1.0, (self._pace or 0.0) * len(self.waiting) / 4))

    def begin(self, staging: int, now: float) -> None:
        """Begin a step at time `now`: choose whom it is for; `staging` as for `admit`."""
        requests = Counter(one.client for one in self.in_slots)
        for client in self.waiting.clients:
            requests[client] += self.waiting.count(client)
        self._step = step = self._time.plan(requests, now)
        if step.alone and not any(one.client in step.alone for one in self.in_slots):
            sequence, _ = self._next()
            if sequence is None or not (self._has_room(sequence, staging) or self.crowding(staging)):
                self._step = step._replace(alone=frozenset())  # else nobody would go on

    @property
    def crowded(self) -> bool:
        """Whether this step is to be short, as others wait for its end or may come: prompts or a round, not both."""
        return self._step.crowded

    def admit(self, staging: int, now: float) -> tuple[SequenceState | None, list[Move]]:
        """Give the next waiting sequence a slot; None if none waits or there is no room for it in this step.

        `staging` is how many columns a decoding pass takes beyond the longest sequence. The moves make way for it.
        """
        sequence, held = self._next()
        if sequence is None or not self._has_room(sequence, staging):
            return None, []
        many = self._step.crowded and sequence.client == self._step.greedy
        if many and held[sequence.client] >= max(_LEAST_HELD, 2 * self._time.rows.most):
            return None, []
        alone, left = self._step.alone, self._left
        position = len(self.prefilling)
        if alone:  # before the prompts of others
            position = next((at for at, one in enumerate(self.prefilling) if one.client not in alone), position)
        if left is not None and sum(other.unread for other in self.prefilling[:position]) >= left:
            return None, []
        self.waiting.take(sequence)
        sequence.cached = 0
        self.prefilling.insert(position, sequence)
        first = len(self.decoding) + position
        moves = [(slot - 1, slot) for slot in reversed(range(first + 1, len(self.in_slots)))]
        for slot, one in enumerate(self.in_slots[first:], first):
            one.slot = slot
        if self._admitted_at is not None and self.waiting:
            gap = now - self._admitted_at
            self._pace = gap if self._pace is None else 0.9 * self._pace + 0.1 * gap
        self._admitted_at = now
        return sequence, moves

    def crowding(self, staging: int) -> list[SequenceState]:
        """Who must leave so that the next waiting sequence has room: the youngest of the client with most slots."""
        sequence, held = self._next()
        greedy, most = max(held.items(), key=lambda item: item[1], default=("", 0))
        if sequence is None or most <= held[sequence.client] + 1 or self._has_room(sequence, staging):
            return []
        return [max((one for one in self.in_slots if one.client == greedy), key=lambda one: one.index)]

    def turn(self, ready: Callable[[SequenceState], bool]) -> list[SequenceState]:
        """Who decodes in the next round, in neighbouring slots: all that are `ready`, or those whose turn it is."""
        self._read = self.copied = 0
        able = [ready(one) for one in self.decoding]
        if not self._step.crowded and all(able):
            return list(self.decoding)
        alone, count = self._step.alone, len(able)
        slots = [at for at, one in enumerate(self.decoding) if able[at] and (not alone or one.client in alone)]
        if not slots:
            return []
        first = next((at for at in slots if at >= self._turn), slots[0])
        most = first + self._time.rows.most if self._step.crowded else count
        until = next((at for at in range(first, count) if not able[at]), count)
        end = 1 + max(at for at in slots if first <= at < min(most, until))
        self._turn = end if end < count else 0
        return self.decoding[first:end]

    def round_due(self) -> bool:
        """Whether no more prompts are read before the next round: enough were, or other clients have had less time."""
        if not self.decoding:
            return False
        if self._read and not self._left:
            return True
        if self._step.alone:
            return False
        with_prompts = {*self.waiting.clients, *(one.client for one in self.prefilling)}
        return self._time.before({one.client for one in self.decoding}, with_prompts)

    def charge_prompts(self, batches: Sequence[PrefillBatch], seconds: float) -> None:
        """Reading these pieces of prompts has taken so many seconds."""
        parts = Counter[str]()
        for batch in batches:
            for one, count in zip(batch.sequences, batch.counts, strict=True):
                parts[one.client] += count
        self._time.charge(parts, seconds)
        self._time.learn(self._step, 0, parts.total(), seconds)

    def charge_round(self, sequences: Sequence[SequenceState], seconds: float) -> None:
        """A round of these sequences has taken so many seconds."""
        self._time.charge(Counter(one.client for one in sequences), seconds)
        self._time.learn(self._step, len(sequences), 0, seconds)

    @property
    def _left(self) -> int | None:
        """The prompt tokens that may still be read before the next round; None = all."""
        chunk, step = self.passes.prefill_chunk, self._step
        if chunk is None:
            return None
        if step.crowded and not step.alone:
            chunk = min(chunk, self._time.tokens.most)
        return max(0, chunk - self._read)

    def _next(self) -> tuple[SequenceState | None, Counter[str]]:
        """Who is to have the next slot, one of a client that holds fewest, and how many each holds."""
        held = Counter(one.client for one in self.in_slots)
        return self.waiting.peek(held, self._step.alone or None), held

    def _has_room(self, sequence: SequenceState, staging: int) -> bool:
        """Whether there is a slot for a sequence, and room in the cache for it and all others to grow."""
        in_slots = self.in_slots
        if not in_slots:
            return True
        rows = [min(one.known + _HEADROOM, one.longest) + staging for one in (*in_slots, sequence)]
        # also as they are: long rows may take less memory, since short ones beside them need not be as long
        now = [one.known + staging for one in (*in_slots, sequence)]
        return len(in_slots) < self.passes.rows and self.room.fits(rows) and self.room.fits(now)

    def prefill_batches(self) -> list[PrefillBatch]:
        """What to prefill in this step. Neighbours share passes unless most of the padded batch would be empty.

        Where prompts are read in pieces, the step ends with the first pass that leads to first tokens and is no worse
        for being small: who came later needn't be read before they are handed out.
        """
        left = self._left
        batches: list[PrefillBatch] = []
        size, others = _BatchSize(), _Others([one.known + 1 for one in self.in_slots])
        alone = [at for at, one in enumerate(self.prefilling) if one.client in self._step.alone]
        for sequence in self.prefilling[: max(alone, default=-1) + 1] if self._step.alone else self.prefilling:
            count = sequence.unread if left is None else min(sequence.unread, left)
            if left is not None:
                left -= count
            if not count:
                continue
            joint = size.joined(sequence, count)
            if batches and self._shareable(batches[-1].rows, size, joint, sequence, others):
                batches[-1].sequences.append(sequence)
                batches[-1].counts.append(count)
                size = joint
            else:
                batches.append(PrefillBatch([sequence], [count]))
                size = _BatchSize().joined(sequence, count)
            if left is not None and self._enough is not None and size.whole and size.tokens >= self._enough:
                break
        return batches

    def _shareable(
        self, rows: range, size: _BatchSize, joint: _BatchSize, sequence: SequenceState, others: _Others
    ) -> bool:
        """Whether a batch in the slots `rows` takes one more sequence, with which its `size` is that of `joint`."""
        if sequence.slot != rows.stop:  # somebody between them has nothing to read
            return False
        if size.whole and not joint.whole:  # it would keep the others from their first tokens
            return False
        columns = joint.longest + joint.most + 1  # all stage equally many
        if joint.rows * columns > 2 * (joint.cached + joint.tokens):
            return False
        longest, total = others.but(range(rows.start, rows.stop + 1))
        taken = total + joint.cached + joint.rows * (joint.most + 1)
        return self.room.holds(len(self.in_slots), max(longest, columns), taken)

    def read(self, batches: Iterable[PrefillBatch]) -> None:
        """Batches were read: count them, and let the sequences that know their whole prompt decode."""
        self._read += sum(sum(batch.counts) for batch in batches)
        while self.prefilling and not self.prefilling[0].unread:
            self.decoding.append(self.prefilling.pop(0))

    def columns(self, staging: int) -> list[int]:
        """Cache columns that each sequence in a slot needs for its next pass."""
        needed = [one.known + staging for one in self.decoding]
        needed += [one.known + 1 for one in self.prefilling]  # with the root: `PrefillBatch.whole`
        for batch in self.prefill_batches():
            for slot, columns in zip(batch.rows, batch.columns, strict=True):
                needed[slot] = max(needed[slot], columns)
        return needed

    def fits(self, staging: int) -> bool:
        """Whether the cache has room for the next round of all sequences in slots."""
        return self.room.fits(self.columns(staging))

    def overflow(self) -> list[SequenceState]:
        """The youngest sequences, as many as must leave so that the others have room for a plain round; never all."""
        left, gone = sorted(self.in_slots, key=lambda one: one.index), []
        while len(left) > 1 and not self.room.fits([one.known + 1 for one in left]):
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
        """Send sequences back to the head of their users' queues; what they have emitted is read again later."""
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
            self.room.slots = 0  # all was given back: the next `cover` makes a rectangle for those that run then
        return not alone

    def expired(self, now: float) -> list[SequenceState]:
        """The sequences whose deadline has passed at time `now`."""
        return [one for one in (*self.in_slots, *self.waiting) if one.expires is not None and one.expires <= now]

    def check(self) -> None:
        """InvariantError unless slots, their order and the cache limit are as described above."""
        in_slots = self.in_slots
        if len(in_slots) > self.limits.max_running:
            raise InvariantError(f"{len(in_slots)} sequences are in slots, at most {self.limits.max_running} may be")
        if self.room.tokens > self.room.most(self.room.slots):
            raise InvariantError(f"the cache holds {self.room.tokens} tokens, more than {self.room.limit}")
        for slot, sequence in enumerate(in_slots):
            if sequence.slot != slot:
                raise InvariantError(f"slot {slot} is held by a sequence of slot {sequence.slot}")
            if (sequence.unread == 0) != (slot < len(self.decoding)) or sequence.cached > sequence.known:
                raise InvariantError(f"slot {slot}: {sequence.cached} of {sequence.known} tokens cached, out of order")
        if any(sequence.finish_reason is not None for sequence in (*in_slots, *self.waiting)):
            raise InvariantError("a finished sequence is still there")
        if any(sequence.slot is not None or sequence.cached for sequence in self.waiting):
            raise InvariantError("a waiting sequence has a slot")


class _BatchSize(NamedTuple):
    """The size of a batch of prompts as it grows: added up anew for each prompt, hundreds would take a minute."""

    rows: int = 0
    cached: int = 0
    """Tokens that all of them have cached."""
    longest: int = 0
    """The most that one has cached."""
    tokens: int = 0
    """Tokens to be read, of all of them."""
    most: int = 0
    """The most that are read of one."""
    whole: bool = True
    """Whether all of them can decode after it."""

    def joined(self, one: SequenceState, count: int) -> _BatchSize:
        """With `count` tokens of one more."""
        return _BatchSize(
            self.rows + 1,
            self.cached + one.cached,
            max(self.longest, one.cached),
            self.tokens + count,
            max(self.most, count),
            self.whole and count == one.unread,
        )


class _Others:
    """The columns that sequences in slots need, but for some neighbours."""

    def __init__(self, columns: Sequence[int]) -> None:
        self._until = list(accumulate(columns, max, initial=0))
        self._from = list(accumulate(reversed(columns), max, initial=0))[::-1]
        self._sums = list(accumulate(columns, initial=0))

    def but(self, slots: range) -> tuple[int, int]:
        """The most that one needs and what all need together, without those in `slots`."""
        longest = max(self._until[slots.start], self._from[slots.stop])
        return longest, self._sums[-1] - self._sums[slots.stop] + self._sums[slots.start]


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
    """How large the slot caches should be: slots x columns, grown on demand within a limit of memory.

    The cache is a rectangle, which takes memory for slots x columns whatever the sequences' lengths. On a CPU that is
    so up to `dense` columns; of a wider one the system gives a row only the pages that it has written to. A row also
    takes what doesn't grow with it, its recurrent states: as much as `beside` columns.
    """

    def __init__(self, most_slots: int, limit: int | None, dense: int | None = None) -> None:
        """`dense` None: every rectangle takes all of its memory."""
        self.slots = self.columns = self.beside = 0
        self.limit = limit
        self._most_slots, self._dense = most_slots, dense
        self._peak = (0, 0)
        self._rows: Sequence[int] = ()  # columns that each row needs
        self._found = math.inf  # what memory turned out to have room for

    @property
    def tokens(self) -> int:
        """Number of tokens that there is memory for, used or not."""
        columns = sum(self._rows) if self._sparse(self.columns) else self.slots * self.columns
        return columns + self.slots * self.beside

    def fits(self, rows: Sequence[int]) -> bool:
        """Whether the limits allow rows of so many columns; one row may always try what the configured limit allows."""
        return self.holds(len(rows), max(rows, default=0), sum(rows))

    def holds(self, rows: int, longest: int, total: int) -> bool:
        """`fits` for so many rows, the `longest` of which has so many columns, and all together a `total`."""
        taken = total if self._sparse(longest) else rows * longest
        return taken + rows * self.beside <= self.most(rows)

    def cover(self, rows: Sequence[int], expected: int = 0) -> bool:
        """Grow to hold rows of so many columns, which must fit; True if the rectangle changed.

        It doubles, by at most `_MOST_MORE` columns, so that copying is seldom paid for, and makes room for the slots
        `expected` soon; close to the limit it takes what is left.
        """
        slots, columns = len(rows), max(rows, default=0)
        self._rows = tuple(rows)
        self._peak = (max(self._peak[0], slots), max(self._peak[1], columns))
        if slots <= self.slots and columns <= self.columns:
            return False
        wide, long = self.slots, self.columns
        if slots > wide:
            wide = max(slots, min(max(2 * wide, expected), self._most_slots))
        if columns > long:
            long = max(columns, long + min(long, _MOST_MORE))
            long += -long % _GRANULE
        if not self._sparse(long) and not self.fits([long] * wide):
            wide, long = slots, int(min(long, self.most(slots) // slots - self.beside))
        self.slots, self.columns = wide, max(long, columns)
        return True

    def exhausted(self) -> None:
        """There was no memory for the rectangle that `cover` promised: stay well below until the engine is idle."""
        self._found, self.slots = self.tokens // 2, 0

    def shrink(self) -> bool:
        """Give back what the busy time that ends now hasn't needed; True if the rectangle changed."""
        (slots, columns), self._peak, self._found = self._peak, (0, 0), math.inf
        self._rows = ()
        columns = min(self.columns, max(columns + -columns % _GRANULE, _FLOOR))
        if slots * columns * 2 > self.slots * self.columns:
            return False
        self.slots, self.columns = slots, columns
        return True

    def _sparse(self, columns: int) -> bool:
        return self._dense is not None and columns > self._dense

    def most(self, slots: int) -> float:
        """The most tokens that so many slots may take."""
        return min(math.inf if self.limit is None else self.limit, self._found if slots > 1 else math.inf)
