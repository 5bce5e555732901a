"""Nobody waits for ever, whoever else asks."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from eyas.engine.fair_queue import FairQueue, TimeShares
from eyas.engine.sequence import SequenceState
from eyas.types import Request


def sequence(index: int, key: str = "", size: int = 10) -> SequenceState:
    return SequenceState(index, Request((1,) * size), size, key=key)


def test_one_key_is_served_in_order() -> None:
    queue = FairQueue[SequenceState]()
    for index in range(5):
        queue.push(sequence(index, size=10 - index))
    assert [queue.pop().index for _ in range(5)] == [0, 1, 2, 3, 4]
    assert queue.peek() is None


def test_a_newcomer_passes_a_greedy_key() -> None:
    queue = FairQueue[SequenceState]()
    for index in range(50):
        queue.push(sequence(index, "greedy"))
    assert queue.pop().index == 0
    queue.push(sequence(50, "new"))
    assert [queue.pop().index for _ in range(3)] == [50, 1, 2]


def test_returned_ones_come_first_and_the_oldest_of_them_before() -> None:
    queue = FairQueue[SequenceState]()
    for index in range(4):
        queue.push(sequence(index))
    first, second = queue.pop(), queue.pop()
    queue.push_front(second)
    queue.push_front(first)
    queue.remove(second)
    queue.push_front(second)
    assert [queue.pop().index for _ in range(4)] == [0, 1, 2, 3]


def test_many_users_are_no_larger_share() -> None:
    queue = FairQueue[SequenceState]()
    for index in range(1400):
        queue.push(sequence(index, f"greedy/{index}"))
    for index in range(1400, 1410):
        queue.push(sequence(index, "polite"))
    order = [queue.pop().key for _ in range(20)]
    assert order.count("polite") == 10


def test_users_of_one_client_share_what_it_gets() -> None:
    queue = FairQueue[SequenceState]()
    for index in range(20):
        queue.push(sequence(index, "client/busy"))
    queue.push(sequence(20, "client/rare"))
    queue.push(sequence(21, "other"))
    assert {queue.pop().key for _ in range(3)} == {"client/busy", "client/rare", "other"}


def test_clients_that_have_fewer_in_hand_come_first() -> None:
    queue = FairQueue[SequenceState]()
    for index, key in enumerate("aab"):
        queue.push(sequence(index, key))
    chosen = queue.peek({"a": 1})
    assert chosen is not None
    assert chosen.key == "b"
    queue.take(chosen)
    assert queue.peek({"a": 1}) is not None


def test_rounds_of_their_own_for_those_who_have_had_less_time() -> None:
    shares = TimeShares()
    rows = [sequence(index, "greedy") for index in range(16)]
    shares.charge([one.client for one in rows], 5.0)
    rows += [sequence(16, "polite"), sequence(17, "polite/ann")]

    def turn(rows: list[SequenceState]) -> slice:
        return shares.turn(rows, {one.client for one in rows})

    assert turn(rows) == slice(16, 18), "a newcomer begins a second behind"
    shares.charge(["polite", "polite"], 1.1)
    assert turn(rows) == slice(18), "now it is the others' turn"
    shares.charge([one.client for one in rows], 1.8)  # 1.6 and 0.2
    for _ in range(3):
        assert turn(rows) == slice(16, 18)
        shares.charge(["polite", "polite"], 0.45)
    assert turn(rows) == slice(18)
    assert turn(rows[:16]) == slice(16)
    assert turn(rows) == slice(18), "who leaves and comes back isn't new"
    shares.charge([one.client for one in rows], 1.8)
    assert shares.before(["polite"], ["greedy"])
    assert not shares.before(["polite", "greedy"], ["polite"])
    assert not shares.before([], ["greedy"])
    few = [*rows[:4], *rows[16:]]
    assert turn(few) == slice(6), "a few rows more are no burden"
    assert turn(rows[:5]) == slice(5)


sizes = st.lists(st.integers(1, 100), min_size=1, max_size=30)


@given(st.dictionaries(st.sampled_from("abcd"), sizes, min_size=2))
def test_keys_that_keep_waiting_get_equal_shares_of_tokens(asked: dict[str, list[int]]) -> None:
    """Of any two that still wait, neither is ahead by more than one largest request of each."""
    queue, served, left = FairQueue[SequenceState](), Counter[str](), Counter[str]()
    index = 0
    for key, costs in asked.items():
        for cost in costs:
            queue.push(sequence(index, key, cost))
            left[key] += 1
            index += 1
    most = 2 * 2 * max(max(costs) for costs in asked.values())
    while len(queue):
        one = queue.pop()
        left[one.key] -= 1
        served[one.key] += one.longest
        waiting = [served[key] for key in asked if left[key]]
        if waiting:
            assert max(waiting) - min(waiting) <= most


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9), st.sampled_from(["push", "pop", "remove", "back"])))
)
def test_any_order_of_calls_loses_and_repeats_nobody(calls: list[tuple[str, int, str]]) -> None:
    queue, inside, outside = FairQueue[SequenceState](), dict[int, SequenceState](), list[SequenceState]()
    for index, (key, size, what) in enumerate(calls):
        if what == "push":
            inside[index] = sequence(index, key, size)
            queue.push(inside[index])
        elif what == "back" and outside:
            one = outside.pop()
            queue.push_front(one)
            inside[one.index] = one
        elif what in ("pop", "remove") and inside:
            one = queue.pop() if what == "pop" else inside[min(inside)]
            if what == "remove":
                queue.remove(one)
            outside.append(inside.pop(one.index))
        assert len(queue) == len(inside)
        assert {one.index for one in queue} == set(inside)
        assert (queue.peek() is None) == (not inside)
        for each in "abc":
            assert queue.count(each) == sum(one.key == each for one in inside.values())
