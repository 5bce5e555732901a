"""The controller with drafters that look up: their drafts are free, often empty, and sometimes long."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from math import log

import numpy as np
import pytest
import torch

from eyas.engine.controller import Controller, RoundRecord
from eyas.engine.controller.copy_search import CopySearch
from eyas.engine.round import VerifiedDraft
from eyas.tree import DraftTree, TreeSpec
from eyas.tree.draft_tree import Proposal
from eyas.tree.proposal import found_tree, grow
from eyas.tree.shared import PlannedTree, SharedTree
from eyas.tree.union import unite

from .simulation import CPU, Machine, Simulation, Text, controller, mixed

MACHINE = Machine()


@dataclass
class CopiedText(Text):
    """A text in which copies of `length` tokens are found in some rounds, and then are right with `sure` a step."""

    share: float = 0.0
    """Rounds of a row in which a copy is found."""
    sure: float = 0.9
    length: int = 30
    network: bool = False
    """Whether a network drafts as well."""
    promised: float = 0.75
    """How probable each step of a copy is said to be."""
    only: int | None = None
    """The one row in which copies are found; None = all."""
    _right: list[int] = field(default_factory=list)
    _found: list[Proposal] = field(default_factory=list)

    def draft(self, spec: TreeSpec) -> tuple[DraftTree, int]:
        found = list[Proposal]()
        self._right = []
        for row in range(len(self.sharpness)):
            there = self._draw.random() < self.share and self.only in (None, row)
            length = min(self.length, spec.max_nodes)
            found.append(
                Proposal.chain([100 + i for i in range(length)], [log(self.promised)] * length) if there else Proposal()
            )
            self._right.append(int(self._draw.geometric(1.0 - self.sure)) - 1)
        self._found = found
        if spec.found_only:
            return grow(spec, found, CPU), 0
        assert self.network
        tree, levels = super().draft(spec)
        if spec.looks_up and any(one.tokens for one in found):
            tree = unite(spec, tree, found_tree(found, False), spec.values, torch.zeros(len(found), dtype=torch.int64))
        return tree, levels

    def emitted(self, paths: list[list[int]]) -> list[list[int]]:
        """What each row emits: what it accepts, and one token more, which may go on with a copy that was cut."""
        made = []
        for found, right, path in zip(self._found, self._right, paths, strict=True):
            accepted = len(path) - 1
            goes_on = accepted < min(right, len(found.tokens))
            made.append([*found.tokens[:accepted], found.tokens[accepted] if goes_on else 0])
        return made

    def walk(self, tree: DraftTree) -> list[list[int]]:
        if tree.sources is None:
            return super().walk(tree)
        paths = []
        for row, path in enumerate(super().walk(_network_s(tree))):
            copied = [node + 1 for node in np.flatnonzero((tree.sources[row] % 2 == 1) & tree.valid[row]).tolist()]
            copied = copied[: self._right[row]]
            paths.append([0, *copied] if len(copied) >= len(path) else path)
        return paths


def _network_s(tree: DraftTree) -> DraftTree:
    assert tree.sources is not None
    return DraftTree(tree.tokens, tree.parents, tree.logprob, tree.valid & (tree.sources % 2 != 1), tree.max_depth)


@dataclass
class Lookups(Simulation):
    """Rounds in which looking for copies takes `searching` seconds: a row's where nothing else is drafted."""

    searching: float = 0.0
    looked: int = 0
    """Rounds with a network's draft in which copies were looked for."""

    def round(self, spec: TreeSpec | None) -> RoundRecord:
        if spec is not None and not spec.found_only and spec.looks_up and self.searching:
            return self.beside_a_network(super().round(spec))
        if spec is None or not spec.found_only:
            return super().round(spec)
        rows = len(self.text.sharpness)
        lengths = self.current_lengths()
        texts = self.texts
        tree, _ = self.text.draft(spec)
        paths = self.text.walk(tree)
        tokens = rows + int(tree.valid.sum())
        emitted = sum(map(len, paths))
        passing = self.machine.pass_seconds(tokens, rows, lengths)
        drafting = self.searching * rows
        whole = drafting + passing
        self.advance(paths)
        self.seconds += whole
        self.tokens += emitted
        self.rounds += 1
        self.deferred += 1
        draft = VerifiedDraft(tree, paths, self.text.emitted(paths))
        return RoundRecord(texts, lengths, spec, draft, drafting, passing, tokens, emitted, whole)

    def beside_a_network(self, record: RoundRecord) -> RoundRecord:
        """A round that drafted, in which copies were looked for besides."""
        assert record.draft is not None
        assert record.seconds is not None
        self.looked += 1
        self.seconds += self.searching
        tree = replace(record.draft.tree, lookup=replace(record.draft.tree.lookup, seconds=self.searching))
        return record._replace(
            draft=record.draft._replace(tree=tree),
            draft_seconds=record.draft_seconds + self.searching,
            seconds=record.seconds + self.searching,
        )


