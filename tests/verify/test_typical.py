"""The lossy rule does what it says."""

from __future__ import annotations

import math

import pytest
import torch

from eyas.errors import UsageError
from eyas.tree import DraftTree, NodeLogits
from eyas.types import SamplingParams
from eyas.verify import SeededWalk, TypicalWalk

from .emulation import CPU, admit_all

PROBS = torch.tensor([0.5, 0.3, 0.15, 0.05])
ENTROPY = -sum(p * math.log(p) for p in PROBS.tolist())


def tree_of(tokens: list[int], parents: list[int], depth: int) -> DraftTree:
    size = len(tokens)
    valid = torch.ones(1, size, dtype=torch.bool)
    return DraftTree(torch.tensor([tokens]), torch.tensor([parents]), torch.zeros(1, size), valid, depth)


@pytest.mark.parametrize(
    ("epsilon", "delta", "accepted"),
    [
        (0.14, 1.0, True),
        (0.16, 1.0, False),
        (1.0, 0.14 * math.exp(ENTROPY), True),
        (1.0, 0.16 * math.exp(ENTROPY), False),
    ],
)
def test_the_threshold(epsilon: float, delta: float, accepted: bool) -> None:
    logits = PROBS.log().expand(1, 2, 4)
    sampler = admit_all([SamplingParams()], 4)
    result = TypicalWalk(epsilon, delta)(NodeLogits.of(logits), tree_of([2], [-1], 1), sampler, range(1))
    # the greedy row's closing token is the argmax, its p that of temperature 1
    assert result.tokens.tolist() == ([[2, 0]] if accepted else [[0, -1]])
    assert result.path.tolist() == ([[0, 1]] if accepted else [[0, 0]])


def test_the_most_probable_acceptable_child_wins() -> None:
    logits = PROBS.log().expand(1, 5, 4)
    sampler = admit_all([SamplingParams()], 4)
    result = TypicalWalk()(NodeLogits.of(logits), tree_of([3, 2, 1, 2], [-1, -1, -1, 2], 2), sampler, range(1))
    assert result.path.tolist() == [[0, 3, 4]]
    assert result.tokens.tolist() == [[1, 2, 0]]


def test_the_temperature_counts() -> None:
    logits = PROBS.log().expand(1, 2, 4)
    sampler = admit_all([SamplingParams(temperature=0.3)], 4)
    assert TypicalWalk(0.09, 9.0)(
        NodeLogits.of(logits), tree_of([2], [-1], 1), sampler, range(1)
    ).accepted.tolist() == [0]


def test_a_bare_root_is_plain_decoding() -> None:
    sampler = admit_all([SamplingParams(temperature=1.0, seed=3)], 4)
    logits = PROBS.log().expand(1, 1, 4)
    ours, exact = (
        walk(NodeLogits.of(logits), DraftTree.empty(1, CPU), sampler, range(1))
        for walk in (TypicalWalk(), SeededWalk())
    )
    assert torch.equal(ours.tokens, exact.tokens)


def test_says_that_it_is_lossy() -> None:
    assert SeededWalk.lossless
    assert not TypicalWalk.lossless
    with pytest.raises(UsageError, match="epsilon"):
        TypicalWalk(epsilon=1.5)
