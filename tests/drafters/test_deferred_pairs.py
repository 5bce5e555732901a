"""The buffers of deferred pairs."""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.drafters.decoding import DeferredPairs


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


def test_when_all_is_read_wide_buffers_go() -> None:
    kept = DeferredPairs(2)
    kept.append(range(2), *pairs(2, 100), [100, 10])
    held = kept.part(range(2), 0, 1)[1].untyped_storage().nbytes()
    kept.truncate(0, 0)
    assert kept.part(range(2), 0, 1)[1].untyped_storage().nbytes() == held  # the other's are still there
    kept.truncate(1, 0)
    kept.append(range(2), *pairs(2, 1), [1, 1])
    assert kept.part(range(2), 0, 1)[1].untyped_storage().nbytes() < held
    assert kept.copy_out(1, 0, 1)[0].tolist() == [[1]]