def looks_up(**options: object) -> Controller:
    return controller(MACHINE, looks_up=True, **options)


def plain_rate(rows: int) -> float:
    return Simulation(MACHINE, mixed(rows)).run(None, 3)


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_where_nothing_is_found_rounds_cost_what_plain_ones_cost(rows: int) -> None:
    simulation = Lookups(MACHINE, CopiedText([1.0] * rows, [1.0] * rows))
    made = looks_up(computes=False)
    assert simulation.run(made, 60) == pytest.approx(plain_rate(rows), rel=1e-3)  # as columns are added
    state = made.snapshot()
    assert state.plain_rounds == state.rounds == 60
    assert state.depth == state.probes == 0


@pytest.mark.parametrize("rows", [1, 4])
def test_long_copies_that_come_true_are_verified_at_once_and_wrong_ones_no_longer(rows: int) -> None:
    right, wrong = ([1.0] * rows for _ in range(2))
    simulation = Lookups(MACHINE, CopiedText(right, wrong, seed=1, share=0.3, sure=0.95))
    made = looks_up(computes=False)
    assert simulation.run(made, 120) > 1.5 * plain_rate(rows)
    simulation.text = CopiedText(right, wrong, seed=2, share=1.0, sure=0.02)
    simulation.run(made, 60)
    assert simulation.run(made, 200) >= 0.98 * plain_rate(rows)


def test_rounds_that_find_nothing_are_learned_from_together_and_a_copy_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fast = replace(MACHINE, unit=MACHINE.unit / 10)
    ticks = itertools.count()
    made = controller(fast, clock=lambda: 1e-4 * next(ticks), looks_up=True, computes=False)
    learned = []
    learn = made.arm.learn
    monkeypatch.setattr(made.arm, "learn", lambda record, *others: learned.append(record) or learn(record, *others))
    simulation = Lookups(fast, CopiedText([1.0], [1.0], seed=3, share=0.1, sure=0.9))
    rounds, most, copies = 0, 0, 0
    while copies < 20:
        lengths = simulation.current_lengths()
        record = simulation.round(made.plan(simulation.texts, lengths))
        made.learn(record)
        rounds += 1
        most = max(most, rounds - len(learned))
        if record.tokens > record.rows:
            copies += 1
            assert learned[-1] is record
    assert most > 3


def test_rare_copies_are_never_missed() -> None:
    """One round in fifty: far too few for an average to promise anything."""
    simulation = Lookups(MACHINE, CopiedText([1.0], [1.0], seed=3, share=0.02, sure=0.97))
    made = looks_up(computes=False)
    assert simulation.run(made, 1000) > 1.15 * plain_rate(1)


def test_copies_beside_a_network_gain_what_they_save() -> None:
    """The same text with and without copies, under a controller that also has a network to plan for."""
    rates = []
    for share in (0.0, 0.4):
        text = CopiedText([3.0] * 2, [0.9] * 2, seed=4, share=share, sure=0.95, network=True)
        simulation = Lookups(MACHINE, text)
        made = looks_up()
        simulation.run(made, 100)
        rates.append(simulation.run(made, 250))
        assert made.snapshot().depth > 0
    assert rates[1] > 1.3 * rates[0]
    assert rates[0] > 1.2 * plain_rate(2)


def rounds_until_the_network_drafts(share: float) -> int:
    """Rounds of a second text before its first draft that is no probe; the network pays in the first one.

    Right copies are found in a `share` of the second one's rounds. Its prompt of 20,000 tokens is unread.
    """
    simulation = Lookups(MACHINE, CopiedText([3.0], [0.9], seed=5, share=0.0, sure=0.95, network=True))
    made = looks_up()
    simulation.run(made, 200)
    assert made.snapshot().depth > 0
    simulation.text = CopiedText([3.0], [0.9], seed=6, share=share, sure=0.95, network=True)
    for rounds in range(2000):
        spec = made.plan([1], [20_000], None, [20_000])
        if spec is not None and not spec.found_only and not made.probing:
            return rounds
        record = simulation.round(None if made.probing else spec)
        made.learn(record._replace(texts=[1]))
    return 2000


