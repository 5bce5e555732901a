"""The scheduler over a simulated machine: slots hold what they should, everything fits, everyone ends."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.engine.scheduler import Move, Scheduler
from eyas.engine.sequence import SequenceState, slots_of
from eyas.errors import QueueFullError, RequestError, UsageError
from eyas.types import Limits, Request


def sequence(index: int, prompt: int = 5, limit: int = 5, key: str = "", expires: float | None = None) -> SequenceState:
    return SequenceState(index, Request((7,) * prompt), limit, key=key, expires=expires)


class Machine:
    """What an engine does with a scheduler, with a list of owners for the slots."""

    def __init__(self, limits: Limits, dense: int | None = None) -> None:
        self.scheduler = Scheduler(limits, dense)
        self.owners: list[int | None] = []
        self.now = 0.0
        self.ended: list[int] = []
        self.admitted: list[int] = []
        self.longest_read = 0

    def step(self, emit: int, staging: int) -> None:
        scheduler = self.scheduler
        self.now += 1.0
        scheduler.begin(staging, self.now)
        while True:
            one, moves = scheduler.admit(staging, self.now)
            if one is None:
                if crowded_out := scheduler.crowded_out(staging):
                    self.drop(crowded_out, preempt=True)
                    continue
                break
            self.cover(0)
            self.move(moves)
            assert one.slot is not None
            assert self.owners[one.slot] is None
            self.owners[one.slot] = one.index
            self.admitted.append(one.index)
        self.cover(0)
        read = 0
        pieces = scheduler.prefill_batches()
        for piece in pieces:
            assert [one.slot for one in piece.sequences] == list(piece.rows)
            assert max(one.cached for one in piece.sequences) + max(piece.counts) <= scheduler.room.columns
            full = sum(one.cached for one in piece.sequences) + sum(piece.counts)
            assert len(piece.sequences) == 1 or len(piece.sequences) * max(piece.columns) <= 2 * full
            read += sum(piece.counts)
            for one, count in zip(piece.sequences, piece.counts, strict=True):
                one.cached += count
        self.longest_read = max(self.longest_read, read)
        scheduler.budget.charge_prompts(pieces, 0.001 * read)
        assert scheduler.limits.prefill_chunk is None or read <= scheduler.limits.prefill_chunk
        scheduler.running.promote()
        if victims := scheduler.running.overflow():
            assert len(victims) < len(scheduler.running.sequences)
            assert min(one.index for one in victims) > max(
                one.index for one in scheduler.running.sequences if one not in victims
            )
            self.drop(victims, preempt=True)
        if not scheduler.room.fits(scheduler.columns(staging)):
            staging = 1
            assert scheduler.room.fits(scheduler.columns(1))
        self.cover(staging)
        turn = scheduler.budget.turn(scheduler.running.decoding, lambda _: True)
        assert [one.slot for one in turn] == list(slots_of(turn)) if turn else not scheduler.running.decoding or read
        scheduler.budget.charge_round(turn, 0.01 * len(turn))
        for one in turn:
            assert one.known + staging <= scheduler.room.columns
            taken = min(emit, staging, one.limit - len(one.tokens))
            one.tokens += [1] * taken
            one.cached += taken
        self.drop([one for one in scheduler.running.decoding if len(one.tokens) == one.limit])
        self.check()

    def cover(self, staging: int) -> None:
        room = self.scheduler.room
        if self.scheduler.cover(staging):
            assert room.tokens <= room.max_tokens(room.slots)
            self.owners = self.owners[: room.slots] + [None] * (room.slots - len(self.owners))

    def drop(self, gone: list[SequenceState], preempt: bool = False) -> None:
        slots = [one.slot for one in gone]
        moves = self.scheduler.preempt(gone) if preempt else self.scheduler.running.remove(gone)
        for slot in slots:
            assert slot is not None
            self.owners[slot] = None
        self.move(moves)
        if not preempt:
            self.ended += [one.index for one in gone]

    def move(self, moves: list[Move]) -> None:
        for source, target in moves:
            assert self.owners[target] is None
            self.owners[target] = self.owners[source]
            self.owners[source] = None

    def check(self) -> None:
        self.scheduler.check()
        in_slots = [one.index for one in self.scheduler.running.sequences]
        assert self.owners == in_slots + [None] * (len(self.owners) - len(in_slots))


limits = st.builds(
    Limits,
    max_running=st.integers(1, 6),
    max_cached_tokens=st.none() | st.integers(60, 300),
    prefill_chunk=st.none() | st.integers(1, 40),
)
arrivals = st.lists(
    st.tuples(st.integers(1, 120), st.integers(1, 120), st.sampled_from("ab"), st.integers(0, 3)), max_size=25
)


@settings(max_examples=150)
@given(limits, st.none() | st.integers(40, 150), arrivals, st.integers(1, 5), st.integers(1, 12), st.data())
def test_everything_that_is_accepted_ends(
    limits: Limits,
    dense: int | None,
    arrivals: list[tuple[int, int, str, int]],
    emit: int,
    staging: int,
    data: st.DataObject,
) -> None:
    machine = Machine(limits, dense)
    accepted: dict[int, SequenceState] = {}
    for index, (prompt, answer, key, wait) in enumerate(arrivals):
        one = sequence(index, prompt, answer, key)
        if limits.max_cached_tokens is not None and one.longest > limits.max_cached_tokens:
            with pytest.raises(RequestError, match="shorten the prompt"):
                machine.scheduler.submit(one)
            continue
        machine.scheduler.submit(one)
        accepted[index] = one
        for _ in range(wait):
            machine.step(emit, staging)
        live = [one for i, one in accepted.items() if i not in machine.ended]
        if live and data.draw(st.booleans(), label="cancel"):
            victim = data.draw(st.sampled_from(live))
            if victim.slot is None:
                machine.scheduler.waiting.remove(victim)
                machine.ended.append(victim.index)
            else:
                machine.drop([victim])
            machine.check()
    steps = 0
    bound = 50 + sum(one.longest + 200 for one in accepted.values()) * 2
    while machine.scheduler.busy:
        machine.step(emit, staging)
        steps += 1
        assert steps < bound, "somebody is stuck"
    assert sorted(machine.ended) == sorted(accepted)


def test_a_short_one_has_room_beside_a_long_one_before_that_is_long() -> None:
    """From 128 columns on rows take what they need; below, as much as the longest."""
    machine = Machine(Limits(max_running=2, max_cached_tokens=132), 128)
    for index, (prompt, answer) in enumerate([(67, 61), (1, 1)]):
        machine.scheduler.submit(sequence(index, prompt, answer))
    for _ in range(80):
        machine.step(1, 1)
    assert sorted(machine.ended) == [0, 1]


@given(st.integers(1, 4), st.integers(2, 60))
def test_a_greedy_key_starves_nobody(slots: int, backlog: int) -> None:
    machine = Machine(Limits(max_running=slots))
    for index in range(backlog):
        machine.scheduler.submit(sequence(index, key="greedy"))
    machine.step(1, 1)
    machine.scheduler.submit(sequence(backlog, key="meek"))
    while backlog not in machine.admitted:
        machine.step(1, 1)
    assert machine.admitted.index(backlog) <= 2 * slots


def test_batching_prompts_takes_time_in_proportion_to_their_number() -> None:
    def calls(prompts: int) -> int:
        scheduler = Scheduler(Limits(max_running=prompts))
        made = 0
        for index in range(prompts):
            scheduler.submit(sequence(index, 5 + index % 3))
        scheduler.begin(1, 0.0)
        while scheduler.admit(1, 0.0)[0] is not None:
            pass

        def count(_frame: FrameType, event: str, _arg: object) -> None:
            nonlocal made
            made += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            batches = scheduler.prefill_batches()
        finally:
            sys.setprofile(None)
        assert [len(batch.sequences) for batch in batches] == [prompts]
        return made

    assert calls(200) < 2.5 * calls(100)


def test_decoding_goes_on_while_a_long_prompt_is_read() -> None:
    machine = Machine(Limits(max_running=3, prefill_chunk=8))
    machine.scheduler.submit(sequence(0, 5, 100))
    machine.step(1, 1)
    machine.scheduler.submit(sequence(1, 80, 5))
    machine.scheduler.submit(sequence(2, 5, 5))
    first = machine.scheduler.running.decoding[0]
    for step in range(9):
        machine.step(1, 1)
        assert len(first.tokens) == 2 + step
        assert [one.index for one in machine.scheduler.running.prefilling] == [1]
    machine.step(1, 1)
    assert machine.longest_read == 8
    assert [one.index for one in machine.scheduler.running.decoding] == [0, 1]


def test_the_youngest_is_preempted_and_comes_back_first() -> None:
    machine = Machine(Limits(max_running=3, max_cached_tokens=240))
    for index in range(4):
        machine.scheduler.submit(sequence(index, 10, 100))
    machine.step(1, 1)
    assert [one.index for one in machine.scheduler.running.decoding] == [0, 1, 2]
    while len(machine.scheduler.running.decoding) == 3:
        machine.step(1, 1)
    gone = machine.scheduler.waiting.peek()
    assert gone is not None
    assert gone.index == 2
    assert len(gone.tokens) > 60
    assert machine.scheduler.preempted_total == 1
    while 3 not in machine.ended:
        machine.step(1, 1)
    assert machine.admitted == [0, 1, 2, 2, 3]


def test_a_full_queue_refuses_but_everyone_may_ask_once() -> None:
    scheduler = Scheduler(Limits(max_running=2, max_waiting=3))
    for index in range(5):  # two of them find a free slot
        scheduler.submit(sequence(index, key="a"))
    with pytest.raises(QueueFullError, match="5 requests are waiting") as caught:
        scheduler.submit(sequence(5, key="a"))
    assert 1.0 <= caught.value.retry_after <= 60.0
    for index, key in enumerate("bcdef", 6):
        scheduler.submit(sequence(index, key=key))
    with pytest.raises(QueueFullError):
        scheduler.submit(sequence(20, key="g"))


def test_a_full_queue_is_shared_by_clients_not_by_the_users_they_name() -> None:
    scheduler = Scheduler(Limits(max_running=2, max_waiting=6))
    for index in range(8):
        scheduler.submit(sequence(index, key=f"greedy/{index}"))
    with pytest.raises(QueueFullError):
        scheduler.submit(sequence(8, key="greedy/new"))
    for index in range(9, 13):
        scheduler.submit(sequence(index, key=f"polite/{index}"))
    with pytest.raises(QueueFullError):
        scheduler.submit(sequence(13, key="polite/new"))


@given(st.integers(2, 8), st.integers(1, 6))
def test_a_client_without_slots_gets_some_at_once_up_to_an_equal_number(slots: int, asked: int) -> None:
    machine = Machine(Limits(max_running=slots))
    for index in range(slots + 3):
        machine.scheduler.submit(sequence(index, 5, 1000, key=f"greedy/{index}"))
    machine.step(1, 1)
    for index in range(100, 100 + asked):
        machine.scheduler.submit(sequence(index, 5, 1000, key="polite"))
    machine.step(1, 1)
    held = Counter(one.client for one in machine.scheduler.running.sequences)
    assert held["polite"] == min(asked, slots // 2)
    assert held["greedy"] == slots - held["polite"]
    kept = [one.index for one in machine.scheduler.running.sequences if one.client == "greedy"]
    assert sorted(kept) == list(range(len(kept))), "the youngest make room"
    before = machine.scheduler.preempted_total
    for _ in range(5):
        machine.step(1, 1)
    assert machine.scheduler.preempted_total == before, "they must not take turns in throwing each other out"


def test_room_in_the_cache_is_made_for_a_client_that_has_none() -> None:
    machine = Machine(Limits(max_running=8, max_cached_tokens=1024))
    for index in range(8):
        machine.scheduler.submit(sequence(index, 150, 300, key="greedy"))
    machine.step(1, 1)
    assert 2 <= len(machine.scheduler.running.decoding) < 8
    machine.scheduler.submit(sequence(8, 150, 10, key="polite"))
    machine.step(1, 1)
    assert 8 in machine.admitted


def test_nobody_makes_room_in_vain() -> None:
    """One of the greedy client's left, and the polite one had no room all the same: the step went to nobody."""
    machine = Machine(Limits(max_running=4, max_cached_tokens=60))
    for index in range(2):
        machine.scheduler.submit(sequence(index, 6, 10, key="greedy"))
    machine.step(1, 1)
    machine.scheduler.submit(sequence(2, 1, 29, key="polite"))
    machine.step(1, 1)
    assert machine.scheduler.preempted_total == 0
    assert len(machine.scheduler.running.decoding) == 2


def test_how_long_to_wait_follows_the_pace() -> None:
    scheduler = Scheduler(Limits())
    for index in range(41):
        scheduler.submit(sequence(index))
    for round_ in range(21):
        one, _ = scheduler.admit(1, 2.0 * round_)
        assert one is not None
        scheduler.running.remove([one])
    assert scheduler.waiting.retry_after() == pytest.approx(2.0 * 20 / 4)


def test_deadlines_wherever_a_sequence_is() -> None:
    machine = Machine(Limits())
    for index, expires in enumerate((None, 5.0, 9.0)):
        machine.scheduler.submit(sequence(index, expires=expires))
    machine.step(1, 1)
    assert [one.index for one in machine.scheduler.expired(5.0)] == [1]
    assert [one.index for one in machine.scheduler.expired(9.0)] == [1, 2]


@pytest.mark.parametrize("name", ["max_running", "max_cached_tokens", "max_waiting", "prefill_chunk", "prefix_tokens"])
def test_limits_that_allow_nothing_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=name):
        Limits(**{name: -1})
