"""Beam-grown trees: what dynamic and shared trees have in common, and EAGLE-2's dynamic tree (arXiv 2406.16858).

Each level offers a few children of every beam node; the best paths so far continue. The subclass decides which of all
candidates become nodes: `DynamicGrowth` keeps the best of each row, `eyas.tree.shared` the best of a whole batch.

Shapes: B rows, W beam nodes, K children offered by each, M candidates of all levels, N kept nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas.tree.bounds import check_sizes
from eyas.tree.draft_tree import BeamLevels, BeamSearch, DraftTree, Frontier, TreeSpec


class BeamGrowth:
    """Grows candidates of up to `depth` levels, with beams of `fanout` nodes and `fanout` children of each."""

    def __init__(self, depth: int, fanout: int, batch: int, device: torch.device) -> None:
        self._depth = depth
        self._fanout = fanout
        self._beam_score = torch.zeros(batch, 1, device=device)  # [B, W] logarithm of the path's value
        self._beam_logprob = self._beam_score  # [B, W] log-probability of the path
        self._beam_index = torch.full((batch, 1), -1, dtype=torch.int64, device=device)  # [B, W] into candidates
        self._tokens: list[Tensor] = []  # for each level [B, W * K]
        self._scores: list[Tensor] = []
        self._logprobs: list[Tensor] = []
        self._parents: list[Tensor] = []
        self._beams: list[Tensor] = []  # for each level but the last [B, W'] into the level's candidates
        self._count = 0

    @property
    def fanout(self) -> int:
        return self._fanout

    @property
    def calibrates(self) -> bool:
        return False

    @property
    def search(self) -> BeamSearch | None:
        return None

    def expand(self, logprob: Tensor, tokens: Tensor) -> Frontier | None:
        fanout = tokens.shape[2]
        # clamped: a score above its parent's, even by rounding, would let a child outrank the parent
        steps = logprob.clamp(max=0.0)
        values = self._step_values(steps)
        scores = logprobs = (self._beam_score.unsqueeze(2) + values).flatten(1)  # [B, W * K]
        if values is not steps:
            logprobs = (self._beam_logprob.unsqueeze(2) + steps).flatten(1)
        flat = tokens.flatten(1)
        self._tokens.append(flat)
        self._scores.append(scores)
        self._logprobs.append(logprobs)
        self._parents.append(self._beam_index.repeat_interleave(fanout, dim=1))
        offset = self._count
        self._count += flat.shape[1]
        if len(self._tokens) == self._depth:
            return None
        if flat.shape[1] == 1:  # a chain: nothing to choose
            self._beam_score = scores
            best = torch.zeros_like(flat)
        else:
            self._beam_score, best = scores.topk(min(self._fanout, scores.shape[1]), dim=1)  # [B, W']
        if not self._wants_another_level():
            return None
        if flat.shape[1] == 1:
            self._beam_logprob = logprobs
            self._beam_index = best + offset
            self._beams.append(best)
            return Frontier(flat, best)
        self._beam_logprob = logprobs.gather(1, best)
        self._beam_index = best + offset
        self._beams.append(best)
        return Frontier(flat.gather(1, best), best // fanout)

    def expand_all(
        self,
        sizes: Sequence[int],
        tokens: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]],
        logprob: Sequence[Sequence[float]],
        later: Sequence[Sequence[bool]],
    ) -> None:
        """Take the candidates [B, M] of all levels in one call, if no beam would leave any out; on a CPU only.

        `sizes`: of the levels; `parents`: candidates, -1 = the root; `later`: not their parent's best child.
        """
        steps = torch.tensor(logprob).clamp_(max=0.0)
        values = self._step_values(steps.unsqueeze(2).expand(-1, -1, 2))  # [B, M, 2] as a best child, as a later one
        rank = torch.tensor(later, dtype=torch.int64).unsqueeze(2)
        worth = values.gather(2, rank).squeeze(2)
        scores, logprobs = (torch.tensor(path_sums(part.tolist(), parents)) for part in (worth, steps))
        made = (torch.tensor(tokens), scores, logprobs, torch.tensor(parents))
        for level in zip(*(torch.split_with_sizes(part, list(sizes), dim=1) for part in made), strict=True):
            for kept, part in zip((self._tokens, self._scores, self._logprobs, self._parents), level, strict=True):
                kept.append(part)
            self._beam_score = level[1].amax(1, keepdim=True)
            if not self._wants_another_level():
                break

    def _step_values(self, steps: Tensor) -> Tensor:
        """[B, W, K] what children with log-probabilities `steps` add to the logarithm of a path's value: at most 0."""
        return steps

    def _wants_another_level(self) -> bool:
        """Whether to continue from the beam in `_beam_score`."""
        return True


