"""Under a controller the output is what it is without one, whatever shapes it chooses and however often."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import count
from typing import Any

import pytest

from eyas.drafters.decoding import NetworkPairs
from eyas.drafters.hybrid import HybridDrafter
from eyas.drafters.weightless.ngram import NgramDrafter
from eyas.engine import Engine, Limits, Speculation
from eyas.engine.controller import Controller, CostModel, CostTable, Curve, TreeArm, recordings
from eyas.errors import UsageError
from eyas.session import load
from eyas.targets import Target
from eyas.tree import TreeSpec, parse_tree
from eyas.tree.shared import PlannedTree, SharedTree
from eyas.types import Completion, Request, SamplingParams

from .. import pairs, recording, tiny

LENGTHS = (13, 1, 20, 5, 9, 3, 7)
TOKENS = 40


def costs(token: float) -> CostTable:
    """A machine on which passes take 1 and `token` for every token beyond the first, and drafting next to nothing."""

    def curve(first: float, each: float) -> Curve:
        return Curve(sizes=(1.0, 256.0), seconds=(first, first + 255 * each))

    return CostTable(
        measured_on="nowhere",
        pass_by_tokens=curve(1.0, token),
        pass_by_rows=curve(0.0, 0.0),
        column_seconds=0.0,
        draft_by_rows=curve(0.001, 0.0),
        level_by_positions=curve(0.001, 0.0),
        observe_by_pairs=curve(0.001, 0.0),
        padding_by_places=curve(0.0, 0.0),
    )


class Restless(Controller):
    """Keeps what was planned; takes rounds to last what the costs say, so that what it does is the same everywhere."""

    def __init__(self, token: float, clock: Callable[[], float] = lambda: 0.0, **options: Any) -> None:
        super().__init__(CostModel(costs(token)), TreeArm(**options), clock=clock)
        self.planned: list[TreeSpec | None] = []

    def plan(self, texts, lengths, sampled=None, unread=None):  # type: ignore[no-untyped-def]
        self.planned.append(super().plan(texts, lengths, sampled, unread))
        return self.planned[-1]

    def learn(self, record):  # type: ignore[no-untyped-def]
        table = self.costs.table
        seconds = float(table.pass_by_tokens.at(record.tokens)) + 0.002 * (record.spec is not None)
        changed = {"draft_seconds": 0.001, "pass_seconds": seconds - 0.001, "seconds": seconds}
        super().learn(record._replace(**changed))


def requests(sampled: bool) -> list[Request]:
    return [
        Request(tuple(prompt), SamplingParams(max_tokens=TOKENS, temperature=0.8 * (sampled and i % 3 > 0), seed=i))
        for i, prompt in enumerate(tiny.prompts(*LENGTHS))
    ]


@cache
def plain(sampled: bool, modules: bool = False) -> list[list[int]]:
    target = tiny.target() if modules else tiny.quick_target()
    return [done.token_ids for done in Engine(target, batch_size=8).generate(requests(sampled))]


def run(controller: Controller, batch_size: int, sampled: bool) -> list[Completion]:
    drafter = tiny.OracleDrafter(
        [[*r.prompt, *t] for r, t in zip(requests(sampled), plain(sampled), strict=True)], (1,)
    )
    engine = Engine(tiny.quick_target(), None, Speculation(drafter, None), batch_size=batch_size, controller=controller)
    return engine.generate(requests(sampled))


@pytest.mark.parametrize(("batch_size", "sampled", "token"), tiny.every_other([1, 3], [False, True], [0.01, 0.4]))
def test_the_output_is_plain_decoding_s(batch_size: int, sampled: bool, token: float) -> None:
    controller = Restless(token)
    done = run(controller, batch_size, sampled)
    assert [one.token_ids for one in done] == plain(sampled)
    shapes = {None if s is None else (s.depth, s.max_fanout) for s in controller.planned}
    assert None in shapes  # plain rounds in between
    assert len(shapes) > 1
    assert sum(one.stats.walked for one in done) > 0


@pytest.mark.parametrize(("batch_size", "sampled"), [(1, False), (3, True)])
def test_on_an_accelerator_drafts_are_recorded(batch_size: int, sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "_FIRST", 1.0)  # rounds that this takes: so that some are among a few
    target = Target(tiny.build_model("llama"))
    drafter = tiny.eagle3_drafter()
    target.record = drafter.pairs.record = recording.recorder(target.device)
    ticks = count()  # reading candidates takes a tenth of a pass, so that it isn't done in every round
    controller = Restless(0.001, counts_freely=False, clock=lambda: 0.1 * next(ticks))
    engine = Engine(target, None, Speculation(drafter, None), batch_size=batch_size, controller=controller)
    done = engine.generate(requests(sampled))
    assert [one.token_ids for one in done] == plain(sampled, modules=True)
    used = {spec for spec in controller.planned if spec is not None and not spec.keeps_candidates}
    assert used
    assert all(spec.recurs and spec.max_nodes in (1, 3, 7, 15, 31, 63) for spec in used)
    assert engine.speculation is not None
    pairs = engine.speculation.drafter.pairs
    assert isinstance(pairs, NetworkPairs)
    assert pairs.cache.drafts is not None
    assert 0 < len(pairs.cache.drafts) <= 2 * len(used)


def test_dear_tokens_make_it_plain_and_cheap_ones_make_it_fast() -> None:
    dear = Restless(2.0)
    cheap = Restless(0.001)
    passes = [sum(one.stats.target_passes for one in run(c, 1, False)) for c in (dear, cheap)]
    assert passes[1] < 0.75 * passes[0]
    assert dear.snapshot().depth == 0
    assert cheap.snapshot().depth > 0


def test_a_first_token_does_not_wait_for_a_draft() -> None:
    request = requests(False)[0]
    drafter = tiny.OracleDrafter([[*request.prompt, *plain(False)[0]]], (1,))
    controller = Restless(0.001)
    engine = Engine(tiny.quick_target(), None, Speculation(drafter, None), controller=controller)
    engine.submit(request)
    chunks, nodes = [], []
    while not engine.idle:
        chunks += engine.step()
        nodes.append(0 if engine.outcome is None else engine.outcome.pass_tokens - 1)
    assert any(controller.planned[:4])  # it would have drafted, after the first check of plain decoding
    assert len(chunks[0].token_ids) == 1
    assert nodes[0] == 0
    assert max(nodes) > 1


@pytest.mark.parametrize("others", [False, True])
def test_a_prompt_is_read_early_only_while_others_draft(others: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the last text drafted says nothing about a new one, so the controller decides when its prompt is read."""
    engine = Engine(
        tiny.quick_target(), None, Speculation(tiny.eagle3_drafter(), None), batch_size=2, controller=Restless(0.001)
    )
    first, second = requests(False)[:2]
    engine.submit(first)
    while not engine.idle and (not others or not engine._core.scheduler.running.decoding):
        engine.step()
    runner = engine._core.runner
    runner.planner.tree = parse_tree("chain:2")
    assert runner.drafter is not None
    read: list[list[bool]] = []
    monkeypatch.setattr(type(runner), "_catch_up", lambda _self, _decoding, wanted: read.append(list(wanted)) or 0.0)
    monkeypatch.setattr(Restless, "plan", lambda *_: runner.planner.tree)
    monkeypatch.setattr(Restless, "learn", lambda *_: None)
    engine.submit(second)
    for _ in range(4):
        engine.step()
    assert read == ([[False, True]] if others else [])