def test_a_network_reads_a_prompt_once_it_would_have_saved_that_time_and_copies_had_not() -> None:
    without = rounds_until_the_network_drafts(0.0)
    assert 20 < without < 500
    assert rounds_until_the_network_drafts(0.8) > 3 * without


@pytest.mark.every(2)
@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0, 240), (0.4, 720, 1200)])
def test_looking_up_beside_a_network_goes_on_where_copies_pay(share: float, least: int, most: int) -> None:
    looked = 0
    for seed in range(4):  # copies are rare, and the texts differ
        text = CopiedText([3.0], [0.9], seed=seed, share=share, sure=0.95, network=True)
        simulation = Lookups(MACHINE, text, searching=0.1 / plain_rate(1))
        made = looks_up()
        simulation.run(made, 100)
        simulation.looked = 0
        simulation.run(made, 300)
        looked += simulation.looked
    assert least <= looked <= most


def test_a_row_alone_searches_whatever_searches_gained_beside_others() -> None:
    simulation = Lookups(MACHINE, CopiedText([1.0] * 4, [1.0] * 4), searching=0.1 / plain_rate(4))
    made = looks_up(computes=False)
    simulation.run(made, 100)
    assert made._lookups is not None
    assert not made._lookups.of(4).pays
    copied = CopiedText([1.0], [1.0], seed=6, share=0.95, sure=0.98)
    alone = Lookups(MACHINE, copied, searching=simulation.searching)
    assert alone.run(made, 10) > 3.0 * plain_rate(1)


def test_every_sequence_is_observed_although_nothing_was_found_beside_others() -> None:
    made = looks_up(computes=False)
    assert all(made.observes(4) for _ in range(4))
    Lookups(MACHINE, CopiedText([1.0] * 4, [1.0] * 4)).run(made, 200)
    assert all(made.observes(4) for _ in range(20))


def test_a_search_that_does_not_pay_is_in_no_forecast() -> None:
    searching = 0.2 / plain_rate(1)
    simulation = Lookups(MACHINE, CopiedText([3.0], [0.9], seed=9, network=True), searching=searching)
    made = looks_up()
    assert made._lookups is not None
    simulation.run(made, 10)
    made._situation = ()  # plan anew
    simulation.run(made, 1)
    assert made.costs.overhead > 0.2 * searching
    while made._lookups.of(1).pays:
        simulation.run(made, 1)
    made._situation = ()
    simulation.run(made, 1)
    assert made.costs.overhead < 0.05 * searching


def searched(search: CopySearch, rounds: int, copied: int = 0) -> int:
    """Rounds of a second, of which a search takes a tenth and copies `copied` tokens; returns how many searched."""
    spec = PlannedTree(SharedTree(1, 1, 1), found_only=True)
    empty = VerifiedDraft(DraftTree.empty(1, CPU), [[0]])
    looked = 0
    for _ in range(rounds):
        looks = search.looking
        looked += looks
        draft, chosen = (empty, spec) if looks else (None, None)
        record = RoundRecord([0], [9], chosen, draft, 0.1 * looks, 0.9, 1, 1 + copied * looks, 0.9 + 0.1 * looks)
        search.account(record, copied * looks, 0.0, 1.0, 0.0)
    return looked


def test_searches_in_vain_become_few_but_never_stop() -> None:
    search = CopySearch()
    searched(search, 100)
    assert 80 <= searched(search, 1000) <= 120  # one in ten takes 1% of the time
    assert not search.pays
    assert search.seconds == 0.0


def test_one_copy_that_comes_true_brings_back_all_searches() -> None:
    search = CopySearch()
    searched(search, 200)
    while not search.looking:
        searched(search, 1)
    searched(search, 1, copied=8)
    assert searched(search, 20) == 20


def test_a_network_that_does_not_pay_leaves_the_copies() -> None:
    text = CopiedText([0.5] * 4, [0.3] * 4, seed=5, share=0.5, sure=0.95, network=True)
    simulation = Lookups(MACHINE, text)
    made = looks_up()
    simulation.run(made, 100)
    rate = simulation.run(made, 200)
    assert made.snapshot().depth == 0
    assert rate > 1.5 * plain_rate(4)


