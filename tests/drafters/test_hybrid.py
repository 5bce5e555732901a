"""Hybrid drafting: no token changes, both drafters keep to the same pairs, and the union is as good as the better."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import eyas
from eyas.drafters.hybrid import HybridDrafter
from eyas.drafters.loading import make_drafter
from eyas.drafters.options import DrafterOptions, read_method
from eyas.drafters.weightless.ngram import NgramDrafter
from eyas.drafters.weightless.suffix import SuffixDrafter
from eyas.engine import Engine, Speculation
from eyas.engine.controller import make_controller
from eyas.errors import InvariantError, UsageError
from eyas.tree import parse_tree
from eyas.tree.acceptance import GROUPS
from eyas.tree.draft_tree import Source
from eyas.tree.shared import PlannedTree, SharedTree
from eyas.tree.values import bins
from eyas.types import NO_OWNER, Completion, Limits, Request, SamplingParams
from eyas.verify import Sampler

from .. import pairs, tiny
from ..engine.test_auto import costs

PROMPTS = tiny.prompts(1, 4, 5, 7, 6)


def hybrid(suffix: bool = False) -> HybridDrafter:
    device = tiny.target().device
    return HybridDrafter(tiny.eagle3_drafter(), (SuffixDrafter if suffix else NgramDrafter)(device), device)


def requests(temperature: float) -> list[Request]:
    return [
        Request(prompt * 3, SamplingParams(max_tokens=24, temperature=temperature, seed=seed, ignore_eos=True))
        for seed, prompt in enumerate(PROMPTS)
    ]


@cache
def plain(temperature: float) -> list[list[int]]:
    return [done.token_ids for done in Engine(tiny.target(), batch_size=4).generate(requests(temperature))]


TREES = ["chain:5", "dynamic:4,3,8", "shared:4,3,20"]


@pytest.mark.every(3)
@pytest.mark.parametrize(("temperature", "tree", "batch"), tiny.sample([0.0, 0.7, 1.0], TREES, [1, 4]))
def test_output_is_that_of_plain_decoding(temperature: float, tree: str, batch: int) -> None:
    speculation = Speculation(hybrid(batch == 1), parse_tree(tree))
    engine = Engine(tiny.target(), None, speculation, limits=Limits(max_running=batch, prefix_tokens=256))
    for _ in range(2):  # the second time with prefixes from the cache
        done = engine.generate(requests(temperature))
        assert [one.token_ids for one in done] == plain(temperature)
        engine.check_invariants()
    if temperature == 0.0:
        assert sum(one.stats.walked for one in done) > 10  # the random network alone gets fewer than 5


@pytest.mark.parametrize("tree", ["chain:7", "dynamic:6,3,12", "shared:6,3,30"])
def test_trees_may_be_deeper_than_a_network_with_few_heads_can_guess(tree: str) -> None:
    """Copied passages go on where the heads stop."""
    network = tiny.drafter("medusa")
    assert network.max_depth is not None
    assert network.max_depth < 6
    device = tiny.target().device
    speculation = Speculation(HybridDrafter(network, SuffixDrafter(device), device), parse_tree(tree))
    done = Engine(tiny.target(), None, speculation, batch_size=4).generate(requests(0.0))
    assert [one.token_ids for one in done] == plain(0.0)
    assert max(len(one.stats.offered_by_depth) for one in done) > network.max_depth


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("temperature", "setting", "text"),
    tiny.sample([0.0, 0.7], [(0.02, 1), (0.02, 4), (0.5, 4)], ["auto", "auto:chain"]),
)
def test_a_controller_changes_no_token(temperature: float, setting: tuple[float, int], text: str) -> None:
    token, batch = setting
    target = tiny.target()
    drafter = hybrid()
    controller = make_controller(target, drafter, text, batch, costs(token))
    engine = Engine(
        target,
        None,
        Speculation(drafter, None),
        limits=Limits(max_running=batch, prefix_tokens=256),
        controller=controller,
    )
    for _ in range(2):
        done = engine.generate(requests(temperature))
        assert [one.token_ids for one in done] == plain(temperature)
        engine.check_invariants()
    assert controller.snapshot().rounds > 0


@pytest.mark.parametrize("auto", [False, True])
def test_preempted_sequences_go_on(auto: bool) -> None:
    target = tiny.target()
    drafter = hybrid()
    tree = None if auto else parse_tree("dynamic:4,3,8")
    controller = make_controller(target, drafter, "auto", 4, costs(0.02)) if auto else None
    limits = Limits(max_running=4, max_cached_tokens=160, prefix_tokens=256)
    engine = Engine(target, None, Speculation(drafter, tree), limits=limits, controller=controller)
    assert [one.token_ids for one in engine.generate(requests(0.0))] == plain(0.0)
    engine.check_invariants()


class Wandering:
    """Answers of few different tokens, which repeat themselves now and then."""

    def __init__(self) -> None:
        params = SamplingParams(max_tokens=60, ignore_eos=True, logit_bias=dict.fromkeys(range(5, 11), 30.0))
        self.requests = [Request(prompt, params) for prompt in tiny.prompts(4, 5, 7, 6)]
        self.answers = [done.token_ids for done in Engine(tiny.target(), batch_size=4).generate(self.requests)]

    def run(self, drafter: Any, tree: str) -> list[Completion]:
        engine = Engine(tiny.target(), None, Speculation(drafter, parse_tree(tree)), batch_size=2)
        done = engine.generate(self.requests)
        assert [one.token_ids for one in done] == self.answers
        return done

    def oracle(self, omit: float) -> tiny.OracleDrafter:
        known = [[*r.prompt, *a] for r, a in zip(self.requests, self.answers, strict=True)]
        return tiny.OracleDrafter(known, (1,), omit=omit)


def accept_length(done: Sequence[Completion]) -> float:
    """Tokens of a target pass."""
    return sum(len(one.token_ids) for one in done) / sum(one.stats.target_passes for one in done)


@pytest.mark.every(3)
@pytest.mark.parametrize("tree", ["dynamic:3,3,10", "shared:3,3,20,10", "chain:6"])
def test_on_a_text_that_repeats_itself_it_is_as_good_as_the_better_of_its_two(tree: str) -> None:
    """Both are good at different places: an oracle that fails at two steps of three, and copies of a looping answer."""
    text = Wandering()
    device = tiny.target().device
    network = accept_length(text.run(text.oracle(0.66), tree))
    copies = accept_length(text.run(NgramDrafter(device), "chain:10" if tree != "chain:6" else tree))
    both = accept_length(text.run(HybridDrafter(text.oracle(0.66), NgramDrafter(device), device), tree))
    assert min(network, copies) > 1.1
    assert both >= max(network, copies)


def slots(drafter: HybridDrafter, tokens: Sequence[int]) -> Sampler:
    """Slot 0 has read these tokens; slot 1 is empty."""
    drafter.pairs.resize(2)
    sampler = Sampler(2, tiny.VOCAB, torch.device("cpu"))
    sampler.admit(0, SamplingParams(), tuple(tokens), ())
    drafter.pairs.begin(0, tokens, NO_OWNER)
    observe(drafter, tokens[1:])
    return sampler


def observe(drafter: HybridDrafter, tokens: Sequence[int]) -> None:
    shape = (1, len(tokens), len(drafter.taps), tiny.HIDDEN)
    taps = torch.randn(shape, generator=torch.Generator().manual_seed(len(tokens)))
    drafter.observe(range(1), torch.tensor([list(tokens)]), taps, [len(tokens)])


def test_a_sure_copy_lets_the_network_rest_and_its_pairs_wait() -> None:
    drafter = hybrid()
    loop = [5, 6, 7, 8, 9, 10] * 3
    before = [20, 21, 22]
    sampler = slots(drafter, before)
    spec = parse_tree("dynamic:3,3,12")
    first = drafter.draft(range(1), spec, sampler.coupling(range(1), True))
    assert not first.lookup.alone  # there is nothing to copy
    observe(drafter, [90])  # the network guessed wrong
    assert drafter.pairs.unread(0) == 0
    observe(drafter, loop)
    second = drafter.draft(range(1), spec, sampler.coupling(range(1), True))
    assert second.lookup.alone
    assert second.tokens[0].tolist()[:6] == loop[:6]
    observe(drafter, [5, 6])
    assert drafter.pairs.unread(0) == 2
    assert drafter.pairs.length(0) == drafter.lookup.pairs.length(0) == len(before) + len(loop) + 2
    observe(drafter, [91])  # not after a draft
    assert drafter.pairs.unread(0) == 0


@pytest.mark.parametrize(("drafting", "rests"), [(1e-6, False), (1.0, True)])
def test_the_network_rests_where_its_time_is_worth_more_than_its_guesses(drafting: float, rests: bool) -> None:
    drafter = hybrid()
    sampler = slots(drafter, [5, 6, 7, 8, 9] * 2)
    spec = parse_tree("dynamic:3,3,12")
    drafter._mean_accepted = 1.5
    drafter._drafting = drafting
    drafter._verifying = 0.5
    assert drafter.draft(range(1), spec, sampler.coupling(range(1), True)).lookup.alone == rests


def test_a_row_without_a_copy_needs_the_network_and_found_only_never_does() -> None:
    drafter = hybrid()
    sampler = slots(drafter, [5, 6, 7])
    coupling = sampler.coupling(range(1), True)
    tree = drafter.draft(range(1), SharedTree(2, 2, 4), coupling)
    assert tree.size
    assert tree.sources is None  # all of it the network's
    observe(drafter, [8])
    tree = drafter.draft(range(1), PlannedTree(SharedTree(1, 2, 4), found_only=True), coupling)
    assert not tree.size
    assert tree.lookup.alone
    observe(drafter, [9])
    assert drafter.pairs.unread(0) == 1


def test_a_plan_may_leave_out_the_search() -> None:
    drafter = hybrid()
    coupling = slots(drafter, [5, 6, 7, 8, 5, 6, 7, 8, 5, 6]).coupling(range(1), True)
    spec = PlannedTree(SharedTree(2, 2, 4))
    searched = drafter.draft(range(1), spec, coupling)
    assert searched.sources is not None
    assert searched.lookup.seconds > 0.0
    tree = drafter.draft(range(1), replace(spec, looks_up=False), coupling)
    assert tree.sources is None
    assert tree.lookup.seconds == 0.0
    assert torch.equal(tree.tokens, drafter.network.draft(range(1), spec, coupling).tokens)


def test_what_is_refuted_is_worth_less_from_then_on() -> None:
    """Copies that never come true: their value sinks by itself, not with that of the network's guesses."""
    drafter = hybrid()
    sampler = slots(drafter, [5, 6, 5])
    before = drafter._values.table.values.copy()
    for token in range(10, 50):
        drafter.draft(range(1), parse_tree("dynamic:2,2,3"), sampler.coupling(range(1), True))
        observe(drafter, [token, 5])
    copied = Source.DISPUTED * GROUPS
    at = bins(np.log(np.array([0.5])))
    assert drafter._values.table.values[copied, 0, at] < 0.2 < before[copied, 0, at]
    assert drafter._values.table.values[copied, 0, at] < drafter._values.table.values[0, 0, at]