def path_sums(steps: Sequence[Sequence[float]], parents: Sequence[Sequence[int]]) -> list[list[float]]:
    """[B, M] the sums of `steps` [B, M] along the paths to the root that `parents` [B, M] give."""
    sums = []
    for row, above in zip(steps, parents, strict=True):
        total: list[float] = []
        for step, parent in zip(row, above, strict=True):
            total.append(step + total[parent] if parent >= 0 else step)
        sums.append(total)
    return sums


@dataclass(frozen=True)
class DynamicTree(TreeSpec):
    """EAGLE-2's dynamic tree: `depth` levels of drafting, then the `nodes` best candidates of each row are kept.

    Each level offers `top_k` children of every beam node, and the `top_k` best paths so far continue. `threshold` > 0
    prunes nodes whose path probability is lower. Counting the remaining nodes costs one more host sync per round, which
    pays only where a smaller verification pass is cheaper.
    """

    depth: int
    top_k: int
    nodes: int
    threshold: float = 0.0

    def __post_init__(self) -> None:
        check_sizes("dynamic", self.threshold, depth=self.depth, top_k=self.top_k, nodes=self.nodes)

    @property
    def max_fanout(self) -> int:
        return self.top_k

    @property
    def max_nodes(self) -> int:
        return self.nodes

    @property
    def recurs(self) -> bool:
        return self.threshold == 0.0

    @property
    def beam(self) -> int:
        return self.top_k

    @property
    def columns(self) -> int:
        beams = (self.depth - 1) * self.top_k  # beam nodes that the drafter runs
        return 1 + max(beams, min(self.nodes, self.top_k * (1 + beams)))

    def fits_all(self, counts: Sequence[int]) -> bool:
        return self.threshold == 0.0 and max(counts) <= self.nodes

    def keep(self, scores: Tensor, allowed: Tensor) -> Tensor:
        kept = super().keep(scores, allowed)
        return kept & (scores >= math.log(self.threshold)) if self.threshold > 0.0 else kept

    def keep_on_host(self, scores: Sequence[Sequence[float]], allowed: Sequence[Sequence[bool]]) -> list[list[bool]]:
        if self.threshold > 0.0:
            least = math.log(self.threshold)
            allowed = [
                [usable and score >= least for usable, score in zip(*row, strict=True)]
                for row in zip(allowed, scores, strict=True)
            ]
        return super().keep_on_host(scores, allowed)

    def start(self, batch: int, device: torch.device, drafting: Sequence[bool] | None = None) -> DynamicGrowth:
        return DynamicGrowth(self, batch, device, drafting)

    def search(self, batch: int, drafting: Sequence[bool] | None = None) -> BeamSearch:
        growth = self.start(batch, torch.device("cpu"), drafting)
        return BeamSearch.by_probability(self.depth, self.top_k, growth.finished)


class DynamicGrowth(BeamGrowth):
    """Grows dynamic trees.

    A path's score never exceeds its parent's and the sort is stable, so a child is never kept without its parent, even
    if scores are tied (the reference implementation loses parents then).
    """

    def __init__(self, spec: DynamicTree, batch: int, device: torch.device, drafting: Sequence[bool] | None) -> None:
        super().__init__(spec.depth, spec.top_k, batch, device)
        self._spec = spec
        self._drafting = drafting

    def finished(self, levels: BeamLevels) -> DraftTree:
        """The trees from the candidates of a complete search."""
        self._tokens = [torch.from_numpy(levels.tokens)]
        self._parents = [torch.from_numpy(levels.parents)]
        self._scores = [torch.from_numpy(levels.scores)]
        return self.tree()

    def tree(self) -> DraftTree:
        scores = torch.cat(self._scores, dim=1)  # [B, M]
        keep = min(self._spec.nodes, scores.shape[1])
        counted = keep * scores.shape[0]
        ranked, order = scores.sort(dim=1, descending=True, stable=True)
        if self._spec.threshold > 0.0:
            confident = ranked[:, :keep] >= math.log(self._spec.threshold)
            counts: list[int] = confident.sum(1).tolist()
            keep = max(counts)
            counted = sum(counts)
        # candidate order is level order, so ascending indices put parents first
        chosen = order[:, :keep].sort(dim=1).values  # [B, N]
        # [B, 1 + M] column of the root (-1) and of each candidate
        column = torch.full((scores.shape[0], scores.shape[1] + 1), -1, dtype=torch.int64, device=scores.device)
        column.scatter_(1, chosen + 1, torch.arange(keep, device=scores.device).expand_as(chosen))
        logprob = scores.gather(1, chosen)
        return DraftTree(
            tokens=torch.cat(self._tokens, dim=1).gather(1, chosen),
            parents=column.gather(1, torch.cat(self._parents, dim=1).gather(1, chosen) + 1),
            logprob=logprob,
            valid=logprob >= (math.log(self._spec.threshold) if self._spec.threshold > 0.0 else -math.inf),
            max_depth=min(self._spec.depth, keep),
            counted=counted,
        ).only(self._drafting)