@pytest.mark.parametrize("rows", [1, 16])
def test_looking_up_in_vain_costs_next_to_nothing(rows: int) -> None:
    """The search takes a tenth of a round, finds nothing, and is tried again now and then."""
    simulation = Lookups(MACHINE, CopiedText([1.0] * rows, [1.0] * rows))
    simulation.searching = 0.1 / plain_rate(rows)
    made = looks_up(computes=False)
    simulation.run(made, 60)
    assert simulation.run(made, 1000) >= 0.985 * plain_rate(rows)
    simulation.text = CopiedText([1.0] * rows, [1.0] * rows, seed=7, share=0.5, sure=0.95)
    simulation.run(made, 300)  # found again within a rest
    assert simulation.run(made, 100) > 1.3 * plain_rate(rows)


@pytest.mark.parametrize(
    ("points", "others", "copier"),
    [
        (Machine().points, 0.5, 10.0),
        # as bound by multiplications as a model in 4 bits on AVX2: all of a copy would slow the others to 0.6
        (((1, 1.0), (4, 1.6), (8, 2.75), (16, 5.5), (256, 88.0)), 0.85, 1.3),
    ],
)
def test_a_row_that_copies_slows_the_others_no_more_than_it_gains(
    points: tuple[tuple[int, float], ...], others: float, copier: float
) -> None:
    """Three rows that nothing is found for, beside one that copies in nearly every round."""
    machine = replace(MACHINE, points=points)
    simulation = Lookups(machine, CopiedText([1.0] * 4, [1.0] * 4, seed=3, share=0.95, sure=0.98, only=2))
    made = controller(machine, looks_up=True, computes=False)
    simulation.run(made, 50)
    rounds, seconds = simulation.rounds, simulation.seconds
    tokens = simulation.run(made, 300) * (simulation.seconds - seconds)
    rounds = simulation.rounds - rounds
    usual = Simulation(machine, mixed(4)).run(None, 3) / 4  # tokens per second of each row
    speed = rounds / (simulation.seconds - seconds)
    assert speed > others * usual
    assert (tokens / rounds - 3) * speed > copier * usual


def test_a_search_that_takes_time_goes_on_where_copies_pay() -> None:
    simulation = Lookups(MACHINE, CopiedText([1.0] * 4, [1.0] * 4, seed=8, share=0.3, sure=0.95))
    simulation.searching = 0.05 / plain_rate(4)
    made = looks_up(computes=False)
    simulation.run(made, 60)
    before = made.snapshot()
    assert simulation.run(made, 300) > 1.4 * plain_rate(4)
    assert made.snapshot().mean_nodes > 0.8 * before.mean_nodes


SMALL = Machine(
    points=((1, 7.0), (2, 7.8), (3, 8.6), (4, 9.5), (6, 11.2), (8, 13.0), (12, 16.0), (16, 19.0), (32, 32.0),
            (64, 60.0), (128, 118.0), (256, 230.0)),
    unit=1e-3, first=0.5, level=0.35, position=0.02, column=5e-4,
)  # fmt: skip
"""A target of 135M in bf16, in milliseconds: a further token soon costs what a token is worth."""


@pytest.mark.parametrize("promised", [0.5, 0.75])  # after a wrong copy, the next match is short
@pytest.mark.parametrize("sure", [0.02, 0.2])
def test_copies_that_go_wrong_cost_a_fast_target_little(promised: float, sure: float) -> None:
    """An answer of 128 tokens, from the first round on, though all earlier occurrences went on alike.

    Finding a copy takes 0.6 ms, and its prices are known from a noisy machine: half of what further tokens cost.
    """
    cheap = Machine(points=tuple((size, (7.0 + one) / 2) for size, one in SMALL.points), **_others(SMALL))
    rates = []
    for seed in range(4):
        text = CopiedText([1.0], [1.0], seed=seed, share=1.0, sure=sure, promised=promised)
        simulation = Lookups(SMALL, text, searching=0.6e-3)
        made = controller(cheap, looks_up=True, computes=False)
        while simulation.tokens < 128:
            simulation.run(made, 1)
        rates.append(simulation.rate)
    assert np.mean(rates) >= 0.964 * Simulation(SMALL, mixed(1)).run(None, 3)


def _others(machine: Machine) -> dict[str, float]:
    return {name: value for name, value in vars(machine).items() if name != "points"}