def test_slots_of_both_move_together() -> None:
    drafter = hybrid()
    slots(drafter, [5, 6, 7, 5, 6])
    saved = drafter.pairs.save(0, 0, 4)
    assert saved.unread == 0
    drafter.pairs.move(0, 1)
    assert drafter.pairs.length(0) == 0
    assert drafter.pairs.length(1) == 4
    drafter.pairs.begin(0, [5], NO_OWNER)
    drafter.pairs.load(0, saved, 3)
    assert drafter.pairs.length(0) == 3
    drafter.pairs.truncate(0, 2)
    assert drafter.pairs.length(0) == 2
    drafter.network.pairs.truncate(0, 1)
    with pytest.raises(InvariantError, match="slot 0: the network has 1"):
        drafter.pairs.length(0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("eagle3+nothing", r"there is no nothing to add; write one of eagle3\+ngram"),
        ("eagle3+", "there is no name to add"),
        ("eagle9+ngram", "eagle9 is no kind of draft model; write one of .*eagle1, eagle3"),
        ("ngram+suffix", "ngram is no kind of draft model"),
        ("eagle9", r"unknown method 'eagle9': write .*eagle1, eagle3, .*ngram, .*eagle3\+ngram.* or none"),
    ],
)
def test_unknown_methods_are_refused_with_what_there_is(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_method(text)


def test_methods_are_named_by_kind_and_by_what_is_added(tmp_path: Path) -> None:
    assert read_method("eagle3+ngram") == (True, "eagle3", "ngram")
    assert read_method("+ngram") == (True, None, "ngram")
    assert read_method("small-lm+suffix") == read_method("draft_model+suffix") == (True, "draft_model", "suffix")
    pairs.save_drafter(tmp_path / "d")
    model = pairs.save_target(tmp_path / "t")
    engine = eyas.load(model, tmp_path / "d", method="+suffix", tree="dynamic:3,3,8", device="cpu")
    assert engine.speculation is not None
    drafter = engine.speculation.drafter
    assert isinstance(drafter, HybridDrafter)
    assert isinstance(drafter.lookup, SuffixDrafter)
    with pytest.raises(UsageError, match="is of the kind eagle3, not mla"):
        make_drafter(DrafterOptions(tmp_path / "d", method="mla+ngram"), engine.target)
    with pytest.raises(UsageError, match=r"method eagle3\+ngram needs a drafter"):
        make_drafter(DrafterOptions(method="eagle3+ngram"), engine.target)
