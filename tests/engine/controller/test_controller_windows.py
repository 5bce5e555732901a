"""The controller of lookahead decoding: windows run where they pay, rest where they don't, and change no token."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from eyas.drafters.weightless.lookahead import LookaheadDrafter
from eyas.engine import Engine, Speculation
from eyas.engine.controller import Controller, CostModel, RoundRecord, WindowArm, make_controller
from eyas.engine.controller.arms import Batch
from eyas.engine.controller.calibration import calibrate
from eyas.engine.controller.planner import Prospects
from eyas.engine.controller.window import _ACCEPTED, WindowGain
from eyas.engine.round import VerifiedDraft
from eyas.tree import DraftTree, TreeSpec
from eyas.tree.lookahead import LookaheadTree
from eyas.types import Limits, Request, SamplingParams

from ... import tiny
from ..test_auto import costs
from .simulation import CPU, Machine

WINDOW = LookaheadTree(15, 5, 15)
SCRATCH, CANDIDATES = 59, 8
FLAT = Machine(points=((1, 1.0), (256, 1.1)))
"""An accelerator's ratios: a hundred tokens more are nearly free."""
STEEP = Machine()
"""The project's CPU: a window takes more than three times a plain pass."""
BATCH = Batch([0], [9], (0,), 1)


@dataclass
class Windows:
    """Rounds one after another: each row with a window accepts `accepted` tokens on average."""

    machine: Machine
    rows: int
    accepted: float
    seconds: float = 0.0
    tokens: int = 0
    windows: int = 0
    _draw: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def round(self, spec: TreeSpec | None) -> RoundRecord:
        lengths = [200] * self.rows
        nodes = 0 if spec is None else SCRATCH + CANDIDATES
        draft = None
        taken = np.zeros(self.rows, dtype=np.int64)
        if spec is not None:
            assert spec == WINDOW
            taken = np.minimum(self._draw.poisson(self.accepted, self.rows), WINDOW.depth)
            draft = VerifiedDraft(DraftTree.empty(self.rows, CPU), [[0] * (1 + int(count)) for count in taken])
            self.windows += 1
        tokens = self.rows * (1 + nodes)
        emitted = self.rows + int(taken.sum())
        passing = self.machine.pass_seconds(tokens, self.rows, lengths)
        drafting = 0.0 if spec is None else self.machine.draft_seconds(self.rows, 1, 1)
        observing = 0.0 if spec is None else self.machine.observe_seconds(emitted)
        seconds = passing + drafting + observing
        self.seconds += seconds
        self.tokens += emitted
        return RoundRecord(range(self.rows), lengths, spec, draft, drafting, passing, tokens, emitted, seconds)

    def run(self, planner: Controller | TreeSpec | None, rounds: int) -> float:
        """Tokens per second of so many rounds, under a controller or with windows in all rounds or none."""
        before = self.seconds, self.tokens
        for _ in range(rounds):
            if isinstance(planner, Controller):
                planner.learn(self.round(planner.plan(range(self.rows), [200] * self.rows)))
            else:
                self.round(planner)
        return (self.tokens - before[1]) / (self.seconds - before[0])


def controller(machine: Machine) -> Controller:
    return Controller(CostModel(machine.table()), WindowArm(WINDOW), clock=lambda: 0.0)


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_where_a_window_is_dear_it_rests_and_plain_decoding_loses_nothing(rows: int) -> None:
    plain = Windows(STEEP, rows, 1.0).run(None, 3)
    assert Windows(STEEP, rows, 1.0).run(WINDOW, 300) < 0.75 * plain  # what a server without the controller did
    auto = Windows(STEEP, rows, 1.0)
    made = controller(STEEP)
    assert auto.run(made, 150) >= 0.985 * plain
    assert auto.run(made, 1500) >= 0.99 * plain
    state = made.snapshot()
    assert (state.depth, state.width, state.budget) == (0, 0, 0)
    assert state.plain_rounds >= 0.98 * state.rounds


