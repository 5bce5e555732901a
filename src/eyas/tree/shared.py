"""Dynamic trees for a whole batch under one node budget.

Every row grows candidates as in EAGLE-2 (a beam of `width`); at the end the `budget` most valuable candidates of all
rows together are kept, so a row whose drafter is sure gets many nodes and a doubtful one few or none. A path's value is
its probability, or the product of what a `ValueTable` says that its steps are worth. A parent is never worth less than
its child and comes before it, so ties can't part them.

Shapes: B rows, W beam nodes, K children offered by each, M candidates of all levels of a row, N node columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.errors import UsageError
from eyas.runtime import to_device
from eyas.tree.draft_tree import BeamCandidates, DraftTree
from eyas.tree.dynamic import BeamGrowth
from eyas.tree.host_growth import HostGrowth
from eyas.tree.spec import check_sizes
from eyas.tree.values import ValueTable, most_profitable

_IMPOSSIBLE = -1e4
"""Replaces log-probabilities of minus infinity, so that the number of kept nodes is known beforehand."""


@dataclass(frozen=True)
class SharedTree:
    """`depth` levels, beams of `width`, at most `budget` nodes in the batch and `per_row` in a row (None = no limit).

    `threshold` > 0 leaves out nodes of lower value. On a CPU, where counting needs no sync, that makes the pass
    smaller, and drafting ends as soon as no row has a node of that value to go on from. There `prices` [budget] may
    choose instead: drafting ends as before, and the nodes are kept whose values together exceed their price by the
    most.
    """

    depth: int
    width: int
    budget: int
    per_row: int | None = None
    threshold: float = 0.0
    prices: tuple[float, ...] | None = None
    """Tokens that verifying 1, 2, ... nodes must gain to be worth its time; need be neither convex nor concave."""
    padding_prices: tuple[float, ...] | None = None
    """Tokens that padding all rows to the longest costs, by the number of padding nodes 1, 2, ...; None = nothing."""
    values: ValueTable | None = None
    """What steps are worth; None = their probability."""
    groups: tuple[int, ...] | None = None
    """Each row's group in `values`; None = all rows are in group 0."""
    keeps_candidates: bool = False
    """Whether finished trees bring along all candidates they were chosen from."""
    found_only: bool = False
    """Whether nodes are only found on the host, as copies are: a network, if there is one, computes nothing."""

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in ("depth", "width", "budget", "per_row")}
        check_sizes("shared", self.threshold, **sizes)
        if self.prices is not None and len(self.prices) != self.budget:
            raise UsageError(f"shared tree: {len(self.prices)} prices for a budget of {self.budget} nodes")
        if self.padding_prices is not None and self.prices is None:
            raise UsageError("shared tree: padding_prices need `prices` of nodes as well")

    @property
    def max_fanout(self) -> int:
        return self.width

    @property
    def max_nodes(self) -> int:
        return min(self.budget, self.per_row or self.budget)

    def start(
        self, batch: int, device: torch.device, drafting: Sequence[bool] | None = None
    ) -> SharedGrowth | HostGrowth:
        if device.type == "cpu":
            return HostGrowth(self, batch, drafting)
        return SharedGrowth(self, batch, device, drafting)

    def keep(self, scores: Tensor, allowed: Tensor | None = None) -> Tensor:
        """[B, M] bool: the candidates to keep; `scores` [B, M] are logarithms of their values.

        `allowed` [B, M or 1]: which of them may be kept; None = all.
        """
        if self.prices is not None:
            return self._profitable(scores, allowed)
        priority, value = scores.clamp(min=_IMPOSSIBLE), scores.exp()
        if self.threshold > 0.0:
            priority.masked_fill_(value < self.threshold, -math.inf)
        if allowed is not None:
            priority.masked_fill_(~allowed, -math.inf)
        if self.per_row is not None and self.per_row < priority.shape[1]:
            priority.masked_fill_(~greatest(priority, self.per_row), -math.inf)
        kept = priority > -math.inf
        if self.budget < priority.numel():
            kept &= greatest(priority.view(1, -1), self.budget).view_as(kept)
        return kept

    def _profitable(self, scores: Tensor, allowed: Tensor | None) -> Tensor:
        """[B, M] bool: the candidates whose values together exceed their prices by the most; on a CPU only."""
        assert self.prices is not None
        scores = scores if allowed is None else scores.masked_fill(~allowed, -math.inf)
        value = np.exp(scores.numpy(), dtype=np.float64)
        padding_prices = self.padding_prices if len(value) > 1 else None
        return torch.from_numpy(most_profitable(value, self.prices, padding_prices, self.per_row).mask(value))


class SharedGrowth(BeamGrowth):
    """Grows a batch of trees that share a node budget, on an accelerator: without a question to it."""

    def __init__(self, spec: SharedTree, batch: int, device: torch.device, drafting: Sequence[bool] | None) -> None:
        super().__init__(spec.depth, spec.width, batch, device)
        self._spec, self._batch, self._device = spec, batch, device
        if spec.prices is not None:
            raise UsageError("shared tree: prices work on a CPU only; use a budget on this device")
        self._drafting = [row for row in range(batch) if drafting is None or drafting[row]]
        self._groups = to_device((0,) * batch if spec.groups is None else spec.groups, device)

    @property
    def calibrates(self) -> bool:
        return self._spec.values is not None

    def _step_values(self, steps: Tensor) -> Tensor:
        return steps if self._spec.values is None else self._spec.values.look_up(steps, self._groups)

    def tree(self) -> DraftTree:
        spec, scores = self._spec, torch.cat(self._scores, dim=1)  # [B, M]
        allowed = None
        if len(self._drafting) < self._batch:
            drafting = torch.zeros(self._batch, 1, dtype=torch.bool)
            drafting[self._drafting] = True
            allowed = drafting.to(self._device)
        kept = spec.keep(scores, allowed)
        cap = min(scores.shape[1], spec.per_row or spec.budget)
        width = min(spec.budget, cap)
        # kept candidates come first, in their order, which puts parents before children
        chosen = (~kept).to(torch.uint8).argsort(dim=1, stable=True)[:, :width]  # [B, N]
        valid = kept.gather(1, chosen)
        column = F.pad(kept.cumsum(1) - 1, (1, 0), value=-1)  # [B, 1 + M] node column of the root (-1) and the kept
        parents = column.gather(1, torch.cat(self._parents, dim=1).gather(1, chosen) + 1)
        return DraftTree(
            tokens=torch.cat(self._tokens, dim=1).gather(1, chosen),
            # an invalid column copies a candidate that may be dropped: it becomes a child of the root
            parents=parents.masked_fill(~valid, -1),
            logprob=torch.cat(self._logprobs, dim=1).gather(1, chosen),
            valid=valid,
            max_depth=min(len(self._scores), width),
            counted=None if spec.threshold > 0.0 else min(spec.budget, len(self._drafting) * cap),
            candidates=self._candidates() if spec.keeps_candidates else None,
        )

    def _candidates(self) -> BeamCandidates:
        return BeamCandidates(tuple(map(_on_host, self._scores)), tuple(map(_on_host, self._beams)))


def greatest(scores: Tensor, count: int) -> Tensor:
    """[B, M] bool: the `count` greatest of each row of `scores` [B, M]; among equals the earlier ones."""
    if not count:
        return torch.zeros_like(scores, dtype=torch.bool)
    least = scores.topk(count, dim=1).values[:, -1:]
    above, level = scores > least, scores == least
    return above | (level & (level.cumsum(1) <= count - above.sum(1, keepdim=True)))


def _on_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, complete only after the next host sync."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
