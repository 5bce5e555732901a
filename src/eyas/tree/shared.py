"""Dynamic trees for a whole batch under one node budget.

Every row grows candidates as in EAGLE-2 (a beam of `width`). At the end the `budget` most valuable candidates of all
rows together are kept, so a row with a confident drafter gets many nodes and others few or none. A path's value is
its probability, or the product of its steps' values in a `ValueTable`. A parent is never worth less than its child and
comes before it, so ties can't separate them.

A `PlannedTree` chooses the nodes of one round by more than a budget: by prices, and by learned step values. On a CPU,
trees are grown with numpy, whose operations take a fraction of PyTorch's time at such sizes. There, growth also does
what would need a sync on an accelerator: drafting ends as soon as no row has a node worth continuing from, the kept
nodes are counted, and prices may choose them.

Shapes: B rows, W beam nodes, K children offered by each, M candidates of all levels of a row, N node columns.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eyas.errors import UsageError
from eyas.runtime import to_device
from eyas.tree.bounds import check_sizes
from eyas.tree.draft_tree import (
    BeamCandidates,
    BeamLevels,
    BeamSearch,
    DraftTree,
    Frontier,
    Growth,
    NetworkDraft,
    TreeSpec,
    all_valid,
)
from eyas.tree.dynamic import BeamGrowth, path_sums
from eyas.tree.values import ValueTable, may_pay, most_profitable, most_profitable_of_a_row, top_k_mask

_IMPOSSIBLE = -1e4
"""Replaces log-probabilities of minus infinity, so that the number of kept nodes is known beforehand."""

Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]
Number = TypeVar("Number", np.float32, np.int64)


@dataclass(frozen=True)
class SharedTree(TreeSpec):
    """`depth` levels, beams of `width`, at most `budget` nodes in the batch and `per_row` in a row (None = no limit).

    `threshold` > 0 leaves out nodes of lower value. On a CPU, where counting needs no sync, that makes the pass
    smaller, and drafting ends as soon as no row has a node of that value to continue from.
    """

    depth: int
    width: int
    budget: int
    per_row: int | None = None
    threshold: float = 0.0

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in ("depth", "width", "budget", "per_row")}
        check_sizes("shared", self.threshold, **sizes)

    @property
    def max_fanout(self) -> int:
        return self.width

    @property
    def max_nodes(self) -> int:
        return min(self.budget, self.per_row or self.budget)

    @property
    def beam(self) -> int:
        return self.width

    @property
    def columns(self) -> int:
        return 1 + max(self.max_nodes, self.depth * self.width)

    def pass_tokens(self, rows: int) -> int:
        return rows + self.budget

    def valued(self, values: ValueTable, groups: tuple[int, ...]) -> PlannedTree:
        return PlannedTree(self, values=values, groups=groups)

    def start(self, batch: int, device: torch.device, drafting: Sequence[bool] | None = None) -> Growth:
        return PlannedTree(self).start(batch, device, drafting)

    def search(self, batch: int, drafting: Sequence[bool] | None = None) -> BeamSearch:
        return PlannedTree(self).search(batch, drafting)

    def fits_all(self, counts: Sequence[int]) -> bool:
        return self.threshold == 0.0 and sum(counts) <= self.budget and max(counts) <= self.max_nodes

    def keep(self, scores: Tensor, allowed: Tensor | None = None) -> Tensor:
        """[B, M] bool: the candidates to keep; `scores` [B, M] are logarithms of their values.

        `allowed` [B, M or 1]: which of them may be kept; None = all.
        """
        scores = scores.to(torch.float32)
        priority = scores.clamp(min=_IMPOSSIBLE)
        value = scores.exp()
        if self.threshold > 0.0:
            priority.masked_fill_(value < self.threshold, -math.inf)
        if allowed is not None:
            priority.masked_fill_(~allowed, -math.inf)
        if self.per_row is not None and self.per_row < priority.shape[1]:
            priority.masked_fill_(~top_k_mask(priority, self.per_row), -math.inf)
        kept = priority > -math.inf
        if self.budget < priority.numel():
            kept &= top_k_mask(priority.view(1, -1), self.budget).view_as(kept)
        return kept

    def keep_on_host(self, scores: Sequence[Sequence[float]], allowed: Sequence[Sequence[bool]]) -> list[list[bool]]:
        kept: list[list[bool]] = self.keep(torch.tensor(scores), torch.tensor(allowed)).tolist()
        return kept


@dataclass(frozen=True)
class PlannedTree(TreeSpec):
    """One round's trees of a `shape`, and how their nodes are chosen.

    On a CPU, `prices` [budget] may choose them: drafting ends as the shape says, and the nodes kept are those whose
    total value exceeds their price by the most.
    """

    shape: SharedTree
    prices: tuple[float, ...] | None = None
    """Tokens that verifying 1, 2, ... nodes must gain to be worth its time; need be neither convex nor concave."""
    alone: float | None = None
    """The price of the round without nodes. If it is given, nodes are chosen for the most tokens per price, where that
    is more than one (`values.most_profitable`)."""
    level_price: float = -math.inf
    """Tokens that a further level must gain in a single row, if `prices` choose; -inf = only the shape ends drafts."""
    padding_prices: tuple[float, ...] | None = None
    """Tokens that padding all rows to the longest costs, by the number of padding nodes 1, 2, ...; None = nothing."""
    values: ValueTable | None = None
    groups: tuple[int, ...] | None = None
    calibrations: tuple[float, ...] | None = None
    copy_exponents: tuple[float, ...] | None = None
    weights: tuple[float, ...] | None = None
    """What an expected token of each of several rows is worth when `prices` choose nodes; None = 1."""
    keeps_candidates: bool = False
    found_only: bool = False
    looks_up: bool = True
    depth: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "depth", self.shape.depth)
        if self.prices is not None and len(self.prices) != self.shape.budget:
            raise UsageError(f"shared tree: {len(self.prices)} prices for a budget of {self.shape.budget} nodes")
        if self.padding_prices is not None and self.prices is None:
            raise UsageError("shared tree: padding_prices need `prices` of nodes as well")

    @property
    def beam(self) -> int:
        return 0 if self.keeps_candidates else self.shape.beam

    @property
    def max_fanout(self) -> int:
        return self.shape.max_fanout

    @property
    def max_nodes(self) -> int:
        return self.shape.max_nodes

    @property
    def columns(self) -> int:
        return 1 + self.max_nodes if self.found_only else self.shape.columns

    def pass_tokens(self, rows: int) -> int:
        return self.shape.pass_tokens(rows)

    def start(self, batch: int, device: torch.device, drafting: Sequence[bool] | None = None) -> Growth:
        if device.type == "cpu":
            return HostGrowth(self, batch, drafting)
        return SharedGrowth(self, batch, device, drafting)

    def search(self, batch: int, drafting: Sequence[bool] | None = None) -> BeamSearch:
        threshold = self.shape.threshold
        alone = batch == 1 and (drafting is None or drafting[0])
        return BeamSearch(
            self.depth,
            self.max_fanout,
            None if self.values is None else self.values.logs,
            None if self.groups is None else np.array(self.groups),
            None if drafting is None else np.array(drafting),
            math.log(threshold) if threshold > 0.0 else -math.inf,
            self.row_prices if alone and self.prices is not None else None,
            partial(self._searched, batch, drafting),
            1.0 if self.calibrations is None else self.calibrations[0],
            self.level_price,
        )

    def _searched(self, batch: int, drafting: Sequence[bool] | None, levels: BeamLevels) -> DraftTree:
        if levels.chosen is None:
            return HostGrowth(self, batch, drafting).finished(levels)
        chosen = levels.chosen
        size = len(levels.chosen.logprobs)
        _, parents, tokens = torch.from_numpy(chosen.nodes).unsqueeze(1).unbind()  # [1, N] each
        candidates = None
        if self.keeps_candidates:
            candidates = _candidates(levels.scores, levels.sizes, list(levels.beams.swapaxes(0, 1)))
        return DraftTree(
            tokens=tokens,
            parents=parents,
            logprob=torch.from_numpy(chosen.logprobs).unsqueeze(0),
            valid=all_valid(1, size),
            max_depth=_level_of(max(chosen.nodes[0].tolist()), levels.sizes) if size else 0,
            counted=size,
            network=NetworkDraft(len(levels.sizes), candidates, [chosen.promise]),
        )

    def fits_all(self, counts: Sequence[int]) -> bool:
        return self.prices is None and self.shape.fits_all(counts)

    def keep(self, scores: Tensor, allowed: Tensor | None = None) -> Tensor:
        if self.prices is None:
            return self.shape.keep(scores, allowed)
        mask = None if allowed is None else allowed.numpy()
        return torch.from_numpy(self.profitable(scores.to(torch.float32).numpy(), mask))

    def keep_on_host(self, scores: Sequence[Sequence[float]], allowed: Sequence[Sequence[bool]]) -> list[list[bool]]:
        if self.prices is None:
            return self.shape.keep_on_host(scores, allowed)
        if len(scores) > 1:
            kept: list[list[bool]] = self.profitable(np.array(scores, np.float32), np.array(allowed)).tolist()
            return kept
        values = [math.exp(score) * usable for score, usable in zip(scores[0], allowed[0], strict=True)]
        chosen = set(most_profitable_of_a_row(values, self.prices, self.shape.per_row, self.alone))
        return [[node in chosen for node in range(len(values))]]

    def profitable(self, scores: Floats, allowed: npt.NDArray[np.bool_] | None) -> npt.NDArray[np.bool_]:
        """`keep` by the plan's `prices`, without PyTorch."""
        value = np.exp(scores, dtype=np.float64)
        if allowed is not None:
            value *= allowed
        if len(value) > 1:
            if self.weights is not None:
                value *= np.array(self.weights)[:, None]
            chosen = most_profitable(value, self.node_prices, self.padding_prices, self.shape.per_row, self.alone)
            return chosen.mask(value)
        mask = np.zeros(value.shape, dtype=np.bool_)
        mask[0, most_profitable_of_a_row(value[0].tolist(), self.prices or (), self.shape.per_row, self.alone)] = True
        return mask

    @cached_property
    def node_prices(self) -> npt.NDArray[np.float64]:
        """[budget] `prices` for numpy and native searches, converted once for all rounds of a plan."""
        return np.array(self.prices)

    @cached_property
    def row_prices(self) -> npt.NDArray[np.float64]:
        """The part of `node_prices` that a single row can have nodes for."""
        return self.node_prices[: self.shape.per_row]

    @cached_property
    def log_calibrations(self) -> Floats | None:
        """[B, 1] logarithms of `calibrations`."""
        return None if self.calibrations is None else np.log(self.calibrations, dtype=np.float32)[:, None]


