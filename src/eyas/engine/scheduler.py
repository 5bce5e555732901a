"""The scheduler: admission, chunked prefill, preemption, and the size of the slot caches. It holds no tensors.

Slots hold the decoding sequences first, then those whose prompt isn't read yet, in order of arrival. A step's prefill
goes to the prefilling ones in that order, and no more are admitted than it reaches. So the next one to finish its
prompt is always the first behind the decoding ones, and joins them without moving. Between two rounds a limited number
of prompt tokens is read (`PassSizeLimits.batches` makes the passes).

When the cache is full, the youngest sequence is preempted and waits at the head of its user's queue. Its emitted tokens
are kept, and prefilled again later. The last sequence is never preempted, so the oldest always finishes, and in the end
all do. If no slot is free for a client that holds fewer than another, the youngest sequence of the client with the most
slots is preempted.

A step may be reserved for some clients, or bounded for a client with many requests (`FairTime`). Then other prompts
wait, even half-read ones, and decoding rows take turns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate

from eyas.engine.fair_share import FairTime, StepPlan, WaitingQueue
from eyas.engine.sequence import PrefillBatch, SequenceState
from eyas.errors import CacheMemoryError, InvariantError, PassMemoryError, RequestError
from eyas.targets.slots import CacheRoom
from eyas.types import Limits

_HEADROOM = 64
"""Tokens that every running sequence must have room to grow by when another is admitted, or one is soon preempted."""

_MIN_HELD = 8
"""Slots that a client with many requests may always hold, even if a short round takes fewer of its rows."""

Move = tuple[int, int]
"""A move of a sequence: from slot, to slot."""


class RunningSlots:
    """The sequences in slots: those that decode, then those whose prompt isn't read yet."""

    def __init__(self, room: CacheRoom, passes: PassSizeLimits) -> None:
        self._room = room
        self._passes = passes
        self.decoding: list[SequenceState] = []
        self.prefilling: list[SequenceState] = []

    def __len__(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    @property
    def sequences(self) -> list[SequenceState]:
        """Every sequence; the index in this list is the slot."""
        return self.decoding + self.prefilling

    def held(self) -> Counter[str]:
        """How many slots each client holds."""
        return Counter(one.client for one in self.sequences)

    def insert(self, sequence: SequenceState, position: int) -> list[Move]:
        """Give a sequence a slot, at `position` among the prefilling ones; the moves make way for it."""
        # decoding [A], prefilling [P, Q]: S at position 1 makes [A, P, S, Q], after Q has moved from slot 2 to 3
        sequence.cached = 0
        self.prefilling.insert(position, sequence)
        first = len(self.decoding) + position
        moves = [(slot - 1, slot) for slot in reversed(range(first + 1, len(self)))]
        for slot, one in enumerate(self.prefilling[position:], first):
            one.slot = slot
        return moves

    def promote(self) -> None:
        """Let the sequences decode whose whole prompt is cached."""
        while self.prefilling and not self.prefilling[0].unread:
            self.decoding.append(self.prefilling.pop(0))

    def remove(self, gone: Collection[SequenceState]) -> list[Move]:
        """Take sequences out of their slots; the moves close the gaps, each into a slot that is free by then.

        The last decoding sequence fills a gap among the decoding ones; the prefilling ones move up in order.
        """
        # decoding [A, B, C], prefilling [P, Q] without A: [C, B, P, Q], by the moves 2 -> 0, 3 -> 2, 4 -> 3, in order
        for slot in reversed(range(len(self.decoding))):
            if self.decoding[slot] in gone:
                last = self.decoding.pop()
                if slot < len(self.decoding):
                    self.decoding[slot] = last
        self.prefilling = [one for one in self.prefilling if one not in gone]
        for sequence in gone:
            sequence.slot = None
            sequence.cached = 0
        moves = []
        for slot, sequence in enumerate(self.sequences):
            assert sequence.slot is not None
            if sequence.slot != slot:
                moves.append((sequence.slot, slot))
                sequence.slot = slot
        return moves

    def has_room(self, sequence: SequenceState, staging: int, gone: Collection[SequenceState] = ()) -> bool:
        """Whether there is a slot for a sequence, and room in the cache for it and all others but `gone` ones to grow.

        A sequence alone always has room.
        """
        rows = [*(one for one in self.sequences if one not in gone), sequence]
        if len(rows) == 1:
            return True
        grown = [min(one.known + _HEADROOM, one.longest) + staging for one in rows]
        # and as they are now: in a wide cache each row takes its own pages, so longer rows may take less in all
        now = [one.known + staging for one in rows]
        return len(rows) <= self._passes.rows and self._room.fits(grown) and self._room.fits(now)

    def awaits_growth(self, sequence: SequenceState, staging: int) -> bool:
        """Whether a sequence must wait for larger caches, to which the contents are still being copied."""
        enough = self._room.has(len(self) + 1, sequence.known + 1 + staging)
        return self._room.planned is not None and not self._room.ready and not enough

    def expected(self, waiting: int) -> int:
        """How many sequences may soon be in slots if `waiting` more are queued."""
        return min(len(self) + waiting, self._passes.rows)

    def overflow(self) -> list[SequenceState]:
        """The youngest sequences that must leave so that the others have room for a plain round; never all."""
        left, gone = sorted(self.sequences, key=lambda one: one.index), []
        while len(left) > 1 and not self._room.fits([one.known + 1 for one in left]):
            gone.append(left.pop())
        return gone

    def check(self) -> None:
        """Raise InvariantError unless each sequence has its slot, and the decoding ones come first."""
        for slot, sequence in enumerate(self.sequences):
            if sequence.slot != slot:
                raise InvariantError(f"slot {slot} is held by a sequence of slot {sequence.slot}")
            if (sequence.unread == 0) != (slot < len(self.decoding)) or sequence.cached > sequence.known:
                raise InvariantError(f"slot {slot}: {sequence.cached} of {sequence.known} tokens cached, out of order")


class StepBudget:
    """Which clients a step is for, and how much it runs: prompt tokens before the next round, and that round's rows."""

    def __init__(self, passes: PassSizeLimits) -> None:
        self.copied = 0
        """Prompt tokens copied from the prefix cache since the last round."""
        self._read = 0  # prompt tokens read since then
        self._passes = passes
        self._time = FairTime()
        self._plan = StepPlan()
        self._turn = 0  # the slot of the row that decodes next when rows take turns

    def begin(self, requests: Mapping[str, int], now: float) -> None:
        """Plan a step at time `now`; `requests` says how many each client has waiting or in slots."""
        self._plan = self._time.plan(requests, now)

    @property
    def alone(self) -> frozenset[str]:
        """The step is for these clients alone; empty = for all."""
        return self._plan.alone

    def open(self) -> None:
        """Let the step be for all clients, because those that it was reserved for can't continue."""
        self._plan = self._plan._replace(alone=frozenset())

    @property
    def crowded(self) -> bool:
        """Whether this step must be short (prompts or a round, not both), because other clients wait or may arrive."""
        return self._plan.crowded

    def allows(self, client: str, held: int) -> bool:
        """Whether a client that holds `held` slots may have one more."""
        many = self._plan.crowded and client == self._plan.greedy
        return not many or held < max(_MIN_HELD, 2 * self._time.rows.most)

    @property
    def left(self) -> int | None:
        """The prompt tokens that may still be read before the next round; None = all."""
        chunk, step = self._passes.prefill_chunk, self._plan
        if chunk is None:
            return None
        if step.crowded and not step.alone:  # the client with many requests takes part
            chunk = min(chunk, self._time.tokens.most)
        return max(0, chunk - self._read)

    def turn(self, decoding: list[SequenceState], ready: Callable[[SequenceState], bool]) -> list[SequenceState]:
        """The sequences of the next round, in neighboring slots: all that are `ready`, or those whose turn it is."""
        self._read = self.copied = 0
        able = [ready(one) for one in decoding]
        if not self._plan.crowded and all(able):
            return list(decoding)
        alone = self._plan.alone
        count = len(able)
        slots = [at for at, one in enumerate(decoding) if able[at] and (not alone or one.client in alone)]
        if not slots:
            return []
        # a pass runs over a range of slots, so the rows of a round are neighbors: of [A, B, C, D], rounds of two are
        # A B, C D, A B, ...; if C isn't ready, A B, D, A B, ...
        first = next((at for at in slots if at >= self._turn), slots[0])
        most = first + self._time.rows.most if self._plan.crowded else count
        until = next((at for at in range(first, count) if not able[at]), count)
        end = 1 + max(at for at in slots if first <= at < min(most, until))
        self._turn = end if end < count else 0
        return decoding[first:end]

    def round_due(self, running: RunningSlots, waiting: WaitingQueue[SequenceState]) -> bool:
        """Whether a round comes next: enough prompt tokens were read, or decoding clients have had less time."""
        if not running.decoding:
            return False
        if self._read and not self.left:
            return True
        if self._plan.alone:
            return False
        with_prompts = {*waiting.clients, *(one.client for one in running.prefilling)}
        return self._time.before({one.client for one in running.decoding}, with_prompts)

    def charge_prompts(self, batches: Sequence[PrefillBatch], seconds: float) -> None:
        """Charge clients for prefill `batches` that took `seconds`."""
        parts = Counter[str]()
        for batch in batches:
            for one, count in zip(batch.sequences, batch.counts, strict=True):
                parts[one.client] += count
        if parts:
            self._read += parts.total()
            self._time.charge(parts, seconds)
            self._time.learn(self._plan, 0, parts.total(), seconds)

    def charge_round(self, sequences: Sequence[SequenceState], seconds: float) -> None:
        """Charge clients for a round of `sequences` that took `seconds`."""
        self._time.charge(Counter(one.client for one in sequences), seconds)
        self._time.learn(self._plan, len(sequences), 0, seconds)


class Scheduler:
    """The sequences that wait, prefill and decode, and the choice of those that continue."""

    def __init__(self, limits: Limits, dense: int | None = None, enough: int | None = None) -> None:
        """`dense` as in `CacheRoom`. A pass that ends prompts needs only `enough` tokens; None = all it can share."""
        self.limits = limits
        self.room = CacheRoom(limits.max_running, limits.max_cached_tokens, dense)
        self.passes = PassSizeLimits(self.room, limits.max_running, limits.prefill_chunk, enough)
        self.waiting = WaitingQueue[SequenceState](limits.max_waiting)
        self.running = RunningSlots(self.room, self.passes)
        self.budget = StepBudget(self.passes)
        self.preempted_total = 0

    @property
    def busy(self) -> bool:
        """Whether any sequence is waiting or in a slot."""
        return bool(self.running or self.waiting)

    def shrink(self) -> bool:
        """Reset the memory limits when nothing is left to run; returns whether the caches should be made smaller."""
        self.passes.restore()
        return self.room.shrink()

    def submit(self, sequence: SequenceState) -> None:
        """Queue a new sequence. Raises RequestError if it could never fit, QueueFullError if too many wait."""
        limit = self.room.limit
        state = self.room.state_columns
        if limit is not None and sequence.longest + state > limit:
            states = f", and its recurrent state takes as much memory as {state} more tokens" if state else ""
            raise RequestError(
                f"prompt and answer can come to {sequence.longest} tokens{states}; the cache holds {limit}: shorten "
                "the prompt or ask for fewer tokens"
            )
        self.waiting.submit(sequence, self.limits.max_running - len(self.running))

    def begin(self, staging: int, now: float) -> None:
        """Begin a step at time `now`: choose whom it is for; `staging` as for `admit`."""
        requests = self.running.held()
        for client in self.waiting.clients:
            requests[client] += self.waiting.count(client)
        self.budget.begin(requests, now)
        if self.budget.alone and not self.budget.alone & self.running.held().keys():
            sequence, _ = self._next()
            if (
                sequence is None
                or self.running.awaits_growth(sequence, staging)
                or not (self.running.has_room(sequence, staging) or self.crowded_out(staging))
            ):
                self.budget.open()  # otherwise nobody would continue

    def admit(self, staging: int, now: float) -> tuple[SequenceState | None, list[Move]]:
        """Give the next waiting sequence a slot; None if none waits or there is no room for it in this step.

        `staging` is how many columns a decoding pass takes beyond the longest sequence. The moves make way for it.
        """
        sequence, held = self._next()
        if sequence is None or not self.running.has_room(sequence, staging):
            return None, []
        if not self.budget.allows(sequence.client, held[sequence.client]) or self.running.awaits_growth(
            sequence, staging
        ):
            return None, []
        alone = self.budget.alone
        left = self.budget.left
        prefilling = self.running.prefilling
        position = len(prefilling)
        if alone:  # before the prompts of others
            position = next((at for at, one in enumerate(prefilling) if one.client not in alone), position)
        if left is not None and sum(other.unread for other in prefilling[:position]) >= left:
            return None, []
        self.waiting.admit(sequence, now)
        return sequence, self.running.insert(sequence, position)

    def crowded_out(self, staging: int) -> list[SequenceState]:
        """The sequences to preempt for the next waiting one: the youngest of the client with the most slots.

        Empty if there is room already, or if the waiting client would then hold more slots than that client.
        """
        sequence, held = self._next()
        gone: list[SequenceState] = []
        while sequence is not None and not self.running.has_room(sequence, staging, gone):
            greedy, most = max(held.items(), key=lambda item: item[1], default=("", 0))
            if most <= held[sequence.client] + 1:
                return []
            left = [one for one in self.running.sequences if one.client == greedy and one not in gone]
            gone.append(max(left, key=lambda one: one.index))
            held[greedy] -= 1
        return gone

    def _next(self) -> tuple[SequenceState | None, Counter[str]]:
        """The sequence that gets the next slot, of a client that holds the fewest; and how many each client holds."""
        held = self.running.held()
        return self.waiting.peek(held, self.budget.alone or None), held

    def prefill_batches(self) -> list[PrefillBatch]:
        """What to prefill in this step, one batch per pass."""
        left = self.budget.left
        alone = self.budget.alone
        prefilling = self.running.prefilling
        if not prefilling:
            return []
        if alone:
            last = max((at for at, one in enumerate(prefilling, 1) if one.client in alone), default=0)
            prefilling = prefilling[:last]
        return self.passes.batches(self.running.sequences, prefilling, left)

    def columns(self, staging: int) -> list[int]:
        """Cache columns that each sequence in a slot needs for its next pass."""
        needed = [one.known + staging for one in self.running.decoding]
        needed += [one.known + 1 for one in self.running.prefilling]  # with the root: `PrefillBatch.whole`
        for batch in self.prefill_batches():
            for slot, columns in zip(batch.rows, batch.columns, strict=True):
                needed[slot] = max(needed[slot], columns)
        return needed

    def cover(self, staging: int) -> bool:
        """Grow the cache's room for `columns`, and for sequences that will soon come; whether its shape changed."""
        soon = max((_expected_length(one) for one in self.running.sequences), default=0) + max(staging, _HEADROOM)
        return self.room.cover(self.columns(staging), self.running.expected(len(self.waiting)), soon)

    def plan_growth(self, staging: int) -> None:
        """Plan larger caches for sequences that grow or come soon, unless there is little to copy."""
        chunk, rows = self.passes.prefill_chunk, self.running.sequences
        if chunk is None or sum(one.cached for one in rows) <= chunk:
            self.room.planned = None
            return
        coming, _ = self._next()
        if coming is not None and self.running.has_room(coming, staging):
            rows = [*rows, coming]
        columns = max(map(_expected_length, rows)) + staging
        if not self.room.has(len(rows), columns):
            self.room.plan(len(rows), columns, self.running.expected(len(self.waiting)))
        elif not self.waiting:  # otherwise one of those waiting may still need it
            self.room.planned = None

    def preempt(self, victims: Iterable[SequenceState]) -> list[Move]:
        """Send sequences back to the head of their users' queues; their emitted tokens are read again later."""
        victims = list(victims)
        moves = self.running.remove(victims)
        for sequence in victims:
            self.waiting.push_front(sequence)
        self.preempted_total += len(victims)
        return moves

    def reduce_load(self, error: CacheMemoryError | PassMemoryError) -> bool:
        """After memory ran out, run fewer sequences or smaller passes; False if a single sequence was too much."""
        if isinstance(error, CacheMemoryError):
            alone = self.room.slots == 1
            self.room.exhausted()
        else:
            alone = len(self.running) == 1 and error.tokens <= self.passes.MIN_TOKENS
            self.passes.exhausted(error.tokens)
            self.room.slots = 0  # all was freed: the next `cover` makes a rectangle for the sequences that run then
        return not alone

    def expired(self, now: float) -> list[SequenceState]:
        """The sequences whose deadline has passed at time `now`."""
        return [
            one for one in (*self.running.sequences, *self.waiting) if one.expires is not None and one.expires <= now
        ]

    def check(self) -> None:
        """Raise InvariantError unless slots, their order and the cache limit are as described above."""
        in_slots = self.running.sequences
        if len(in_slots) > self.limits.max_running:
            raise InvariantError(f"{len(in_slots)} sequences are in slots, at most {self.limits.max_running} may be")
        if self.room.tokens > self.room.max_tokens(self.room.slots):
            raise InvariantError(f"the cache holds {self.room.tokens} tokens, more than {self.room.limit}")
        self.running.check()
        for sequence in (*in_slots, *self.waiting):
            if sequence.finish_reason is not None:
                where = "waits" if sequence.slot is None else f"occupies slot {sequence.slot}"
                raise InvariantError(f"finished sequence {sequence.index} still {where}")
        if any(sequence.slot is not None or sequence.cached for sequence in self.waiting):
            raise InvariantError("a waiting sequence has a slot")


def _expected_length(sequence: SequenceState) -> int:
    """The length up to which a sequence is about to grow: by a quarter, or `_HEADROOM` tokens if that is more."""
    return min(sequence.known + max(_HEADROOM, sequence.known // 4), sequence.longest)


class PassSizeLimits:
    """How large passes may be, and which prompts share one.

    A pass may hold any number of tokens until memory runs out in one, then half as many as that one held. After a while
    without such a failure, twice as many are tried. Prompts in neighboring slots share passes unless most of the padded
    batch would be empty.
    """

    MIN_TOKENS = 16
    """If memory runs out in a pass of one sequence with at most this many tokens, smaller passes don't help."""
    _RECOVERY = 256
    """Steps without a failure before more tokens are tried."""

    def __init__(self, room: CacheRoom, max_running: int, prefill_chunk: int | None, enough: int | None = None) -> None:
        """A pass that ends prompts needs only `enough` tokens; None = all it can share."""
        self._room = room
        self._max_running = max_running
        self._prefill_chunk = prefill_chunk
        self._enough = enough
        self._most: int | None = None
        self._failed = 0
        self._steps = 0

    @property
    def rows(self) -> int:
        """Maximum number of sequences in slots."""
        return self._max_running if self._most is None else min(self._max_running, self._most)

    @property
    def prefill_chunk(self) -> int | None:
        """Maximum number of prompt tokens that a step reads; None = all."""
        return min((n for n in (self._prefill_chunk, self._most) if n is not None), default=None)

    def fits(self, tokens: int) -> bool:
        """Whether a pass may hold `tokens` tokens."""
        return self._most is None or tokens <= self._most

    def exhausted(self, tokens: int) -> None:
        """Record that memory ran out in a pass of `tokens` tokens."""
        self._failed = max(self._failed, tokens)
        self._most = max(1, min(tokens, self._most or tokens) // 2)  # the pass may have been larger than allowed
        self._steps = 0

    def succeeded(self) -> None:
        """Record a step without a failure."""
        if self._most is None:
            return
        self._steps += 1
        if self._steps == self._RECOVERY:
            self._most = 2 * self._most
            self._steps = 0
            if self._most > self._failed:
                self.restore()

    def restore(self) -> None:
        """Forget that memory ran out, because nothing is running anymore."""
        self._most = None
        self._failed = 0
        self._steps = 0

    def batches(
        self, in_slots: Sequence[SequenceState], prompts: Iterable[SequenceState], left: int | None
    ) -> list[PrefillBatch]:
        """The passes over `prompts`, in the order of their slots, which read at most `left` tokens; None = all.

        With a limit the step ends with the first pass that leads to first tokens and is large enough to be efficient,
        so that these are handed out before later prompts are read.
        """
        columns = [one.known + 1 for one in in_slots]
        # [slots + 1] by slot: the longest of those before it, the longest from it on, and the sum of those before it
        before = list(accumulate(columns, max, initial=0))
        after = list(accumulate(reversed(columns), max, initial=0))[::-1]
        sums = list(accumulate(columns, initial=0))
        made: list[PrefillBatch] = []
        for sequence in prompts:
            count = sequence.unread if left is None else min(sequence.unread, left)
            if left is not None:
                left -= count
            if not count:
                continue
            joins = False
            if made and self._alike(made[-1], sequence, count):
                first = made[-1].rows.start
                stop = made[-1].rows.stop + 1
                batch = made[-1]
                # all rows of a pass stage as many columns as its longest
                staged = max(batch.most, count) + 1
                longest = max(batch.longest, sequence.cached) + staged
                taken = batch.cached + sequence.cached + (stop - first) * staged
                others = sums[-1] - sums[stop] + sums[first]
                joins = self._room.holds(len(columns), max(before[first], after[stop], longest), others + taken)
            if not joins:
                made.append(PrefillBatch([], []))
            made[-1].add(sequence, count)
            if left is not None and self._enough is not None and made[-1].whole and made[-1].tokens >= self._enough:
                break
        return made

    @staticmethod
    def _alike(batch: PrefillBatch, sequence: SequenceState, count: int) -> bool:
        """Whether `count` tokens of one more prompt should join a batch, if there is room."""
        if sequence.slot != batch.rows.stop:  # a sequence between them has nothing to read
            return False
        if batch.whole and count < sequence.unread:  # it would keep the others from their first tokens
            return False
        columns = max(batch.longest, sequence.cached) + max(batch.most, count) + 1
        real = batch.cached + sequence.cached + batch.tokens + count
        return (len(batch.sequences) + 1) * columns <= 2 * real
