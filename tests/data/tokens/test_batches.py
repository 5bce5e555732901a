"""Batches: every row once an epoch, within budget, padded exactly; a function of the number alone."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from eyas.data.tokens.batches import ChatBatches, cut_row, padded
from eyas.data.tokens.tokenize import TokenRow
from eyas.errors import DataError
from eyas.train.lm.lm import Mixture


def row(length: int, token: int, answer_from: int = 2) -> TokenRow:
    return TokenRow(np.full(length, token), np.arange(length) >= answer_from)


ROWS = [row(3 + i % 17, i + 1) for i in range(60)]


def test_an_epoch_holds_every_row_once_within_budget() -> None:
    batches = ChatBatches(ROWS, budget=40, longest=100, seed=3)
    for epoch in range(2):
        seen: Counter[int] = Counter()
        for n in range(epoch * batches.per_epoch, (epoch + 1) * batches.per_epoch):
            batch = batches.batch(n)
            assert batch.tokens.numel() <= 40
            seen.update(batch.tokens[:, 0].tolist())
        assert seen == Counter(range(1, 61))


def test_members_are_the_rows_as_they_were_given() -> None:
    rows = [row(2, 99), *ROWS]  # the first can't be learned from
    batches = ChatBatches(rows, budget=40, longest=12, seed=3)
    for n in range(2 * batches.per_epoch):
        given = [rows[i] for i in batches.members(n)]
        assert torch.equal(batches.batch(n).tokens, padded([cut_row(r, 12) for r in given]).tokens)
        assert not any(r is rows[0] for r in given)


def test_batches_are_a_function_of_number_and_seed() -> None:
    a, b, c = (ChatBatches(ROWS, 40, 100, seed) for seed in (3, 3, 4))
    b.batch(50)
    assert all(torch.equal(a.batch(n).tokens, b.batch(n).tokens) for n in range(40))
    assert any(a.batch(n).tokens.tolist() != c.batch(n).tokens.tolist() for n in range(10))
    orders = [[a.batch(e * a.per_epoch + n).tokens[0, 0].item() for n in range(a.per_epoch)] for e in range(2)]
    assert orders[0] != orders[1]


def test_rows_are_cut_and_those_without_an_answer_left_out() -> None:
    batches = ChatBatches([row(10, 1), row(10, 2, answer_from=8)], budget=100, longest=6, seed=0)
    assert batches.batch(0).tokens.tolist() == [[1] * 6]
    with pytest.raises(DataError, match="first 6 tokens"):
        ChatBatches([row(10, 2, answer_from=8)], budget=100, longest=6, seed=0)


def test_a_row_over_the_budget_goes_alone() -> None:
    batches = ChatBatches([row(50, 1), row(4, 2)], budget=10, longest=100, seed=0)
    assert sorted(batches.batch(n).tokens.shape for n in range(2)) == [(1, 4), (1, 50)]


def test_padding_is_masked() -> None:
    batch = padded([row(3, 5), row(5, 6)])
    assert batch.tokens.tolist() == [[5, 5, 5, 0, 0], [6, 6, 6, 6, 6]]
    assert batch.loss_mask.tolist() == [[False, False, True, False, False], [False, False, True, True, True]]
    assert batch.lengths.tolist() == [3, 5]


def test_a_mixture_keeps_its_shares_and_its_order() -> None:
    sources = {"a": torch.zeros(7, 2), "b": torch.ones(5, 2)}
    shares = {"a": 3.0, "b": 1.0}
    mixture = Mixture(sources, shares, seed=1)
    draws = [mixture.batch(n, 4)[:, 0].tolist() for n in range(25)]
    assert all(sum(draw) == 1 for draw in draws)  # one b in four, always
    late = Mixture(sources, shares, seed=1)
    assert late.batch(24, 4)[:, 0].tolist() == draws[24]
    with pytest.raises(DataError, match="the weights name"):
        Mixture(sources, {"a": 1.0}, seed=1)


def test_a_mixture_goes_through_whole_epochs() -> None:
    blocks = torch.arange(7).unsqueeze(1)
    mixture = Mixture({"a": blocks}, {"a": 1.0}, seed=2)
    epochs = [sorted(mixture.batch(n, 7).flatten().tolist()) for n in range(3)]
    assert epochs == [list(range(7))] * 3
    assert mixture.batch(0, 7).tolist() != mixture.batch(1, 7).tolist()
