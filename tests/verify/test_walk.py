"""The walk against one written in plain Python, on random trees."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from eyas.tree import DraftTree, NodeLogits
from eyas.types import SamplingParams
from eyas.verify import SeededWalk, gumbel
from eyas.verify.walk import _chosen_walk, _device_walk

from .emulation import CPU, PROMPT, admit_all

VOCAB = 4


def random_tree(rows: int, nodes: int, generator: torch.Generator) -> DraftTree:
    """Random parents, some invalid nodes, brothers with different tokens (twins made invalid)."""
    parents = torch.stack([torch.randint(-1, i, (rows,), generator=generator) for i in range(nodes)], dim=1)
    tokens = torch.randint(VOCAB, (rows, nodes), generator=generator)
    valid = torch.rand(rows, nodes, generator=generator) < 0.9
    for row in range(rows):
        names: set[tuple[int, int]] = set()
        for node in range(nodes):
            parent = int(parents[row, node])
            token = int(tokens[row, node])
            if (parent, token) in names or (parent >= 0 and not valid[row, parent]):
                valid[row, node] = False
            if valid[row, node]:
                names.add((parent, token))
    return DraftTree(tokens, parents, torch.zeros(rows, nodes), valid, nodes)


def walk_by_hand(logits: Tensor, tree: DraftTree, row: int, params: SamplingParams) -> tuple[list[int], list[int]]:
    at = 0
    tokens = []
    path = []
    while True:
        scores = logits[row, at]
        if params.temperature:
            position = torch.tensor([[len(PROMPT) + len(tokens)]])
            scores = scores / params.temperature
            scores = scores + gumbel(torch.tensor([params.seed]), position, torch.arange(VOCAB))[0, 0]
        path.append(at)
        tokens.append(int(scores.argmax()))
        for node in range(tree.size):
            named = tree.parents[row, node] + 1 == at and tree.tokens[row, node] == tokens[-1]
            if named and tree.valid[row, node]:
                at = node + 1
                break
        else:
            return tokens, path


@given(
    st.integers(0, 2**31),
    st.integers(1, 9),
    st.lists(st.sampled_from([0.0, 0.6, 1.0]), min_size=1, max_size=4),
)
def test_equals_a_plain_walk(seed: int, nodes: int, temperatures: list[float]) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = len(temperatures)
    params = [SamplingParams(temperature=t, seed=seed + i) for i, t in enumerate(temperatures)]
    tree = random_tree(rows, nodes, generator)
    logits = torch.randn(rows, 1 + nodes, VOCAB, generator=generator)
    result = SeededWalk()(NodeLogits.of(logits), tree, admit_all(params, VOCAB), range(rows))
    for row, each in enumerate(params):
        tokens, path = walk_by_hand(logits, tree, row, each)
        padding = nodes + 1 - len(tokens)
        assert result.tokens[row].tolist() == tokens + [-1] * padding
        assert result.path[row].tolist() == path + [0] * padding
        assert int(result.accepted[row]) == len(tokens) - 1


@given(
    st.integers(0, 2**31), st.integers(1, 9), st.booleans(), st.sampled_from([0.0, 0.8]), st.sampled_from([0.0, 1.5])
)
def test_walks_on_the_host_are_those_of_a_device(
    seed: int, nodes: int, ties: bool, temperature: float, penalty: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tree = random_tree(3, nodes, generator)
    logits = torch.randn(3, 1 + nodes, VOCAB, generator=generator)
    logits = logits.round() if ties else logits
    params = [SamplingParams(temperature=temperature, frequency_penalty=penalty, seed=seed + row) for row in range(3)]
    sampler = admit_all(params, VOCAB)
    on_host = SeededWalk()(NodeLogits.of(logits), tree, sampler, range(3))
    on_device = _device_walk(NodeLogits.of(logits), tree, sampler, range(3))
    assert on_host.fetched == on_host.table.tolist()
    assert torch.equal(on_host.table, on_device.table)
    if not penalty and not temperature:
        known = NodeLogits.of(logits).best()
        for waits in (False, True):
            assert torch.equal(_chosen_walk(known, tree, VOCAB, waits).table, on_device.table)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bare_root_is_plain_decoding(temperature: float) -> None:
    sampler = admit_all([SamplingParams(temperature=temperature)] * 2, VOCAB)
    logits = torch.randn(2, 1, VOCAB, generator=torch.Generator().manual_seed(0))
    result = SeededWalk()(NodeLogits.of(logits), DraftTree.empty(2, CPU), sampler, range(2))
    assert torch.equal(result.tokens[:, 0], sampler.path(range(2)).sample(logits[:, 0]))
    assert result.path.tolist() == [[0], [0]]
    assert result.accepted.tolist() == [0, 0]


@pytest.mark.parametrize("temperature", [0.0, 1e-3])
def test_of_twins_the_first_is_taken(temperature: float) -> None:
    tokens = torch.tensor([[2, 2, 1]])
    parents = torch.tensor([[-1, -1, 1]])
    tree = DraftTree(tokens, parents, torch.zeros(1, 3), torch.ones(1, 3, dtype=torch.bool), 2)
    logits = torch.eye(VOCAB)[torch.tensor([2, 1, 1, 0])].unsqueeze(0)
    result = SeededWalk()(
        NodeLogits.of(logits), tree, admit_all([SamplingParams(temperature=temperature)], VOCAB), range(1)
    )
    assert result.path.tolist() == [[0, 1, 0]]
    assert result.tokens.tolist() == [[2, 1, -1]]


def test_only_the_first_slots_are_walked() -> None:
    sampler = admit_all([SamplingParams(), SamplingParams(temperature=1.0, frequency_penalty=1.0)], VOCAB)
    assert sampler.needs(range(1)).plain
    result = SeededWalk()(NodeLogits.of(torch.eye(VOCAB)[None, 3:]), DraftTree.empty(1, CPU), sampler, range(1))
    assert result.tokens.tolist() == [[3]]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_walk_that_builds_on_another_keeps_what_it_does_not_replace(temperature: float) -> None:
    tree = random_tree(2, 5, torch.Generator().manual_seed(5))
    params = [SamplingParams(temperature=temperature, seed=seed) for seed in range(2)]
    walk = SeededWalk()(NodeLogits.of(torch.randn(2, 6, VOCAB)), tree, admit_all(params, VOCAB), range(2))
    other = walk.replaced(tokens=walk.tokens.clamp(max=1))
    assert torch.equal(other.tokens, walk.tokens.clamp(max=1))
    assert other.fetched is None  # else the round would emit the old ones
    for name in ("path", "accepted", "offered", "nodes"):
        assert torch.equal(getattr(other, name), getattr(walk, name))
    assert torch.equal(walk.nodes, tree.valid.sum(1))
    assert torch.equal(walk.offered, (tree.depth[:, 1:] * tree.valid).amax(1))