def test_plain_rounds_at_rest_are_planned_some_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(STEEP, unit=0.1 * STEEP.unit)
    auto = Windows(machine, 1, 1.0)
    made = controller(machine)
    auto.run(made, 200)
    asked: list[Prospects] = []
    monkeypatch.setattr(made._explorer, "while_plain", lambda prospects, *_, **__: asked.append(prospects))
    for length in range(300, 364):
        made.learn(auto.round(made.plan([0], [length]))._replace(lengths=[length]))
    assert 2 <= len(asked) <= 9


def test_where_a_window_is_nearly_free_it_runs() -> None:
    fixed = Windows(FLAT, 1, 1.0).run(WINDOW, 400)
    auto = Windows(FLAT, 1, 1.0)
    made = controller(FLAT)
    assert fixed > 1.5 * Windows(FLAT, 1, 1.0).run(None, 3)
    assert auto.run(made, 400) >= 0.97 * fixed
    state = made.snapshot()
    assert (state.depth, state.width) == (WINDOW.depth, WINDOW.window)
    assert state.budget == pytest.approx(SCRATCH + CANDIDATES, abs=2)
    assert 0 < state.plain_rounds <= 0.03 * state.rounds  # they keep its price current
    assert state.probes == state.plain_rounds  # there is no larger window to try


def test_rows_with_windows_that_pay_are_observed() -> None:
    auto = Windows(FLAT, 4, 2.0)
    made = controller(FLAT)
    for _ in range(40):
        assert made.observes(4)
        auto.run(made, 5)


def test_more_rows_make_the_same_window_dear() -> None:
    """One client pays nothing for the width of a pass, sixteen do; and back."""
    machine = Machine(points=((1, 1.0), (128, 1.15), (1200, 6.0)))
    made = controller(machine)
    for rows, pays in ((1, True), (16, False), (1, True)):
        run = Windows(machine, rows, 0.8)
        rate = run.run(made, 200)
        assert rate >= 0.97 * max(Windows(machine, rows, 0.8).run(one, 200) for one in (None, WINDOW))
        assert (made.snapshot().depth > 0) == pays


def test_a_text_in_which_nothing_is_guessed_ends_it_and_a_trial_begins_it_again() -> None:
    machine = Machine(points=((1, 1.0), (128, 1.2), (256, 1.4)))
    plain = Windows(machine, 2, 0.0).run(None, 3)
    run = Windows(machine, 2, 1.0)
    made = controller(machine)
    run.run(made, 100)
    assert made.snapshot().depth > 0
    run.accepted = 0.0
    run.run(made, 200)
    assert made.snapshot().depth == 0
    assert run.run(made, 1000) >= 0.985 * plain
    run.accepted = 1.5
    run.run(made, 2500)
    assert made.snapshot().depth > 0
    assert made.snapshot().probes > 0


@pytest.mark.parametrize(("plain", "least", "most"), [(2, 0.1, 0.2), (100, 0.8, 1.1)])
def test_after_a_rest_what_a_window_brings_now_counts_most(plain: int, least: float, most: float) -> None:
    gain = WindowGain(WINDOW)
    run = Windows(FLAT, 1, 0.0)
    for _ in range(200):
        gain.learn(run.round(WINDOW))
    for _ in range(plain):
        gain.learn(run.round(None))
    before = float(gain.forecast(1).accepted.item())
    for _ in range(2):
        gain.learn(run.round(WINDOW)._replace(emitted=5))
    assert least <= gain.forecast(1).accepted.item() - before <= most


def test_what_a_window_may_bring_is_open_again_after_a_rest() -> None:
    gain = WindowGain(WINDOW)
    run = Windows(FLAT, 1, 0.0)
    for _ in range(200):
        gain.learn(run.round(WINDOW))
    assert gain.accepts()[0] > 0.99
    for _ in range(400):
        gain.learn(run.round(None))
    assert 0.2 < gain.accepts() @ _ACCEPTED < 1.2


