"""What validation reads off a batch of guesses: agreement by step, and how far a greedy chain would get.

Shapes: B chats, S positions, M answer tokens, K steps, N rows that step 0 is judged on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eyas.train.chain_rows import ChainRows

Sums = dict[str, tuple[float, float]]
"""name -> sum and count"""


def draft_metrics(rows: ChainRows, right: Tensor, overlap: Tensor) -> Sums:
    """`accuracy_j` greedy agreement, `overlap_j` sum of min(p, q), `accept_length` of greedy chains.

    right [M, K] bool, overlap [M, K]; fewer columns where no row was left to guess. One transfer from the device.
    """
    steps = right.shape[1]
    there = rows.guesses[:steps].T >= 0
    lengths = accept_lengths(rows, right)
    sums = torch.cat(
        [(right & there).sum(0).double(), (overlap * there).sum(0).double(), there.sum(0), lengths.sum()[None].double()]
    ).tolist()
    found: Sums = {f"{name}_{step}": (0.0, 0.0) for step in range(len(rows.counts)) for name in ("accuracy", "overlap")}
    for step in range(steps):
        count = sums[2 * steps + step]
        found[f"accuracy_{step}"] = (sums[step], count)
        found[f"overlap_{step}"] = (sums[steps + step], count)
    return found | {"accept_length": (sums[-1], len(lengths))}


def accept_lengths(rows: ChainRows, right: Tensor) -> Tensor:
    """[N] tokens a greedy round would emit from each row step 0 is judged on: its unbroken right guesses, and one.

    A chain ends where the answer ends, as decoding would. right [M, K].
    """
    places = rows.counts[0]  # B * S
    starts = rows.answers - 1
    alive = torch.ones(places, dtype=torch.bool, device=right.device)
    length = torch.ones(places, dtype=torch.int64, device=right.device)
    for step in range(right.shape[1]):
        hit = torch.zeros(places + 1, dtype=torch.bool, device=right.device)
        there = rows.guesses[step] >= 0
        hit[torch.where(there, starts - step, places)] = right[:, step]  # guesses that aren't go past the end
        alive &= hit[:places]
        length += alive
    return length[starts[rows.guesses[0] >= 0]]
