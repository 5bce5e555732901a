"""What runs beside a request never changes its answer: every finished answer is its offline single-request twin's.

Random arrivals and cancellations, preemption by a tiny cache, prefixes shared, sampling parameters mixed, trees and
plain rounds in turn. Invariants hold after every step.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from eyas.engine import Engine, Limits, Speculation, scheduler
from eyas.engine.controller import Controller
from eyas.tree import TreeSpec, parse_tree
from eyas.types import Completion, Request, SamplingParams

from .. import tiny

TREES = (None, "chain:4", "dynamic:4,3,8", "shared:4,3,12")
STEMS = tiny.prompts(40, 70, 33, seed=5)


def some_request(draw: random.Random, index: int) -> Request:
    """Any length and sampling; half of them continue a shared stem."""
    own = [draw.randrange(3, tiny.VOCAB) for _ in range(draw.choice((1, 3, 9, 30)))]
    stem = draw.choice(STEMS)[: draw.choice((20, 33, 64, 70))] if draw.random() < 0.5 else []
    params: dict[str, Any] = {"max_tokens": draw.randint(1, 40), "seed": draw.randrange(1000)}
    if draw.random() < 0.6:
        params |= {"temperature": draw.choice((0.5, 1.0, 1.7)), "top_k": draw.choice((0, 5)), "top_p": 0.95}
    if draw.random() < 0.3:
        params |= {"presence_penalty": 0.8, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
    if draw.random() < 0.3:
        params |= {"stop_token_ids": (draw.randrange(3, tiny.VOCAB),), "min_tokens": draw.choice((0, 4))}
    return Request(tuple(stem + own), SamplingParams(**params), f"r{index}", speculate=draw.random() < 0.8)


class Whims(Controller):
    """Another tree every round, and often none; the drafter observes a `share` of the sequences."""

    probing = False
    tree = None

    def __init__(
        self, draw: random.Random, trees: Sequence[str | None] = (None, None, *TREES), share: float = 1.0
    ) -> None:
        self._draw = draw
        self._share = share
        self._trees = [None if tree is None else parse_tree(tree) for tree in trees]
        self.planned = self.learned = 0

    def plan(
        self,
        texts: Sequence[int],
        lengths: Sequence[int],
        sampled: Sequence[bool] | None = None,
        unread: Sequence[int] | None = None,
    ) -> TreeSpec | None:
        assert len(set(texts)) == len(lengths) == len(sampled or ()) == len(unread or ()) > 0
        self.planned += 1
        self.tree = self._draw.choice(self._trees)
        return self.tree

    def observes(self, rows: int) -> bool:
        assert rows > 0
        return self._share == 1.0 or self._draw.random() < self._share

    def decoded(self, rows: int) -> None:
        assert rows > 0

    def learn(self, record: Any) -> None:
        assert record.rows == len(record.lengths)
        assert record.rows <= record.emitted
        assert record.tokens >= record.rows
        self.learned += 1


def twins(name: str, asked: Sequence[Request]) -> list[Completion]:
    """Every request alone, without a drafter."""
    alone = Engine(tiny.target(name))
    return [alone.generate([request])[0] for request in asked]


def serve(run: Engine, asked: Sequence[Request], draw: random.Random) -> dict[int, Completion]:
    """Submit, cancel and step in a random order to the end."""
    done: dict[int, Completion] = {}
    emitted: dict[int, list[int]] = {i: [] for i in range(len(asked))}
    left = list(enumerate(asked))
    while left or not run.idle:
        for _ in range(draw.choice((0, 0, 1, 2, 5))):
            if left:
                place, request = left.pop(0)
                assert run.submit(request, queue_key=draw.choice("abc")) == place
        if draw.random() < 0.1:
            run.cancel(draw.randrange(len(asked) - len(left) + 1))
            run.check_invariants()
        for chunk in run.step():
            assert chunk.index not in done
            emitted[chunk.index] += chunk.token_ids
            if chunk.completion is not None:
                assert chunk.completion.token_ids == emitted[chunk.index]
                done[chunk.index] = chunk.completion
        run.check_invariants()
    assert len(done) == len(asked)
    return done


def compare(done: dict[int, Completion], expected: Sequence[Completion]) -> int:
    """How many were finished, all of them as alone."""
    finished = 0
    for index, twin in enumerate(expected):
        found = done[index]
        if found.finish_reason == "cancelled":
            assert found.token_ids == twin.token_ids[: len(found.token_ids)]
            continue
        assert (found.finish_reason, found.token_ids) == (twin.finish_reason, twin.token_ids), index
        finished += 1
    return finished


@pytest.fixture(autouse=True)
def _no_foresight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers here are short: with the usual headroom nobody would ever be preempted."""
    monkeypatch.setattr(scheduler, "_HEADROOM", 0)


