"""Static trees: a fixed set of paths, the shape of EAGLE-1 and Medusa; a chain is the one-path case.

A path is a tuple of child ranks: (0, 2) = the third-best child of the best child of the root.

Shapes: B rows, N nodes, W frontier nodes, K children offered by each, n nodes of one level.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial

import torch
from torch import Tensor

from eyas.errors import UsageError
from eyas.runtime import to_device
from eyas.tree.bounds import check_sizes
from eyas.tree.draft_tree import BeamLevels, BeamSearch, DraftTree, Frontier, TreeSpec, all_valid, ancestor_mask

Path = tuple[int, ...]
"""A path of child ranks: (0, 2) = the third-best child of the best child of the root."""


class StaticTree(TreeSpec):
    """A tree of the given paths, in any order. Raises UsageError if a path's ancestors are missing."""

    def __init__(self, paths: Iterable[Sequence[int]]) -> None:
        nodes = sorted({tuple(p) for p in paths}, key=lambda p: (len(p), p))
        if not nodes or not nodes[0]:
            raise UsageError("a static tree needs at least one path, and no path may be empty")
        index = {path: i for i, path in enumerate(nodes)}
        for path in nodes:
            if min(path) < 0:
                raise UsageError(f"static tree path {path} has a negative child rank")
            if len(path) > 1 and path[:-1] not in index:
                raise UsageError(f"static tree path {path} has no parent {path[:-1]}: list it as well")
        self.depth = len(nodes[-1])
        self.nodes: tuple[Path, ...] = tuple(nodes)
        self.parents: tuple[int, ...] = tuple(index.get(path[:-1], -1) for path in nodes)

    @staticmethod
    def chain(length: int) -> StaticTree:
        """The tree of a single path: `length` times the best child."""
        check_sizes("chain", length=length)
        return StaticTree((0,) * depth for depth in range(1, length + 1))

    @property
    def recurs(self) -> bool:
        return True

    @property
    def is_chain(self) -> bool:
        return self.max_fanout == 1

    @property
    def max_fanout(self) -> int:
        return 1 + max(path[-1] for path in self.nodes)

    @property
    def max_nodes(self) -> int:
        return len(self.nodes)

    def levels(self) -> list[_Level]:
        """The index tables of each level, on the host."""
        has_child = {path[:-1] for path in self.nodes}
        frontier: list[Path] = [()]
        levels = []
        for depth in range(1, self.depth + 1):
            here = [path for path in self.nodes if len(path) == depth]
            at = {path: i for i, path in enumerate(frontier)}
            inner = [i for i, path in enumerate(here) if path in has_child]
            fanout = 1 + max(path[-1] for path in here)
            offered = [(parent, rank) for parent in range(len(frontier)) for rank in range(fanout)]
            taken = [(at[path[:-1]], path[-1]) for path in here]
            levels.append(
                _Level(
                    parents=torch.tensor([parent for parent, _ in taken]),
                    ranks=torch.tensor([rank for _, rank in taken]),
                    inner=torch.tensor(inner, dtype=torch.int64),
                    fanout=fanout,
                    whole=taken == offered,
                )
            )
            frontier = [here[i] for i in inner]
        return levels

    def start(self, batch: int, device: torch.device, drafting: Sequence[bool] | None = None) -> StaticGrowth:
        return StaticGrowth(_tables(self, device), batch, drafting)

    def search(self, batch: int, drafting: Sequence[bool] | None = None) -> BeamSearch | None:  # noqa: ARG002
        if len(self.nodes) > self.depth:
            return None
        return BeamSearch.by_probability(self.depth, 1, partial(self._chains, drafting))

    def _chains(self, drafting: Sequence[bool] | None, levels: BeamLevels) -> DraftTree:
        tokens = torch.from_numpy(levels.tokens)
        logprob = torch.from_numpy(levels.logprobs)
        parents, ancestors = _of_chains(self, len(tokens))
        valid = all_valid(*tokens.shape)
        tree = DraftTree(tokens, parents, logprob, valid, self.depth, ancestors, counted=tokens.numel())
        return tree.only(drafting)


@dataclass(frozen=True)
class _Level:
    """Which of the offered children become the n nodes of a level."""

    parents: Tensor  # [n] index into this level's incoming frontier
    ranks: Tensor  # [n] which child of that node
    inner: Tensor  # [W'] the ones of the n nodes that have children
    fanout: int
    whole: bool
    """Whether the n nodes are all the offered children, in order."""


@dataclass(frozen=True)
class _Tables:
    """A shape's index tables on a device."""

    levels: list[_Level]
    parents: Tensor  # [N]
    ancestors: Tensor  # [1 + N, 1 + N]


@cache
def _tables(spec: StaticTree, device: torch.device) -> _Tables:
    """A shape's index tables on `device`, computed once."""
    parents = to_device(spec.parents, device)
    levels = [
        replace(lv, parents=lv.parents.to(device), ranks=lv.ranks.to(device), inner=lv.inner.to(device))
        for lv in spec.levels()
    ]
    return _Tables(levels, parents, ancestor_mask(parents.unsqueeze(0), spec.depth)[0])


@lru_cache(maxsize=64)
def _of_chains(spec: StaticTree, batch: int) -> tuple[Tensor, Tensor]:
    """Parents [B, N] and shared ancestors of a batch of chains on the host."""
    tables = _tables(spec, torch.device("cpu"))
    return tables.parents.repeat(batch, 1), tables.ancestors


class StaticGrowth:
    """Fills a batch of static trees with tokens, level by level."""

    def __init__(self, tables: _Tables, batch: int, drafting: Sequence[bool] | None) -> None:
        self._tables = tables
        self._drafting = drafting
        self._level = 0
        self._frontier = torch.zeros(batch, 1, device=tables.parents.device)  # [B, W] cumulative log-probability
        self._tokens: list[Tensor] = []
        self._logprob: list[Tensor] = []

    @property
    def fanout(self) -> int:
        return self._tables.levels[self._level].fanout

    @property
    def calibrates(self) -> bool:
        return False

    def expand(self, logprob: Tensor, tokens: Tensor) -> Frontier | None:
        level = self._tables.levels[self._level]
        self._level += 1
        total = self._frontier.unsqueeze(2) + logprob  # [B, W, K]
        if level.whole:
            # [B, n]
            chosen = tokens.flatten(1)
            total = total.flatten(1)
        else:
            chosen, total = (each[:, level.parents, level.ranks] for each in (tokens, total))
        self._tokens.append(chosen)
        self._logprob.append(total)
        if self._level == len(self._tables.levels):
            return None
        parents = level.parents
        if len(level.inner) < len(parents):
            chosen = chosen[:, level.inner]
            total = total[:, level.inner]
            parents = parents[level.inner]
        self._frontier = total
        return Frontier(chosen, parents.expand(chosen.shape[0], -1))

    def tree(self) -> DraftTree:
        tokens = torch.cat(self._tokens, dim=1)
        parents, ancestors = self._tables.parents, self._tables.ancestors
        size = tokens.shape[1]
        if size < len(parents):  # the drafter stopped early; nodes are in level order
            parents, ancestors = parents[:size], ancestors[: 1 + size, : 1 + size]
        return DraftTree(
            tokens=tokens,
            parents=parents.expand_as(tokens),
            logprob=torch.cat(self._logprob, dim=1),
            valid=torch.ones_like(tokens, dtype=torch.bool),
            max_depth=self._level,
            shared_ancestors=ancestors,
            counted=tokens.numel(),
        ).only(self._drafting)