def test_a_network_reads_nothing_for_rounds_that_only_look_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither prompts with more pairs than a step reads, nor those of texts that begin beside others."""
    target = tiny.quick_target()
    hybrid = HybridDrafter(tiny.eagle3_drafter(), NgramDrafter(target.device), target.device)
    limits = Limits(max_running=2, prefill_chunk=4)
    controller = Restless(0.001, looks_up=True)
    engine = Engine(target, None, Speculation(hybrid, None), limits=limits, controller=controller)
    spec = PlannedTree(SharedTree(1, 2, 6), found_only=True, looks_up=True)
    controller.tree = spec
    monkeypatch.setattr(Restless, "plan", lambda *_: spec)
    monkeypatch.setattr(Restless, "learn", lambda *_: None)
    drafter = engine._core.runner.drafter
    assert drafter is not None
    unread = {0: 0, 1: 0}
    engine.submit(Request(tuple(range(5, 25)), SamplingParams(max_tokens=20)))
    for steps in count():
        if steps == 8:
            engine.submit(Request(tuple(range(5, 25)), SamplingParams(max_tokens=5)))
        engine.step()
        if engine.idle:
            break
        for slot in range(len(engine._core.scheduler.running.decoding)):
            unread[slot] = drafter.pairs.unread(slot)
            assert unread[slot] == drafter.pairs.length(slot)
    assert min(unread.values()) > 20


def test_chains_stay_chains() -> None:
    controller = Restless(0.01, widths=(1,))
    assert [one.token_ids for one in run(controller, 3, False)] == plain(False)
    assert {spec.max_fanout for spec in controller.planned if spec is not None} == {1}


def test_load_makes_a_controller(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("auto")
    model = pairs.save_target(folder / "t")
    drafter = pairs.save_drafter(folder / "d") or folder / "d"
    kept = folder / "costs.json"
    engine = load(model, folder / "d", tree="auto", batch_size=2, device="cpu", costs=kept)
    assert engine.controller is not None
    assert kept.exists()
    request = Request((5, 9, 30, 7), SamplingParams(max_tokens=30))
    assert engine.generate([request])[0].token_ids == load(model, device="cpu").generate([request])[0].token_ids
    assert engine.controller.snapshot().rounds > 0
    with pytest.raises(UsageError, match="`costs=` are measured for `tree=auto` only"):
        load(model, drafter, tree="chain:2", costs=kept)
    with pytest.raises(UsageError, match="unknown tree 'auto:x'"):
        load(model, drafter, tree="auto:x")