class SharedGrowth(BeamGrowth):
    """Grows a batch of trees that share a node budget, on an accelerator and without a sync."""

    def __init__(self, plan: PlannedTree, batch: int, device: torch.device, drafting: Sequence[bool] | None) -> None:
        super().__init__(plan.depth, plan.max_fanout, batch, device)
        self._plan = plan
        self._batch = batch
        self._device = device
        if plan.prices is not None:
            raise UsageError("shared tree: prices work on a CPU only; use a budget on this device")
        self._drafting = [row for row in range(batch) if drafting is None or drafting[row]]
        self._groups = to_device((0,) * batch if plan.groups is None else plan.groups, device)

    @property
    def calibrates(self) -> bool:
        return self._plan.values is not None

    def _step_values(self, steps: Tensor) -> Tensor:
        return steps if self._plan.values is None else self._plan.values.look_up(steps, self._groups)

    def tree(self) -> DraftTree:
        # [B, M]
        shape = self._plan.shape
        scores = torch.cat(self._scores, dim=1)
        allowed = None
        if len(self._drafting) < self._batch:
            allowed = to_device([[row in self._drafting] for row in range(self._batch)], self._device)
        kept = self._plan.keep(scores, allowed)
        cap = min(scores.shape[1], shape.per_row or shape.budget)
        counted = None if shape.threshold > 0.0 else min(shape.budget, len(self._drafting) * cap)
        return DraftTree(
            tokens=torch.cat(self._tokens, dim=1),
            parents=torch.cat(self._parents, dim=1),
            logprob=torch.cat(self._logprobs, dim=1),
            valid=kept,
            max_depth=len(self._scores),
            network=NetworkDraft(candidates=self._candidates() if self._plan.keeps_candidates else None),
        ).keeping(kept, min(shape.budget, cap), counted)

    def _candidates(self) -> BeamCandidates:
        return BeamCandidates(tuple(map(_on_host, self._scores)), tuple(map(_on_host, self._beams)))


