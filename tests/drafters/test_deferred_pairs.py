"""Deferred pairs: their order, and what is kept of them."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from eyas.drafters.base import DeferredPairs


def pairs(rows: int, count: int) -> tuple[Tensor, Tensor]:
    """Tokens [R, Q] and taps [R, Q, 3, 2], all different."""
    tokens = torch.arange(rows * count).view(rows, count)
    return tokens, tokens[:, :, None, None] + torch.arange(6).view(3, 2) / 10


def test_what_is_kept_survives_other_sizes() -> None:
    kept = DeferredPairs(2)
    tokens, taps = pairs(2, 50)
    kept.append(range(2), tokens, taps, [50, 20])
    kept.append(range(2), tokens + 500, taps + 500, [30, 0])  # more columns
    kept.reshape(3)
    kept.reshape(2)
    (found,), (states,) = kept.copy_out(0, 0, 80)
    assert found.tolist() == [*range(50), *range(500, 530)]
    assert states[:, 0, 0].equal(found.float())
    assert kept.copy_out(1, 0, 20)[0].tolist() == [[*range(50, 70)]]


def test_what_is_read_is_freed() -> None:
    kept = DeferredPairs(2)
    tokens, taps = pairs(2, 100)
    held = weakref.ref(taps)
    kept.append(range(2), tokens, taps, [100, 10])
    del tokens, taps
    kept.truncate(0, 0)
    assert held() is not None  # the other's are still there
    kept.truncate(1, 0)
    assert held() is None
    kept.append(range(2), *pairs(2, 1), [1, 1])
    assert kept.copy_out(1, 0, 1)[0].tolist() == [[1]]


def test_pairs_that_are_held_are_in_their_slots_whatever_comes_next() -> None:
    """Single pairs are copied some appends later, or before anything else happens to them."""
    kept = DeferredPairs(3)
    for i in range(40):
        tokens, taps = pairs(3, 2)
        kept.append(range(3), tokens + 10 * i, taps + 10 * i, [1, 0, 2])
    kept.truncate(2, 7)
    kept.append(range(3), *pairs(3, 2), [0, 1, 0])
    kept.move(0, 1)
    kept.append(range(3), *pairs(3, 2), [1, 0, 1])
    assert kept.lengths == [1, 40, 8]
    assert kept.copy_out(1, 0, 40)[0].tolist() == [[10 * i for i in range(40)]]
    assert kept.copy_out(2, 0, 8)[0].tolist() == [[4, 5, 14, 15, 24, 25, 34, 4]]
    tokens, taps = kept.part(range(3), 0, 1)
    assert tokens.tolist() == [[0], [0], [4]]
    assert taps[:, 0, 0, 0].tolist() == [0.0, 0.0, 4.0]
