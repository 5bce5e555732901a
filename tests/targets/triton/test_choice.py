"""Choosing in the head's own launch: the token that the logits would give."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import nn

from eyas.targets.triton.choice import HeadLogits, gumbel
from eyas.targets.triton.linear import Weight, linear
from eyas.tree.draft_tree import NodeDraws, cells
from eyas.verify.path import _gumbel


@triton.jit
def _noise(seeds, positions, made, rows: tl.constexpr, tokens: tl.constexpr):  # type: ignore[no-untyped-def]
    row, token = tl.arange(0, rows), tl.arange(0, tokens)
    noise = gumbel(tl.load(seeds + row), tl.load(positions + row), token)
    tl.store(made + row[:, None] * tokens + token[None, :], noise)


def test_the_noise_is_the_samplers() -> None:
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 42, 7, 123456789])
    positions, made = torch.arange(8) * 1001, torch.empty(8, 256)
    _noise[(1,)](seeds, positions, made, 8, 256)
    expected = _gumbel(seeds, positions.unsqueeze(1), torch.arange(256))[:, 0]
    assert made.equal(expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_tokens_are_those_of_the_logits(dtype: torch.dtype) -> None:
    """Greedy and drawn rows together, with ties, in a vocabulary that doesn't fill its tiles."""
    torch.manual_seed(0)
    head = nn.Linear(64, 75).requires_grad_(False).to(dtype)
    head.weight[40], head.bias[40] = head.weight[3], head.bias[3]
    final = torch.randn(6, 64).to(dtype)
    index, weight = cells(2, 3, final.device), Weight.of(head)
    made = HeadLogits(final, index, weight, None)
    logits = linear(final, weight).float()
    assert made.best().equal(logits.argmax(1)[index])
    draws = NodeDraws(torch.tensor([0.7, 1.0]), torch.tensor([1.0, 0.0]), torch.tensor([5, 6]), torch.tensor([9, 80]))
    depth = torch.tensor([[0, 1, 1], [0, 1, 2]])
    drawn = made.drawn(lambda: draws, depth)
    noise = _gumbel(draws.seeds, draws.positions.unsqueeze(1) + depth, torch.arange(75))
    scores = logits.view(2, 3, 75) / draws.divisors.view(2, 1, 1) + noise * draws.scales.view(2, 1, 1)
    assert drawn is not None
    assert drawn.equal(scores.argmax(2))
    assert "rows" not in vars(made)
    assert made.rows.equal(linear(final, weight))
    assert made.vocab_size == 75


def test_a_head_whose_output_is_changed_gives_logits() -> None:
    weight = Weight.of(nn.Linear(64, 75))
    made = HeadLogits(torch.randn(1, 64), cells(1, 1, torch.device("cpu")), weight, torch.tanh)
    column = torch.zeros(1)
    assert made.drawn(lambda: NodeDraws(column, column, column.long(), column.long()), torch.zeros(1, 1)) is None
    assert made.rows.abs().max() <= 1
    assert made.best().equal(made.rows.argmax(1, keepdim=True))
