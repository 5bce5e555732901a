"""Swaps: whatever is swapped, whenever, answers are the same tokens, and slots are in order."""

from __future__ import annotations

import random
from typing import Any

import pytest

from eyas.drafters.decoding import NetworkDrafter
from eyas.engine import Engine, Speculation
from eyas.labs.learn.swap import SwapDrafter
from eyas.labs.learn.trial import Canary
from eyas.tree import parse_tree
from eyas.types import Limits, Owner, Request, SamplingParams

from ... import tiny

FINAL = tiny.LAYERS + 1


def drafters(count: int, kind: str = "eagle3") -> list[NetworkDrafter]:
    if kind == "eagle3":
        return [tiny.eagle3_drafter(seed=seed) for seed in range(count)]
    return [tiny.drafter(kind, seed=seed) for seed in range(count)]


def requests(seed: int, count: int, temperature: float) -> list[Request]:
    """Prompts that begin alike in part, so that prefixes are shared."""
    rng = random.Random(seed)
    common = tuple(rng.randrange(2, tiny.VOCAB) for _ in range(70))
    return [
        Request(
            (*common[: rng.choice((0, 40, 70))], *(rng.randrange(2, tiny.VOCAB) for _ in range(rng.randint(1, 9)))),
            SamplingParams(max_tokens=rng.randint(3, 30), temperature=temperature, seed=seed + at),
            speculate=rng.random() < 0.9,
        )
        for at in range(count)
    ]


def plain(target: Any, asked: list[Request]) -> list[list[int]]:
    return [list(done.token_ids) for done in Engine(target, batch_size=8).generate(asked)]


def served(engine: Engine, asked: list[Request], between: Any) -> list[list[int]]:
    """Answers of an engine that serves; `between` is called between any two steps."""
    indices = {engine.submit(request, queue_key="c/u"): at for at, request in enumerate(asked)}
    answers: list[list[int]] = [[] for _ in asked]
    while not engine.idle:
        between()
        for chunk in engine.step():
            answers[indices[chunk.index]] += chunk.token_ids
        engine.check_invariants()
    return answers


def engine_of(target: Any, drafter: Any, tree: str = "dynamic:3,12,40", rows: int = 4) -> tuple[Engine, SwapDrafter]:
    limits = Limits(max_running=rows, prefix_tokens=2048, prefill_chunk=32)
    engine = Engine(target, None, Speculation(drafter, parse_tree(tree)), limits=limits)
    assert engine.speculation is not None
    assert isinstance(engine.speculation.drafter, SwapDrafter)
    return engine, engine.speculation.drafter


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("kind", "tree", "temperature"),
    tiny.sample(["eagle3", "eagle1", "mla", "medusa"], ["dynamic:3,12,40", "chain:3", "shared:3,8,60"], [0.0, 1.0]),
)
def test_answers_are_the_same_whenever_drafters_are_swapped(kind: str, tree: str, temperature: float) -> None:
    target = tiny.quick_target()
    made = drafters(5, kind)
    for seed in range(2):
        asked = requests(seed, 8, temperature)
        engine, swapping = engine_of(target, SwapDrafter(0, made[0], FINAL), tree)
        rng = random.Random(seed)
        newest = 0

        def between(rng: random.Random = rng, swapping: SwapDrafter = swapping) -> None:
            nonlocal newest
            if rng.random() < 0.25 and newest < 4:
                newest += 1
                chooser = Canary(swapping.generations.numbers[-1], newest, share=0.5) if rng.random() < 0.5 else None
                swapping.generations.offer(newest, made[newest], chooser)
            elif rng.random() < 0.1:
                swapping.generations.serve_only(rng.choice(swapping.generations.numbers))

        assert served(engine, asked, between) == plain(target, asked)
        assert newest, "nothing was swapped"