class HostGrowth:
    """Grows a batch of trees that share a node budget, on the host."""

    def __init__(self, plan: PlannedTree, batch: int, drafting: Sequence[bool] | None) -> None:
        """Rows that aren't `drafting` [B] get no nodes; None = all are."""
        self._plan = plan
        self._batch = batch
        self._rows = np.arange(batch)[:, None]  # pairs with an index of columns [B, N]
        self._drafting = [row for row in range(batch) if drafting is None or drafting[row]]
        self._groups = np.array((0,) * batch if plan.groups is None else plan.groups)
        self._beam_score: Floats = np.zeros((batch, 1), np.float32)  # [B, W] logarithm of the path's value
        self._beam_logprob = self._beam_score  # [B, W] log-probability of the path
        self._beam_index: Indices = np.full((batch, 1), -1)  # [B, W] into candidates
        self._sizes: list[int] = []  # of each level: W * K
        self._tokens: list[Indices] = []  # each for one or more levels: [B, sum of their sizes]
        self._scores: list[Floats] = []
        self._logprobs: list[Floats] = []
        self._parents: list[Indices] = []
        self._beams: list[Indices] = []  # for each level but the last [B, W'] into the level's candidates
        self._count = 0

    @property
    def fanout(self) -> int:
        return self._plan.max_fanout

    @property
    def calibrates(self) -> bool:
        return self._plan.values is not None

    def finished(self, levels: BeamLevels) -> DraftTree:
        """The trees from the candidates of a complete search."""
        self._add(levels.tokens, levels.scores, levels.logprobs, levels.parents, levels.sizes)
        self._beams = list(levels.beams.swapaxes(0, 1))
        return self.tree()

    def expand(self, logprob: Tensor, tokens: Tensor) -> Frontier | None:
        fanout = tokens.shape[2]
        # clamped: a score above its parent's, even by rounding, would let a child outrank the parent
        steps = np.minimum(logprob.numpy(), np.float32(0.0))  # [B, W, K]
        scores = (self._beam_score[:, :, None] + self._worth(steps, np.arange(fanout) > 0)).reshape(self._batch, -1)
        logprobs = (self._beam_logprob[:, :, None] + steps).reshape(self._batch, -1)
        flat = tokens.numpy().reshape(self._batch, -1)
        offset = self._count
        self._count += flat.shape[1]
        self._add(flat, scores, logprobs, np.repeat(self._beam_index, fanout, axis=1), [flat.shape[1]])
        if len(self._sizes) == self._plan.depth:
            return None
        best = (-scores).argsort(axis=1, kind="stable")[:, :fanout]  # [B, W']
        self._beam_score = scores[self._rows, best]
        if not (self._wants_another_level() and self._may_pay()):
            return None
        self._beam_logprob = logprobs[self._rows, best]
        self._beam_index = best + offset
        self._beams.append(best)
        return Frontier(torch.from_numpy(flat[self._rows, best]), torch.from_numpy(best // fanout))

    def expand_all(
        self,
        sizes: Sequence[int],
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        logprob: Sequence[Sequence[float]],
        later: Sequence[Sequence[bool]],
    ) -> None:
        """Take the candidates [B, M] of all levels in one call, as `BeamGrowth.expand_all` does."""
        steps = np.minimum(np.array(logprob, np.float32), np.float32(0.0))
        worth = self._worth(steps[:, None], np.array(later)[:, None])[:, 0]
        scores, logprobs = (np.array(path_sums(part.tolist(), parents), np.float32) for part in (worth, steps))
        ids = np.array(tokens)
        above = np.array(parents)
        stop = 0
        for size in sizes:
            part = slice(stop, stop + size)
            stop += size
            self._add(ids[:, part], scores[:, part], logprobs[:, part], above[:, part], [size])
            self._beam_score = self._scores[-1].max(axis=1, keepdims=True)
            if not self._wants_another_level():
                break

    def tree(self) -> DraftTree:
        kept = self._selected(_side_by_side(self._scores))  # [B, M]
        counts = kept.sum(axis=1, keepdims=True)
        # kept candidates come first, in order, which puts parents before children
        chosen = (~kept).argsort(axis=1, kind="stable")[:, : counts.max()]
        valid = np.arange(chosen.shape[1]) < counts
        above = _side_by_side(self._parents)[self._rows, chosen]
        column = kept.cumsum(axis=1) - 1  # of each candidate
        # an invalid column copies a candidate whose parent may be gone: make it a child of the root
        parents = np.where(valid & (above >= 0), column[self._rows, above], -1)
        scores = _side_by_side(self._scores)
        sizes = self._sizes
        return DraftTree(
            tokens=torch.from_numpy(_side_by_side(self._tokens)[self._rows, chosen]),
            parents=torch.from_numpy(parents),
            logprob=torch.from_numpy(_side_by_side(self._logprobs)[self._rows, chosen]),
            valid=torch.from_numpy(valid),
            max_depth=_level_of(int(chosen[valid].max()), sizes) if valid.any() else 0,
            counted=int(valid.sum()),
            network=NetworkDraft(
                levels=len(sizes),
                candidates=_candidates(scores, sizes, self._beams) if self._plan.keeps_candidates else None,
                promise=(np.exp(scores) * kept).sum(axis=1).tolist(),
            ),
        )

    def _add(self, tokens: Indices, scores: Floats, logprobs: Floats, parents: Indices, sizes: Sequence[int]) -> None:
        self._sizes += sizes
        self._tokens.append(tokens)
        self._scores.append(scores)
        self._logprobs.append(logprobs)
        self._parents.append(parents)

    def _worth(self, steps: Floats, later: npt.NDArray[np.bool_]) -> Floats:
        """What children with log-probabilities `steps` [B, W, K] add to the logarithm of a path's value: at most 0.

        `later`, which broadcasts to `steps`: the ones that aren't their parent's best child.
        """
        values = self._plan.values
        return steps if values is None else values.on_host(steps, later, self._groups[:, None, None])

    def _wants_another_level(self) -> bool:
        """Whether some row's next level may have a node that reaches the threshold."""
        threshold = self._plan.shape.threshold
        return threshold == 0.0 or any(self._beam_score[row, 0] > math.log(threshold) for row in self._drafting)

    def _may_pay(self) -> bool:
        """Whether further levels of a single row may pay; those of a batch always may."""
        plan = self._plan
        if plan.prices is None or self._batch > 1 or not self._drafting:
            return True
        calibration = 1.0 if plan.calibrations is None else plan.calibrations[0]
        values = calibration * np.exp(np.concatenate(self._scores, axis=1)[0], dtype=np.float64)
        best = min(calibration * math.exp(self._beam_score[0, 0]), 1.0)
        return may_pay(values, best, len(self._sizes), plan.depth, plan.row_prices, plan.level_price)

    def _selected(self, scores: Floats) -> npt.NDArray[np.bool_]:
        """[B, M] bool: the candidates that become nodes."""
        plan = self._plan
        everyone = len(self._drafting) == self._batch
        mask = None if everyone else self._mask()[:, None]
        if plan.prices is not None:
            calibrated = scores if plan.log_calibrations is None else scores + plan.log_calibrations
            return plan.profitable(calibrated, mask)
        allowed = None if mask is None else torch.from_numpy(mask)
        kept: npt.NDArray[np.bool_] = plan.keep(torch.from_numpy(scores), allowed).numpy()
        return kept

    def _mask(self) -> npt.NDArray[np.bool_]:
        """[B] bool: the rows that are drafting."""
        mask = np.zeros(self._batch, dtype=np.bool_)
        mask[self._drafting] = True
        return mask


def _candidates(scores: Floats, sizes: list[int], beams: Sequence[Indices]) -> BeamCandidates:
    return BeamCandidates(torch.split(torch.from_numpy(scores), sizes, dim=1), tuple(map(torch.from_numpy, beams)))


def _level_of(candidate: int, sizes: Sequence[int]) -> int:
    """The level of a candidate, from 1 on, given all levels' `sizes`."""
    return bisect_right(list(accumulate(sizes)), candidate) + 1


def _side_by_side(levels: Sequence[npt.NDArray[Number]]) -> npt.NDArray[Number]:
    return levels[0] if len(levels) == 1 else np.concatenate(levels, axis=1)


def _on_host(tensor: Tensor) -> Tensor:
    """A copy in host memory, complete only after the next host sync."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
