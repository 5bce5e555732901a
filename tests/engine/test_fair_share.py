"""Nobody waits for ever, whoever else asks."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from eyas.engine.fair_share import FairQueue, FairTime, StepPlan, client_of
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
    first = queue.pop()
    second = queue.pop()
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


def test_steps_of_their_own_for_the_few_that_have_had_less_time() -> None:
    shares = FairTime()
    asked = {"greedy": 16, "polite": 1}
    assert shares.plan({"greedy": 16}, 0.0) == StepPlan(greedy="greedy"), "alone"
    shares.charge({"greedy": 16}, 5.0)
    assert shares.plan(asked, 1.0).alone == {"polite"}, "a newcomer begins a second behind"
    shares.charge({"polite": 1}, 1.0)
    assert shares.plan(asked, 2.0) == StepPlan(crowded=True, greedy="greedy"), "now it is the other's turn"
    shares.charge({"greedy": 16, "polite": 2}, 1.8)  # 1.6 and 0.2
    for _ in range(3):
        assert shares.plan(asked, 3.0).alone == {"polite"}
        shares.charge({"polite": 1}, 0.5)
    assert not shares.plan(asked, 4.0).alone
    assert not shares.plan({"greedy": 16}, 5.0).alone
    assert not shares.plan(asked, 6.0).alone, "who leaves and comes back isn't new"
    shares.charge({"greedy": 16, "polite": 2}, 1.8)
    assert shares.before(["polite"], ["greedy"])
    assert not shares.before(["polite", "greedy"], ["polite"])
    assert not shares.before([], ["greedy"])
    assert shares.plan({"greedy": 7, "polite": 2}, 7.0) == StepPlan(greedy="greedy"), "a few more are no burden"
    assert shares.plan({}, 8.0) == StepPlan()


def test_whoever_was_there_a_moment_ago_is_expected_back() -> None:
    shares = FairTime()
    shares.plan({"polite": 1}, 0.0)
    assert shares.plan({"greedy": 4}, 4.0).crowded
    assert not shares.plan({"greedy": 3}, 4.0).crowded
    assert not shares.plan({"greedy": 64}, 5.5).crowded


def test_who_comes_new_with_many_requests_is_not_behind() -> None:
    shares = FairTime()
    shares.plan({"polite": 1}, 0.0)
    shares.charge({"polite": 1}, 9.0)
    shares.plan({"greedy": 64}, 0.1)
    shares.charge({"greedy": 64}, 0.05)
    assert shares.plan({"greedy": 64, "polite": 1}, 0.2).alone == {"polite"}


def test_steps_of_who_has_many_are_bounded_by_the_time_that_they_take() -> None:
    shares = FairTime()
    crowded = StepPlan(crowded=True, greedy="greedy")
    for _ in range(12):
        shares.learn(crowded, shares.rows.most, 0, 0.005 * shares.rows.most)
        shares.learn(crowded, 0, shares.tokens.most, 0.001 * shares.tokens.most)
    assert (shares.rows.most, shares.tokens.most) == (10, 50), "50 ms of either"
    shares.learn(crowded, 10, 0, 30.0)  # the machine was stopped
    assert shares.rows.most == 5
    shares.learn(crowded, 2, 0, 0.001)
    assert shares.rows.most == 5, "fewer than there may be say nothing about more"
    shares.learn(StepPlan(frozenset({"polite"}), crowded=True, greedy="greedy"), 1, 0, 0.1)
    for _ in range(12):
        shares.learn(crowded, shares.rows.most, 0, 0.005 * shares.rows.most)
    assert shares.rows.most == 40, "two rounds of the polite alone"


sizes = st.lists(st.integers(1, 100), min_size=1, max_size=30)


@given(st.dictionaries(st.sampled_from("abcd"), sizes, min_size=2))
def test_keys_that_keep_waiting_get_equal_shares_of_tokens(asked: dict[str, list[int]]) -> None:
    """Of any two that still wait, neither is ahead by more than one largest request of each."""
    queue = FairQueue[SequenceState]()
    served = Counter[str]()
    left = Counter[str]()
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
    queue = FairQueue[SequenceState]()
    inside = dict[int, SequenceState]()
    outside = list[SequenceState]()
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


def test_a_user_gets_no_share_of_its_own() -> None:
    assert client_of("client/user") == "client"