@pytest.fixture(autouse=True)
def _steps_take_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients' shares are counted in seconds: with the machine's own, who is preempted would be left to chance."""
    seconds = itertools.count()
    clock = SimpleNamespace(monotonic=time.monotonic, perf_counter=lambda: float(next(seconds)))
    monkeypatch.setattr("eyas.engine.engine.time", clock)


@cache
def some_requests(number: int) -> tuple[list[Request], list[Completion]]:
    """One of four sets of requests, and their twins: each tree and each of the limits meets all of the sets."""
    draw = random.Random(number)
    asked = [some_request(draw, i) for i in range(18)]
    return asked, twins("llama", asked)


LIMITS = {
    "roomy": Limits(max_running=4),
    "tiny cache": Limits(max_running=6, max_cached_tokens=190, prefill_chunk=24),
    "prefixes": Limits(max_running=4, prefix_tokens=4096, prefill_chunk=48),
    "all at once": Limits(max_running=5, max_cached_tokens=190, prefill_chunk=16, prefix_tokens=200),
}


@pytest.mark.every(3)
@pytest.mark.parametrize(("name", "tree"), tiny.sample([*LIMITS], TREES))
def test_fixed_trees(name: str, tree: str | None) -> None:
    limits = LIMITS[name]
    draw = random.Random(f"{limits} {tree}")
    asked, expected = some_requests((TREES.index(tree) + list(LIMITS.values()).index(limits)) % 4)
    speculation = None if tree is None else Speculation(tiny.eagle3_drafter(scale=4.0), parse_tree(tree))
    run = Engine(tiny.target(), None, speculation, limits=limits)
    assert compare(serve(run, asked, draw), expected) > 8
    state = run.state()
    if limits.max_cached_tokens is None:
        assert state.preempted_total == 0
    elif tree is None:  # with trees fewer are let in, and they may all end in time
        assert state.preempted_total > 0
    assert (state.prefix_hit_tokens_total > 0) == (limits.prefix_tokens > 0)
    assert state.running == state.waiting == state.prefilling == state.cached_tokens == 0
    assert sum(state.finished_total.values()) == len(asked)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("olmo3", "mla"),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in (("llama", "eagle3"), ("gemma2", "mlp"), ("gpt2", "eagle3"))
        ),
    ],
)
def test_trees_that_change_every_round(name: str, kind: str) -> None:
    """The drafter's reading is deferred and made up for, before and after its pairs were copied."""
    draw = random.Random(f"{name} {kind}")
    asked = [some_request(draw, i) for i in range(20)]
    expected = twins(name, asked)
    controller = Whims(draw, share=0.8)
    speculation = Speculation(tiny.drafter(kind), parse_tree("chain:2"))
    run = Engine(tiny.target(name), None, speculation, limits=LIMITS["all at once"], controller=controller)
    assert compare(serve(run, asked, draw), expected) > 8
    state = run.state()
    assert state.preempted_total > 0
    assert state.prefix_hit_tokens_total > 0
    assert 0 < controller.learned <= state.rounds_total


def test_reused_pairs_draft_as_fresh_ones() -> None:
    """Rounds with and without a tree, prefixes read and unread: the drafts are those of an engine without reuse."""
    prompts = [STEMS[1] + tail for tail in tiny.prompts(5, 9, 1, 40, seed=9)]
    asked = [Request(tuple(p), SamplingParams(max_tokens=12)) for p in prompts for _ in range(2)]
    accepted = []
    for prefix_tokens in (0, 1000):
        drafter = tiny.eagle3_drafter(scale=4.0)
        model = tiny.target()
        kept = Engine(
            model,
            speculation=Speculation(drafter, parse_tree("dynamic:4,3,8")),
            limits=Limits(prefix_tokens=prefix_tokens),
        )
        accepted.append([kept.generate([request])[0].stats.accepted_histogram for request in asked])
        hits = kept.state().prefix_hit_tokens_total
    assert accepted[0] == accepted[1]
    assert hits > 5 * len(STEMS[1])