def test_a_window_s_gain_says_how_far_its_last_forecast_is_off() -> None:
    gain = WindowGain(WINDOW)
    run = Windows(FLAT, 2, 2.0)
    assert gain.drift == pytest.approx(1.0)
    for _ in range(20):
        gain.learn(run.round(WINDOW))
    now = gain.forecast(2).accepted.item()
    assert gain.drift == pytest.approx(now / 2 / 0.5)
    gain.settle()
    assert gain.drift == pytest.approx(1.0)


def test_its_width_is_the_window_s_and_a_trial_fills_it() -> None:
    arm = WindowArm(LookaheadTree(5, 3, 9))
    made = Controller(CostModel(STEEP.table()), arm, clock=lambda: 0.0)
    tree = DraftTree.empty(1, CPU)
    made.learn(RoundRecord([0], [9], arm.tree(None, BATCH, probing=False), VerifiedDraft(tree, [[0]]), 0.1, 0.1, 9, 1))
    assert (made.snapshot().mean_depth, made.snapshot().mean_width) == (2, 5)
    prospects = arm.prospects(BATCH, made.costs, 0.0)
    probe = arm.explorer.while_plain(prospects, lambda: 0.8 / prospects.plain_rate, lambda: 0.0, known=True)
    assert probe is not None
    assert (probe.prospect, probe.rounds) == (prospects.best, 4 * 2)


class Steady(Controller):
    """Takes rounds to last what the costs say, so that what it does is the same everywhere; every fifth is plain."""

    def __init__(self, token: float) -> None:
        super().__init__(CostModel(costs(token)), WindowArm(LookaheadTree(5, 3, 4)), clock=lambda: 0.0)
        self.planned: list[TreeSpec | None] = []

    def plan(self, *args: Any) -> TreeSpec | None:
        planned = super().plan(*args)
        self.planned.append(None if len(self.planned) % 5 == 4 else planned)
        return self.planned[-1]

    def learn(self, record: RoundRecord) -> None:
        seconds = float(self.costs.table.pass_by_tokens.at(record.tokens)) + 0.002 * (record.spec is not None)
        changed = {"draft_seconds": 0.001, "pass_seconds": seconds - 0.001, "seconds": seconds}
        super().learn(record._replace(**changed))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_windows_that_rested_in_between_change_no_token(temperature: float) -> None:
    asked = [
        Request(
            tuple(3 + token % 8 for token in prompt),
            SamplingParams(max_tokens=30, temperature=temperature, seed=i, ignore_eos=True),
        )
        for i, prompt in enumerate(tiny.prompts(13, 1, 20, 5))
    ]
    plain = [done.token_ids for done in Engine(tiny.target(), batch_size=3).generate(asked)]
    made = Steady(0.001)
    drafter = LookaheadDrafter(tiny.target().device, tiny.VOCAB, 5, 3, 4)
    limits = Limits(max_running=3, prefix_tokens=256)
    engine = Engine(tiny.target(), None, Speculation(drafter, None), limits=limits, controller=made)
    done = engine.generate(asked)
    assert [one.token_ids for one in done] == plain
    engine.check_invariants()
    assert {LookaheadTree(5, 3, 4), None} == set(made.planned)
    if temperature == 0.0:
        assert sum(one.stats.walked for one in done) > 0


def test_its_costs_are_measured_with_its_own_windows() -> None:
    target = tiny.target()
    drafter = LookaheadDrafter(tiny.target().device, tiny.VOCAB, 15, 5, 15)
    table = calibrate(target, drafter, 2, drafter.max_fanout, seconds=0.0)
    assert "LookaheadDrafter" in table.measured_on
    assert len(table.level_by_positions.sizes) > 0
    made = make_controller(target, drafter, "auto", 2, table)
    assert isinstance(made.arm, WindowArm)
    assert made.plan([0, 1], [9, 9]) in (None, WINDOW)
    assert drafter.pairs.slots == 0
    assert made.snapshot().plain_tokens_per_second > 0.0
