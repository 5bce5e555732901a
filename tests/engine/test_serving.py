"""Submitting, canceling and stepping: how requests end, and what fails without taking others along."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from eyas.drafters.decoding import NetworkDrafter
from eyas.engine import Engine, Limits, Speculation, runner, scheduler
from eyas.engine.fair_share import FairTime
from eyas.errors import CacheMemoryError, InvariantError, QueueFullError, RequestError
from eyas.targets import KVShape, SlotCache, Target, slots
from eyas.tree import parse_tree
from eyas.types import Chunk, Completion, Request, SamplingParams

from .. import tiny

PROMPTS = tiny.prompts(13, 1, 20, 5, 9, 3)


def engine(tree: str | None = "chain:4", target: Target | None = None, **limits: Any) -> Engine:
    speculation = None if tree is None else Speculation(tiny.eagle3_drafter(), parse_tree(tree))
    return Engine(target or tiny.target(), None, speculation, limits=Limits(**limits))


def request(index: int, tokens: int = 8, **params: Any) -> Request:
    return Request(tuple(PROMPTS[index]), SamplingParams(max_tokens=tokens, **params), f"r{index}")


def answer(index: int, tokens: int = 8) -> list[int]:
    return tiny.continuation(tiny.target().model, PROMPTS[index], tokens)


def drain(run: Engine) -> dict[int, Completion]:
    done: dict[int, Completion] = {}
    while not run.idle:
        done |= {chunk.index: chunk.completion for chunk in run.step() if chunk.completion is not None}
        run.check_invariants()
    return done


def test_an_index_is_known_before_anything_runs() -> None:
    run = engine(max_running=2)
    assert run.idle
    assert run.step() == []
    assert [run.submit(request(i)) for i in range(4)] == [0, 1, 2, 3]
    assert not run.idle
    assert (run.state().waiting, run.state().running) == (4, 0)
    run.step()
    assert (run.state().waiting, run.state().running) == (2, 2)
    assert {i: done.token_ids for i, done in drain(run).items()} == {i: answer(i) for i in range(4)}


def test_canceling_frees_the_slot_at_once() -> None:
    run = engine(max_running=2)
    for index in range(4):
        run.submit(request(index, 30))
    run.step()
    for index in (0, 3):  # one running, one waiting
        run.cancel(index)
        run.check_invariants()
    run.cancel(0)
    run.cancel(99)
    assert (run.state().running, run.state().waiting) == (1, 1)
    done = drain(run)
    assert {i: c.finish_reason for i, c in done.items()} == {0: "cancelled", 1: "length", 2: "length", 3: "cancelled"}
    assert done[0].token_ids == answer(0, 30)[: len(done[0].token_ids)] != []
    assert done[3].token_ids == []
    assert [done[i].token_ids for i in (1, 2)] == [answer(1, 30), answer(2, 30)]


def test_the_last_one_cancelled_is_still_reported() -> None:
    run = engine()
    run.submit(request(0))
    run.cancel(0)
    assert not run.idle
    assert [chunk.completion.finish_reason for chunk in run.step() if chunk.completion] == ["cancelled"]
    assert run.idle


def test_a_prompt_is_cancelled_while_it_is_read() -> None:
    run = engine(prefill_chunk=4)
    run.submit(request(2))
    run.step()
    assert run.state().prefilling == 1
    run.cancel(0)
    run.submit(request(0))
    assert drain(run)[1].token_ids == answer(0)


def test_first_tokens_wait_for_no_round_and_rounds_for_one_prompt_at_most() -> None:
    run = engine(tree="chain:2", prefill_chunk=20, max_running=5)
    run.submit(request(0, 40))
    run.step()
    for index in (2, 2, 2):  # each takes the whole of a step's reading
        run.submit(request(index, 40))
    seen = [sorted(chunk.index for chunk in run.step()) for _ in range(7)]
    assert seen == [[0], [1], [0, 1], [2], [0, 1, 2], [3], [0, 1, 2, 3]]
    assert drain(run)[3].token_ids == answer(2, 40)


def test_who_came_first_has_a_first_token_before_the_next_prompt_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "dense_pass", 10)
    run = engine(tree="chain:2", prefill_chunk=60, max_running=5)
    run.submit(request(2, 40))
    seen = [[chunk.index for chunk in run.step()]]
    for _ in range(3):  # they come before the round that would have followed
        run.submit(request(2, 40))
    seen += [sorted(chunk.index for chunk in run.step()) for _ in range(5)]
    assert seen == [[0], [1], [2], [0, 1, 2], [3], [0, 1, 2, 3]]  # after 60 tokens of prompts a round is due
    assert [done.token_ids for done in drain(run).values()] == [answer(2, 40)] * 4


def test_short_prompts_share_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "dense_pass", 20)
    run = engine(tree="chain:2", prefill_chunk=60, max_running=5)
    for index in (0, 0, 0):
        run.submit(request(index, 40))
    assert [sorted(chunk.index for chunk in run.step()) for _ in range(3)] == [[0, 1], [2], [0, 1, 2]]


def test_deadlines() -> None:
    run = engine()
    run.submit(request(0, 40), deadline=0.0)
    run.submit(request(2, 40), deadline=1000.0)
    run.submit(request(3), deadline=0.005)
    time.sleep(0.006)
    done = drain(run)
    assert [done[i].finish_reason for i in range(3)] == ["deadline", "length", "deadline"]
    assert done[1].token_ids == answer(2, 40)


def test_a_full_queue() -> None:
    run = engine(max_waiting=2)
    for index in range(3):
        run.submit(request(index))
    with pytest.raises(QueueFullError) as caught:
        run.submit(request(3))
    assert caught.value.retry_after >= 1
    assert len(drain(run)) == 3


def test_a_request_that_could_never_fit_is_refused() -> None:
    run = engine(max_cached_tokens=40)
    with pytest.raises(RequestError, match="can come to 53 tokens; the cache holds 40"):
        run.submit(request(0, 40))
    run.submit(request(0, 27))
    assert drain(run)[0].token_ids == answer(0, 27)
    assert run.state().allocated_tokens <= 40


def test_a_request_that_fails_to_start_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    run = engine(max_running=3)
    sampler = run._core.runner.slots.sampler
    admit = type(sampler).admit

    def refusing(self: Any, slot: int, params: SamplingParams, *args: Any, **named: Any) -> None:
        if params.seed == 13:
            raise RequestError("no such grammar")
        admit(self, slot, params, *args, **named)

    monkeypatch.setattr(type(sampler), "admit", refusing)
    for index in range(4):
        run.submit(request(index, seed=13 if index == 1 else 0))
    done = drain(run)
    assert (done[1].finish_reason, done[1].error) == ("error", "RequestError: no such grammar")
    assert [done[i].token_ids for i in (0, 2, 3)] == [answer(i) for i in (0, 2, 3)]


@pytest.mark.parametrize("where", ["verify", "prefill_to_end", "commit"])
def test_a_pass_that_fails_ends_those_in_it_and_the_engine_goes_on(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny.build_model("llama"))
    run = engine(target=target, max_running=2, prefix_tokens=1000)
    for index in (0, 2, 3):
        run.submit(request(index))
    owner: Any = SlotCache if where == "commit" else target
    whole = getattr(owner, where)
    calls = []

    def failing(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError("the device is gone")
        return whole(*args)

    monkeypatch.setattr(owner, where, failing)
    done = drain(run)
    assert [done[i].finish_reason for i in range(3)] == ["error", "error", "length"]
    assert done[0].error == "RuntimeError: the device is gone"
    assert done[2].token_ids == answer(3)
    assert run.submit(request(0)) == 3
    assert drain(run)[3].token_ids == answer(0)


def test_offline_a_failing_pass_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny.build_model("llama"))
    run = engine(target=target, max_running=2)
    monkeypatch.setattr(target, "verify", lambda *_: (_ for _ in ()).throw(CacheMemoryError("no memory")))
    with pytest.raises(CacheMemoryError, match="no memory"):
        run.generate([request(0), request(2)])
    monkeypatch.undo()
    assert run.idle
    assert run.generate([request(0)])[0].token_ids == answer(0)


def test_an_interrupted_step_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny.build_model("llama"))
    run = engine(target=target, max_running=3)
    for index in (0, 2, 3):
        run.submit(request(index))
    run.step()
    commit = SlotCache.commit
    calls = []

    def interrupted(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 1:
            raise KeyboardInterrupt
        commit(*args)

    monkeypatch.setattr(SlotCache, "commit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.step()
    assert [done.token_ids for _, done in sorted(drain(run).items())] == [answer(i) for i in (0, 2, 3)]
    assert run.state().preempted_total == 3


def test_engines_that_take_turns_on_a_target_and_a_drafter_do_not_disturb_each_other() -> None:
    drafter = tiny.eagle3_drafter()
    first, second = (
        Engine(tiny.target(), None, Speculation(drafter, parse_tree(tree)), limits=Limits(**limits))
        for tree, limits in (
            ("chain:4", {"max_running": 2, "prefix_tokens": 500}),
            ("dynamic:4,3,8", {"max_running": 3}),
        )
    )
    chunks: dict[int, list[Chunk]] = {0: [], 1: []}
    for index in (0, 2, 4):
        first.submit(request(index, 20))
        second.submit(request(index, 20))
    while not (first.idle and second.idle):
        for which, run in enumerate((first, second)):
            chunks[which] += run.step()
            run.check_invariants()
        second.cancel(0)
    for which, missing in ((0, ()), (1, (0,))):
        done = {c.index: c.completion.token_ids for c in chunks[which] if c.completion}
        for place, index in enumerate((0, 2, 4)):
            if place not in missing:
                assert done[place] == answer(index, 20)
    assert drafter.pairs.slots == 0
    assert first.state().preempted_total == second.state().preempted_total == 0


def test_memory_follows_the_load() -> None:
    target = Target(tiny.build_model("llama", max_position_embeddings=1200))
    run = engine(target=target, max_running=16)
    cache = run._core.runner.slots.cache
    assert cache.slots == 0
    run.generate([request(0)])
    assert (cache.slots, cache.capacity) == (1, 256)
    run.generate([Request(tuple(tiny.prompts(600)[0]), SamplingParams(max_tokens=2))] + [request(0)] * 5)
    assert 6 <= cache.slots <= 8
    assert cache.capacity >= 602
    run.generate([request(0)])
    assert (cache.slots, cache.capacity) == (1, 256)


def test_what_is_wrong_inside_is_noticed() -> None:
    run = engine(max_running=2, prefix_tokens=500)
    run.submit(request(0, 50))
    run.step()
    run.check_invariants()
    drafter = run.speculation.drafter
    drafter.pairs.truncate(0, 3)
    with pytest.raises(InvariantError, match="NetworkPairs holds 3 in slot 0"):
        run.check_invariants()


def test_counts() -> None:
    run = engine(max_running=2, prefix_tokens=500)
    for index in (0, 2, 0):
        run.submit(request(index))
    done = drain(run)
    state = run.state()
    assert state.prompt_tokens_total == 13 + 20 + 13
    assert state.generated_tokens_total == 24
    assert state.prefix_hit_tokens_total == 11
    assert state.prefix_tokens > 0
    assert state.finished_total == {"length": 3}
    assert max(c.stats.target_passes for c in done.values()) <= state.rounds_total


def test_where_memory_ends_fewer_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny.build_model("llama"))
    expected = {index: answer(index, 40) for index in range(6)}
    run = engine(target=target, max_running=6)
    allocate = SlotCache._allocate

    def small(self: SlotCache, count: int, slots: int, shape: KVShape, capacity: int) -> Any:
        if slots * capacity > 400:
            raise CacheMemoryError("no memory")
        return allocate(self, count, slots, shape, capacity)

    monkeypatch.setattr(SlotCache, "_allocate", small)
    for index in range(6):
        run.submit(request(index, 40))
    done = drain(run)
    assert {i: c.token_ids for i, c in done.items()} == expected
    assert run.state().preempted_total > 0


def too_large(count: int, kind: int) -> Exception:
    """What allocators say when memory runs out."""
    return (
        torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {count} GiB."),
        RuntimeError(f"[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: {count} bytes"),
        MemoryError("std::bad_alloc"),
    )[kind]


def short_of_memory(monkeypatch: pytest.MonkeyPatch, target: Target, most: int, kind: int = 0) -> list[int]:
    """Let every pass of more than `most` tokens fail; returns the sizes of those that did."""
    failed: list[int] = []
    forward = target._forward

    def limited(cache: SlotCache, rows: range, tokens: torch.Tensor, tree: Any, taps: Any, layout: Any) -> Any:
        count = tokens.numel() if layout is None else layout.gather(tokens).numel()
        if count > most:
            failed.append(count)
            raise too_large(count, kind)
        return forward(cache, rows, tokens, tree, taps, layout)

    monkeypatch.setattr(target, "_forward", limited)
    return failed


@pytest.mark.parametrize(("tree", "kind"), tiny.sample([None, "chain:4", "dynamic:3,3,8"], range(3)))
def test_where_memory_ends_in_a_pass_less_runs_at_once(tree: str | None, kind: int, monkeypatch: Any) -> None:
    target = Target(tiny.build_model("llama"))
    run = engine(tree, target, max_running=6, prefix_tokens=1000)
    seeded = [request(index, 40, temperature=0.8, seed=index) for index in range(6)]
    expected = [done.token_ids for done in engine(tree, max_running=6).generate(seeded)]
    failed = short_of_memory(monkeypatch, target, 18, kind)
    for _ in range(2):  # with prefixes from the first time
        first = run.submit(seeded[0])
        for one in seeded[1:]:
            run.submit(one)
        done = drain(run)
        assert [done[first + index].token_ids for index in range(6)] == expected
        assert {one.finish_reason for one in done.values()} == {"length"}
    assert failed
    assert run.state().preempted_total > 0


def test_what_can_not_run_alone_ends_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny.build_model("llama"))
    run = engine("chain:4", target, max_running=4)
    forward = target._forward
    long = Request(tuple(PROMPTS[2]), SamplingParams(max_tokens=9), "long")

    def limited(cache: SlotCache, rows: range, *given: Any) -> Any:
        if cache.start(rows) + given[0].shape[1] > 17:  # no room for the longest, however it is read
            raise too_large(1, 0)
        return forward(cache, rows, *given)

    monkeypatch.setattr(target, "_forward", limited)
    for one in (request(1, 5), long, request(3, 5), request(5, 5)):
        run.submit(one)
    done = drain(run)
    assert done[1].finish_reason == "error"
    assert (done[1].error or "").startswith("PassMemoryError: memory ran out in a pass of")
    assert "CUDA" not in (done[1].error or "")
    assert [done[index].token_ids for index in (0, 2, 3)] == [answer(1, 5), answer(3, 5), answer(5, 5)]


def test_other_errors_of_a_pass_are_not_taken_for_missing_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny.build_model("llama"))
    run = engine(None, target, max_running=2)
    monkeypatch.setattr(target, "_forward", lambda *_: (_ for _ in ()).throw(RuntimeError("an illegal memory access")))
    run.submit(request(0))
    run.submit(request(2))
    assert {one.error for one in drain(run).values()} == {"RuntimeError: an illegal memory access"}


def test_prefixes_are_given_up_where_there_is_no_memory_to_copy_them(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target(tiny.build_model("llama"))
    run = engine("chain:4", target, max_running=2, prefix_tokens=500)
    run.generate([request(0, 40)])
    assert run.state().prefix_tokens > 0
    monkeypatch.setattr(SlotCache, "copy_out", lambda *_: (_ for _ in ()).throw(too_large(1, 1)))
    assert run.generate([request(2, 40)])[0].token_ids == answer(2, 40)
    assert run.state().prefix_tokens == 0


def test_a_step_copies_no_more_of_known_prompts_than_it_reads() -> None:
    run = engine(max_running=8, prefill_chunk=16, prefix_tokens=1000)
    same = replace(request(0), prompt=tuple(range(3, 51)))
    run.submit(same)
    expected = drain(run)[0].token_ids
    for _ in range(8):
        run.submit(same)
    most, before = 0, 0
    done: dict[int, Any] = {}
    while not run.idle:
        done |= {chunk.index: chunk.completion for chunk in run.step() if chunk.completion is not None}
        hits = run.state().prefix_hit_tokens_total
        most = max(most, hits - before)
        before = hits
    assert most <= 48, "one prompt, not eight"
    assert before == 8 * 46
    assert all(each.token_ids == expected for each in done.values())


LONG = replace(request(0, 4), prompt=tuple(PROMPTS[2] * 8))


@cache
def _grown() -> list[list[int]]:
    """110 tokens after each of four prompts, and 4 after a long one, in a cache that never grows."""
    plain = Engine(tiny.target(), None, batch_size=5)
    return [one.token_ids for one in plain.generate([*(request(index, 110) for index in range(4)), LONG])]


@pytest.mark.parametrize(("tree", "comes"), [(None, True), ("chain:4", False), ("chain:4", True)])
def test_no_step_copies_all_that_slots_hold_to_larger_caches(
    monkeypatch: pytest.MonkeyPatch, tree: str | None, comes: bool
) -> None:
    """Rows that grow, and a longer one that comes: a piece is copied ahead in each step, and rounds go on meanwhile."""
    monkeypatch.setattr(slots, "_MIN_COPIED_COLUMNS", 0)
    monkeypatch.setattr(runner, "_COPY_SECONDS", 0.0)
    monkeypatch.setattr(scheduler, "_HEADROOM", 0)
    run = engine(tree, max_running=5, prefill_chunk=16)
    target = run._core.runner.slots.cache
    missing = list[int]()
    reshape = SlotCache.reshape
    target.reshape(0, 64)  # it has 256 columns

    def reshaped(self: SlotCache, slots: int, capacity: int, staged: int = 0) -> None:
        if self is target and sum(self.lengths) > 64 and capacity > self.capacity:
            ahead = [] if self.reshaping is None else [sum(copied) for *_, copied in self.reshaping._pieces]
            missing.append(sum(self.lengths) - min(ahead, default=0))
        reshape(self, slots, capacity, staged)

    monkeypatch.setattr(SlotCache, "reshape", reshaped)
    for index in range(4):
        run.submit(request(index, 110))
    rounds = []
    done = dict[int, Completion]()
    while not run.idle:
        done |= {chunk.index: chunk.completion for chunk in run.step() if chunk.completion is not None}
        rounds.append(run.outcome is not None)
        run.check_invariants()
        if comes and run.state().cached_tokens > 160:
            comes = bool(run.submit(LONG) < 0)
    assert missing
    assert max(missing) <= 40, "each of 8 buffers was copied at most 7 rounds before"
    assert sum(rounds) > 0.6 * len(rounds)
    assert {index: one.token_ids for index, one in done.items()} == dict(enumerate(_grown()[: len(done)]))


def test_a_round_reads_pairs_of_few_rows_that_are_far_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where drafting begins after a while without drafts; the other rows go on without."""
    read = []
    catch_up = NetworkDrafter.catch_up

    def counted(self: NetworkDrafter, rows: range, wanted: list[bool], *most: Any, **named: Any) -> Any:
        read.append(sum(self.pairs.unread(row) for row, want in zip(rows, wanted, strict=True) if want))
        return catch_up(self, rows, wanted, *most, **named)

    monkeypatch.setattr(NetworkDrafter, "catch_up", counted)
    run = engine("chain:4", max_running=4, prefill_chunk=16)
    for index in range(4):
        run.submit(request(index, 110))
    run._core.runner.planner.tree = None
    for _ in range(40):
        run.step()
    assert not any(read)
    run._core.runner.planner.tree = parse_tree("chain:4")
    done = drain(run)
    assert sum(read) > 4 * 40
    assert max(read) < 16 + 40 + 20, "a row, and who has few"
    assert all(one.stats.drafted_depth for one in done.values())
    assert [done[index].token_ids for index in range(4)] == _grown()[:4]


