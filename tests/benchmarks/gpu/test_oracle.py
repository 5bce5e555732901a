"""The oracle: it accepts as often as it is set to, changes no token, and is not confused by what happens to slots."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from benchmarks.gpu.oracle import OracleDrafter, chain_trees, expected_accept_length
from eyas.engine import Engine, Speculation
from eyas.errors import UsageError
from eyas.tree import parse_tree
from eyas.types import Completion, Request, SamplingParams, Stats
from eyas.verify import Sampler

from ... import tiny

LENGTHS = (13, 5, 20, 9, 4)
TOKENS = 80


@cache
def recorded() -> list[list[int]]:
    """Prompts with what `transformers` generates after them, a chain longer than is asked for."""
    model = tiny.target().model
    return [prompt + tiny.continuation(model, prompt, TOKENS + 8) for prompt in tiny.prompts(*LENGTHS)]


def oracle(*rates: float, network: bool = False, seed: int = 0) -> OracleDrafter:
    drafts = tiny.eagle3_drafter() if network else None
    return OracleDrafter(recorded(), rates, tiny.VOCAB, torch.device("cpu"), drafts, seed)


def generated(drafter: OracleDrafter, tree: str, batch: int = 4) -> list[Completion]:
    engine = Engine(tiny.target(), None, Speculation(drafter, parse_tree(tree)), batch_size=batch)
    requests = [Request(tuple(p), SamplingParams(max_tokens=TOKENS)) for p in tiny.prompts(*LENGTHS)]
    done = engine.generate(requests)
    engine.check_invariants()
    return done


def accept_length(done: list[Completion]) -> float:
    pooled = Stats()
    for completion in done:
        pooled.merge(completion.stats)
    return pooled.accept_length


@pytest.mark.every(4)
@pytest.mark.parametrize("network", [False, True])
@pytest.mark.parametrize("batch", [1, 4])
def test_answers_are_plain_ones_and_the_accept_length_is_as_set(network: bool, batch: int) -> None:
    rates = (0.9, 0.6, 0.8)
    drafter = oracle(*rates, network=network)
    done = generated(drafter, "chain:3", batch)
    assert [c.token_ids for c in done] == [s[n : n + TOKENS] for s, n in zip(recorded(), LENGTHS, strict=True)]
    assert not drafter.lost
    assert accept_length(done) == pytest.approx(expected_accept_length(rates), abs=0.25)
    assert [c.stats.accepted_histogram for c in done] == [
        c.stats.accepted_histogram for c in generated(oracle(*rates), "chain:3", 1)
    ]


@pytest.mark.parametrize(("rate", "expected"), [(0.0, 1.0), (1.0, 5.0)])
def test_never_and_always_right(rate: float, expected: float) -> None:
    assert accept_length(generated(oracle(*(rate,) * 4), "chain:4")) == expected == expected_accept_length((rate,) * 4)


def test_a_chain_may_be_shorter_than_there_are_rates() -> None:
    assert accept_length(generated(oracle(1.0, 1.0, 1.0), "chain:2")) == 3.0


def test_a_sequence_that_leaves_its_record_is_lost_and_stays_lossless() -> None:
    drafter = oracle(*(1.0,) * 3)
    for sequence in drafter._sequences:
        for at in (-40, -39):  # one of them is drafted; a bonus token isn't compared
            sequence[at] = (sequence[at] + 1) % tiny.VOCAB
    done = generated(drafter, "chain:3")
    assert [c.token_ids for c in done] == [s[n : n + TOKENS] for s, n in zip(recorded(), LENGTHS, strict=True)]
    assert len(drafter.lost) == len(LENGTHS)
    assert 1.0 < accept_length(done) < 4.0


def test_what_it_can_not_do_is_refused() -> None:
    drafter = oracle(1.0)
    drafter.pairs.resize(1)
    coupling = Sampler(1, tiny.VOCAB, torch.device("cpu")).coupling(range(1), True)
    for tree in ("chain:2", "dynamic:2,2,3", "static:slim"):
        with pytest.raises(UsageError, match="chains of at most 1"):
            drafter.draft(range(1), parse_tree(tree), coupling)
    with pytest.raises(UsageError, match="no recorded sequence goes on with"):
        drafter.observe(range(1), torch.tensor([[5, 6, 7]]), torch.empty(1, 3, 0, tiny.HIDDEN), [3])
    with pytest.raises(UsageError, match="prefix cache"):
        drafter.pairs.save(0, 0, 1)


def test_chain_trees_are_those_of_a_static_chain() -> None:
    tokens = torch.tensor([[5, 6, 7], [8, 9, 10]])
    made = chain_trees(tokens)
    growth = parse_tree("chain:3").start(2, torch.device("cpu"))
    for level in range(3):
        growth.expand(torch.zeros(2, 1, 1), tokens[:, level].view(2, 1, 1))
    expected = growth.tree()
    for name in ("tokens", "parents", "valid", "ancestors", "depth", "logprob"):
        assert torch.equal(getattr(made, name), getattr(expected, name)), name
    assert (made.max_depth, made.counted, made.full) == (expected.max_depth, expected.counted, True)