WIDE = "dynamic:3,16,60"
"""Wide enough for a random drafter to be right now and then."""


@pytest.mark.parametrize("first", [None, WIDE], ids=str)
def test_unread_pairs_that_were_kept_are_read_when_a_draft_is_wanted(first: str | None) -> None:
    """A prefix kept while nobody drafted gives the drafts of one that was read, the second time and the third."""
    drafter = tiny.eagle3_drafter(scale=4.0)
    whims = Whims(random.Random(0), (first,))
    spec = Speculation(drafter, parse_tree(WIDE))
    run = Engine(tiny.target(), None, spec, controller=whims, limits=Limits(prefix_tokens=1000))
    ask = Request(tuple(STEMS[1]), SamplingParams(max_tokens=40))
    run.generate([ask])
    whims._trees = [parse_tree(WIDE)]
    again = [run.generate([ask])[0] for _ in range(2)]
    always = Whims(random.Random(0), (WIDE,))  # like the other's: its first round is plain
    fresh = Engine(tiny.target(), None, spec, controller=always).generate([ask])[0]
    assert len(fresh.stats.accepted_histogram) > 1  # something is accepted, so what is read matters
    for completion in again:
        assert completion.token_ids == fresh.token_ids
        assert completion.stats.accepted_histogram == fresh.stats.accepted_histogram
    assert run.state().prefix_hit_tokens_total == 2 * (len(STEMS[1]) - 2)


def test_what_did_not_speculate_costs_a_drafter_nothing_and_misleads_nobody() -> None:
    """Its prefix has no pairs: who speculates reads it anew, drafts as ever, and leaves pairs for the next."""
    drafter = tiny.eagle3_drafter(scale=4.0)
    run = Engine(tiny.target(), None, Speculation(drafter, parse_tree(WIDE)), limits=Limits(prefix_tokens=1000))
    ask = Request(tuple(STEMS[1]), SamplingParams(max_tokens=40))
    caught = []
    inner = tiny.target().verify
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny.target(), "verify", lambda *args: caught.append(args[4]) or inner(*args))
        plain = run.generate([replace(ask, speculate=False)])[0]
    assert set(caught) == {()}  # not even taps
    first, second = (run.generate([ask])[0] for _ in range(2))
    fresh = Engine(tiny.target(), None, Speculation(drafter, parse_tree(WIDE))).generate([ask])[0]
    assert plain.token_ids == first.token_ids == second.token_ids == fresh.token_ids
    assert len(fresh.stats.accepted_histogram) > 1
    assert first.stats.accepted_histogram == second.stats.accepted_histogram == fresh.stats.accepted_histogram
    assert [done.stats.reused_tokens > 0 for done in (plain, first, second)] == [False, False, True]


def test_where_nobody_speculates_nobody_plans() -> None:
    controller = Whims(random.Random(0), (WIDE,))
    run = Engine(tiny.target(), None, Speculation(tiny.eagle3_drafter(), parse_tree(WIDE)), controller=controller)
    ask = Request(tuple(STEMS[1]), SamplingParams(max_tokens=9), speculate=False)
    assert len(run.generate([ask])[0].token_ids) == 9
    assert controller.planned == controller.learned == 0
    run.generate([replace(ask, speculate=True)])
    assert controller.learned > 0


def test_pairs_that_nobody_read_yet_also_take_the_place_of_none() -> None:
    whims = Whims(random.Random(0), (None,))
    spec = Speculation(tiny.eagle3_drafter(), parse_tree(WIDE))
    run = Engine(tiny.target(), None, spec, controller=whims, limits=Limits(prefix_tokens=1000))
    ask = Request(tuple(STEMS[1]), SamplingParams(max_tokens=5))
    asked = (replace(ask, speculate=False), ask, ask)
    assert [run.generate([one])[0].stats.reused_tokens for one in asked] == [0, 0, len(STEMS[1]) - 2]