def test_a_client_apart_shares_no_generation_and_no_answer_changes() -> None:
    """Its rows get its own generations, others' never do, whatever is swapped on either side."""
    target = tiny.quick_target()
    made = drafters(4)
    engine, swapping = engine_of(target, SwapDrafter(0, made[0], FINAL))
    swapping.generations.offer(0, made[1], client="a")
    asked = requests(2, 16, 1.0)
    owners = {tuple(one.prompt): ("a", "b/x", "a/x", "")[at % 4] for at, one in enumerate(asked)}
    begun: list[tuple[str, tuple[str, int]]] = []
    begin = swapping.pairs.begin

    def spy(slot: int, prompt: Any, owner: Owner, prediction: Any) -> None:
        begin(slot, prompt, owner, prediction)
        begun.append((owner.key, swapping.pairs.rows[slot].generation))

    swapping.pairs.begin = spy  # type: ignore[method-assign]
    indices = {engine.submit(one, queue_key=owners[tuple(one.prompt)]): at for at, one in enumerate(asked)}
    answers: list[list[int]] = [[] for _ in asked]
    steps = 0
    while not engine.idle:
        steps += 1
        if steps == 8:
            swapping.generations.offer(1, made[2], Canary(0, 1, share=0.5), client="a")
        if steps == 16:
            swapping.generations.offer(1, made[3])
        for chunk in engine.step():
            answers[indices[chunk.index]] += chunk.token_ids
        engine.check_invariants()
    assert answers == plain(target, asked)
    assert {owner.partition("/")[0] for owner, (client, _) in begun if client} == {"a"}
    assert all(client == "a" for owner, (client, _) in begun if owner in ("a", "a/x"))
    assert {number for owner, (client, number) in begun if client} == {0, 1}
    assert ("", ("", 1)) in begun or ("b/x", ("", 1)) in begun
    assert set(swapping.generations.drafters) == {("", 1), ("a", 0), ("a", 1)}


def test_rows_of_several_generations_share_a_round() -> None:
    target = tiny.quick_target()
    made = drafters(2)
    engine, swapping = engine_of(target, SwapDrafter(0, made[0], FINAL))
    asked = requests(1, 4, 0.0)
    met: set[int] = set()

    def between() -> None:
        if not met:
            swapping.generations.offer(1, made[1], Canary(0, 1, share=0.5, seed=1))
        met.update({len({swapping.pairs.rows[slot].generation for slot in range(swapping.pairs.slots)})})

    assert served(engine, asked, between) == plain(target, asked)
    assert 2 in met


def test_a_swapped_drafter_drafts_as_it_would_alone() -> None:
    """After a swap new rows are drafted for by the new weights, with the same accept length as on an engine of it."""
    target = tiny.quick_target()
    made = drafters(2)
    asked = requests(3, 6, 0.0)
    accepted = []
    for first in (0, 1):
        engine, swapping = engine_of(target, SwapDrafter(first, made[first], FINAL))
        if first == 0:
            swapping.generations.offer(1, made[1])
        accepted.append([done.stats.accepted_histogram for done in engine.generate(asked)])
    assert accepted[0] == accepted[1]
    other, _ = engine_of(target, SwapDrafter(0, made[0], FINAL))
    assert [done.stats.accepted_histogram for done in other.generate(asked)] != accepted[0]


def test_old_generations_are_let_go() -> None:
    target = tiny.quick_target()
    made = drafters(5)
    engine, swapping = engine_of(target, SwapDrafter(0, made[0], FINAL))
    swapping.generations.offer(4, made[4], Canary(0, 4))  # called off before its trial is over
    served(engine, requests(0, 3, 0.0), lambda: None)
    assert swapping.generations.numbers == [4, 0]
    for number in (1, 2, 3):
        swapping.generations.offer(number, made[number])
        served(engine, requests(number, 3, 0.0), lambda: None)
    assert swapping.generations.numbers == [3]


def test_a_prefix_that_another_generation_read_is_read_again() -> None:
    target = tiny.quick_target()
    made = drafters(2)
    engine, swapping = engine_of(target, SwapDrafter(0, made[0], FINAL))
    prompt = tuple(range(2, 90))
    asked = [Request(prompt, SamplingParams(max_tokens=4))]

    def reused() -> int:
        (done,) = engine.generate(asked)
        return done.stats.reused_tokens

    assert reused() == 0
    assert reused() > 60
    swapping.generations.offer(1, made[1])
    assert reused() == 0
    assert reused() > 60, "the new generation's pairs have taken the old ones' place"


def test_live_accept_lengths_are_counted_by_generation() -> None:
    target = tiny.quick_target()
    made = drafters(2)
    engine, swapping = engine_of(target, SwapDrafter(0, made[0], FINAL))
    trial = Canary(0, 1, share=0.5)
    swapping.generations.offer(1, made[1], trial)
    done = engine.generate(requests(5, 20, 0.0))
    assert sum(arm.requests for arm in trial.arms.values()) <= 20
    assert all(arm.requests for arm in trial.arms.values())
    drafted = [one.stats for one in done if one.stats.drafted_depth]
    assert sum(arm.rounds for arm in trial.arms.values()) == sum(one.target_passes for one in drafted)
    assert sum(arm.tokens for arm in trial.arms.values()) == sum(one.walked + one.target_passes for one in drafted)