@pytest.mark.parametrize("tree", [None, "chain:4"])
def test_a_client_with_few_requests_goes_past_the_half_read_prompts_of_one_with_many(
    monkeypatch: pytest.MonkeyPatch, tree: str | None
) -> None:
    charge = FairTime.charge
    monkeypatch.setattr(FairTime, "charge", lambda self, *_: charge(self, {"greedy": 1}, 0.1))  # who is behind
    run = engine(tree, max_running=16, prefill_chunk=4)
    many = [run.submit(request(index % 2 * 2, 12, seed=index), queue_key="greedy/") for index in range(12)]
    for _ in range(6):
        run.step()
        run.check_invariants()
    polite = [run.submit(request(3), queue_key="polite/"), run.submit(request(4), queue_key="polite/ann")]
    took = 0
    done = dict[int, Completion]()
    while not done.keys() >= set(polite):
        took += 1
        for chunk in run.step():
            assert chunk.index in polite, "steps are for the few alone"
            if chunk.completion is not None:
                done[chunk.index] = chunk.completion
        run.check_invariants()
    assert took <= 14, "2 prompts of 4 tokens a step, and 8 tokens of each"
    done |= drain(run)
    assert [done[index].token_ids for index in polite] == [answer(3), answer(4)]
    assert [done[index].token_ids for index in many] == [answer(index % 2 * 2, 12) for index in range(12)]
