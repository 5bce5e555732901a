"""Losslessness by counting: speculative answers have the exact distribution, and a lossy rule's haven't."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from eyas.tree import TreeSpec, parse_tree
from eyas.tree.static import StaticTree
from eyas.types import SamplingParams
from eyas.verify import Sampler, SeededWalk, TypicalWalk, WalkRule

from .emulation import TableModel, admit_all, exact_distribution, generate, p_value, restart

VOCAB = 8
LENGTH = 3
BATCH = 4000
BATCHES = 5
PARAMS = SamplingParams(temperature=0.8, top_p=0.9)
TARGET = TableModel.random(VOCAB, seed=1)
DRAFTER = TARGET.disagreeing(seed=2)
TREES = {
    "chain": parse_tree("chain:2"),
    "static": StaticTree([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0)]),
    "dynamic": parse_tree("dynamic:2,3,6"),
}


@cache
def sampler() -> Sampler:
    return admit_all([PARAMS] * BATCH, VOCAB)


@cache
def expected() -> Tensor:
    return exact_distribution(TARGET, PARAMS, LENGTH)


def draws(walk: WalkRule, spec: TreeSpec | None, coupled: bool, batches: int = BATCHES) -> tuple[Tensor, float]:
    answers, lengths = [], []
    for batch in range(batches):
        restart(sampler(), torch.arange(BATCH) + batch * BATCH)
        answer, accept_length = generate(sampler(), walk, TARGET, LENGTH, DRAFTER, spec, coupled)
        answers.append(answer)
        lengths.append(accept_length)
    return torch.cat(answers), sum(lengths) / len(lengths)


def test_the_exact_distribution_is_one_and_has_filtered_answers() -> None:
    assert float(expected().sum()) == pytest.approx(1.0)
    assert int((expected() == 0).sum()) > 50


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("name", "coupled", "batches"),
    [
        *[(name, coupled, BATCHES) for name in TREES for coupled in (True, False)],
        pytest.param("dynamic", True, 50, marks=pytest.mark.slow),  # 200,000 draws for the default setting
    ],
)
def test_seeded_walk_is_lossless(name: str, coupled: bool, batches: int) -> None:
    answers, accept_length = draws(SeededWalk(), TREES[name], coupled, batches)
    assert p_value(answers, expected(), VOCAB) > 1e-3
    assert 1.2 < accept_length < 2.9  # drafts were accepted, and rejected


def test_speculation_equals_plain_sampling_token_for_token() -> None:
    plain, accept_length = draws(SeededWalk(), None, coupled=False, batches=1)
    assert accept_length == 1.0
    for spec in TREES.values():
        assert torch.equal(plain, draws(SeededWalk(), spec, coupled=True, batches=1)[0])


def test_coupling_raises_the_accept_length() -> None:
    for spec in TREES.values():
        assert draws(SeededWalk(), spec, True, 1)[1] > draws(SeededWalk(), spec, False, 1)[1] + 0.05


@pytest.mark.parametrize("name", TREES)
def test_typical_walk_is_lossy_and_the_test_sees_it(name: str) -> None:
    answers, _ = draws(TypicalWalk(), TREES[name], coupled=False, batches=2)
    assert p_value(answers, expected(), VOCAB) < 1e-6
