"""Blocks of several sources in fixed proportions; batch n is a pure function of n and the seed."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from eyas.errors import DataError


class Mixture:
    """Sources take turns by largest remainder; each goes through its own shuffled epochs."""

    def __init__(self, sources: Mapping[str, Tensor], weights: Mapping[str, float], seed: int) -> None:
        if sources.keys() != weights.keys():
            raise DataError(f"weights name {sorted(weights)}, the corpus holds {sorted(sources)}")
        self._names = sorted(sources)
        self._blocks = [sources[name] for name in self._names]  # each [N, S]
        total = sum(weights.values())
        self._shares = [weights[name] / total for name in self._names]
        self._seed = seed
        self._turns: list[tuple[int, int]] = []  # of draw n: source, and how often it was drawn before
        self._drawn = [0] * len(self._names)

    def batch(self, number: int, size: int) -> Tensor:
        """The `number`th batch of `size` blocks: [size, S]."""
        return torch.stack([self._block(n) for n in range(number * size, (number + 1) * size)])

    def _block(self, n: int) -> Tensor:
        while len(self._turns) <= n:  # a cache of a pure sequence, not state: draw n never depends on who asked
            k = len(self._turns) + 1
            source = max(range(len(self._names)), key=lambda s: self._shares[s] * k - self._drawn[s])
            self._turns.append((source, self._drawn[source]))
            self._drawn[source] += 1
        source, index = self._turns[n]
        epoch, offset = divmod(index, len(self._blocks[source]))
        order = np.random.default_rng([self._seed, source, epoch]).permutation(len(self._blocks[source]))
        return self._blocks[source][int(order[offset])]
