"""One tree from two sources: guesses of a drafter's network, and continuations found on the host, such as copies.

Nodes with the same token path are one node. A step's value is the rate at which steps of its source and probability
were accepted (`ValueTable`), a path's value the product of its steps'. The most valuable nodes of both trees are kept:
as many as the trees' shape allows, or as pay at its prices. An accelerator computes this in tensors, without a sync; a
host in lists, because a PyTorch operation takes longer than a dozen nodes.

Shapes: B rows, N nodes of the network's tree, L found nodes, C = N + L, D levels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.tree.acceptance import GROUPS
from eyas.tree.draft_tree import DraftTree, Source, TreeSpec
from eyas.tree.values import ValueTable

_LEAST_STEP = -1e-6
"""Upper bound on a step's logarithm, so that a child is worth less than its parent despite rounding."""


def unite(
    spec: TreeSpec, network: DraftTree | None, found: DraftTree, values: ValueTable | None, groups: Tensor
) -> DraftTree:
    """Keep the best nodes of the `network`'s trees (None = it drafted nothing) and of the `found` ones, within `spec`.

    Without `values`, steps are worth their probability; `groups` [B] are the rows' groups in them. For shapes with one
    child per node, each row gets the more valuable of its two chains.
    """
    if found.tokens.device.type == "cpu":
        return _united_on_host(spec, network, found, values, groups)
    merged = _tagged(found) if network is None or not network.size else _merged(network, found)
    scores = path_values(merged, values, groups)  # [B, C]
    allowed = merged.valid
    if spec.max_fanout == 1:
        allowed = _better_chain(merged, scores)
    kept, most = spec.keep(scores, allowed), min(spec.max_nodes, merged.size)
    return replace(
        merged.keeping(kept, most, None),
        candidates=None if network is None else network.candidates,
        levels=0 if network is None else network.levels,
        looked_up=network is None,
    )


def path_values(tree: DraftTree, values: ValueTable | None, groups: Tensor) -> Tensor:
    """[B, C] logarithms of the values of paths to a tree's nodes, as float64; `groups` [B] of the rows."""
    return (_path_values_on_host if tree.tokens.device.type == "cpu" else _path_values)(tree, values, groups)


def _path_values(tree: DraftTree, values: ValueTable | None, groups: Tensor) -> Tensor:
    above = F.pad(tree.logprob, (1, 0)).gather(1, tree.parents + 1)
    steps = tree.logprob - above
    if values is not None:
        sources = torch.zeros_like(tree.tokens) if tree.sources is None else tree.sources
        alike = (tree.parents.unsqueeze(2) == tree.parents.unsqueeze(1)) & tree.valid.unsqueeze(1)  # [B, C, C]
        alike &= sources.unsqueeze(2) == sources.unsqueeze(1)
        later = alike.tril(-1).any(2)  # some valid sibling of the same source comes before it
        steps = values.of_nodes(steps, later, groups.unsqueeze(1) + GROUPS * sources)
    steps = steps.double().clamp(max=_LEAST_STEP).masked_fill(~tree.valid, 0.0)
    return _along_paths(tree, steps)


def _path_values_on_host(tree: DraftTree, values: ValueTable | None, groups: Tensor) -> Tensor:
    """`path_values` by lists of numbers."""
    sources = [[0] * tree.size] * len(tree.tokens) if tree.sources is None else tree.sources.tolist()
    rows = _Rows([], tree.parents.tolist(), tree.logprob.tolist(), tree.valid.tolist(), sources)
    return torch.from_numpy(rows.worth(values, groups).reshape(tree.tokens.shape))


class _Rows(NamedTuple):
    """Trees on the host: for each row, lists with an entry for each node."""

    tokens: list[list[int]]
    parents: list[list[int]]
    logprob: list[list[float]]
    valid: list[list[bool]]
    sources: list[list[int]]

    @classmethod
    def of(cls, network: DraftTree | None, found: DraftTree) -> _Rows:
        """`_merged`, row by row: a found node is already known if its parent has a child with the same token."""
        theirs = [part.tolist() for part in (found.tokens, found.parents, found.logprob, found.valid)]
        if network is None or not network.size:
            tokens, parents, logprob, valid = theirs
            return cls(tokens, parents, logprob, valid, [[int(Source.LOOKUP)] * found.size for _ in tokens])
        ours = [part.tolist() for part in (network.tokens, network.parents, network.logprob, network.valid)]
        pairs = zip(zip(*ours, strict=True), zip(*theirs, strict=True), strict=True)
        tokens, parents, logprob, valid, sources = map(list, zip(*(_merged_row(*pair) for pair in pairs), strict=True))
        return cls(tokens, parents, logprob, valid, sources)

    def worth(
        self, values: ValueTable | None, groups: Tensor, calibrations: Sequence[float] | None = None
    ) -> npt.NDArray[np.float64]:
        """[B, C] `path_values`: step values are looked up together and summed node by node.

        `calibrations` [B] count on paths once they leave what was found, and no node is worth more than its parent.
        """
        logprob, valid = np.array(self.logprob, np.float32), np.array(self.valid, np.bool_)
        above = np.array(
            [
                [row[at] if at >= 0 else 0.0 for at in over]
                for row, over in zip(self.logprob, self.parents, strict=True)
            ],
            np.float32,
        )
        steps = np.minimum(logprob - above, np.float32(0.0))  # in float32: another precision may give another bin
        if values is not None:
            later = []
            for usable, over, sources in zip(self.valid, self.parents, self.sources, strict=True):
                begun = set[tuple[int, int]]()
                for known, family in zip(usable, zip(over, sources, strict=True), strict=True):
                    later.append(family in begun)
                    if known:
                        begun.add(family)
            of_rows = groups.numpy()[:, None] + GROUPS * np.array(self.sources)
            steps = values.on_host(steps, np.array(later).reshape(steps.shape), of_rows)
        sums: list[list[float]] = np.where(valid, np.minimum(steps, _LEAST_STEP, dtype=np.float64), 0.0).tolist()
        shifts = [0.0] * len(sums) if calibrations is None else list(map(math.log, calibrations))
        for own, over, kinds, shift in zip(sums, self.parents, self.sources, shifts, strict=True):
            for node, parent in enumerate(over):
                worth, found = (own[parent], kinds[parent] != Source.NETWORK) if parent >= 0 else (0.0, True)
                leaves = found and kinds[node] == Source.NETWORK
                own[node] = min(worth, worth + own[node] + (shift if leaves else 0.0))
        return np.array(sums, np.float64)

    def tree(self, max_depth: int) -> DraftTree:
        """The trees as tensors, none deeper than `max_depth`."""
        kinds = (torch.int64, torch.int64, torch.float32, torch.bool, torch.int64)
        made = (torch.tensor(lists, dtype=kind) for lists, kind in zip(self, kinds, strict=True))
        tokens, parents, logprob, valid, sources = made
        return DraftTree(tokens, parents, logprob, valid, max_depth=max_depth, sources=sources)

    def keeping(self, kept: npt.NDArray[np.bool_]) -> tuple[_Rows, int]:
        """Only the `kept` [B, C] nodes, in order, and their number."""
        chosen = [np.flatnonzero(row).tolist() for row in kept]
        width, made = max(map(len, chosen)), _Rows([], [], [], [], [])
        for row, nodes in enumerate(chosen):
            spare = width - len(nodes)
            column = {node: at for at, node in enumerate(nodes)}
            for name, blank in (("tokens", 0), ("logprob", 0.0), ("sources", 0)):
                given = getattr(self, name)[row]
                getattr(made, name).append([*(given[node] for node in nodes), *[blank] * spare])
            over = self.parents[row]
            made.parents.append([*(column.get(over[node], -1) for node in nodes), *[-1] * spare])
            made.valid.append([True] * len(nodes) + [False] * spare)
        return made, sum(map(len, chosen))


def _united_on_host(
    spec: TreeSpec, network: DraftTree | None, found: DraftTree, values: ValueTable | None, groups: Tensor
) -> DraftTree:
    """`unite` in lists and NumPy: between two passes each operation of PyTorch takes as long as a dozen nodes."""
    rows, depth = _Rows.of(network, found), max(found.max_depth, 0 if network is None else network.max_depth)
    worth = rows.worth(values, groups, spec.calibrations)
    scores, allowed = torch.from_numpy(worth), torch.tensor(rows.valid)
    if spec.max_fanout == 1:
        allowed = _better_chain(rows.tree(depth), scores)
    kept = spec.keep(scores, allowed).numpy()
    made, counted = rows.keeping(kept)
    sources, value = np.array(rows.sources), np.exp(worth) * kept
    copied = sources == Source.LOOKUP
    own = np.where(sources == Source.NETWORK, np.array(spec.calibrations or 1.0).reshape(-1, 1), 1.0)  # [B, C]
    return replace(
        made.tree(min(depth, len(made.tokens[0]))),
        counted=counted,
        candidates=None if network is None else network.candidates,
        levels=0 if network is None else network.levels,
        looked_up=network is None,
        copies_promise=float(value[copied].sum()),
        promise=(value / own * ~copied).sum(axis=1).tolist(),
    )


def _merged_row(network: Sequence[list[Any]], found: Sequence[list[Any]]) -> tuple[list[Any], ...]:
    """A row of `_merged`: tokens, parents, logprob, valid, sources; each argument has the first four."""
    tokens, parents, scores, valid = map(list, network)
    steps = [score - (scores[parent] if parent >= 0 else 0.0) for score, parent in zip(scores, parents, strict=True)]
    at = dict[tuple[int, int], int]()
    for node, (token, parent, usable) in enumerate(zip(tokens, parents, valid, strict=True)):
        if usable:
            at.setdefault((parent, token), node)
    sources, columns = [0] * len(tokens), list[int]()
    for token, above, score, usable in zip(*found, strict=True):
        parent, step = (columns[above], score - found[2][above]) if above >= 0 else (-1, score)
        known = at.get((parent, token)) if usable else None
        columns.append(len(tokens) if known is None else known)
        if known is not None:  # a node of both takes the higher of its two probabilities
            steps[known], sources[known] = max(steps[known], step), int(Source.BOTH)
        tokens.append(token)
        parents.append(parent)
        steps.append(step)
        valid.append(usable and known is None)
        sources.append(int(Source.LOOKUP))
    sums = list[float]()
    for parent, step, usable in zip(parents, steps, valid, strict=True):
        sums.append((sums[parent] if parent >= 0 else 0.0) + (step if usable else 0.0))
    return tokens, parents, sums, valid, sources


def _along_paths(tree: DraftTree, steps: Tensor) -> Tensor:
    """[B, C] the sum of `steps` [B, C] on the path to each node."""
    return (tree.ancestors[:, 1:, 1:].to(steps.dtype) @ steps.unsqueeze(2)).squeeze(2)


def _tagged(found: DraftTree) -> DraftTree:
    return replace(found, sources=torch.full_like(found.tokens, Source.LOOKUP))


def _merged(network: DraftTree, found: DraftTree) -> DraftTree:
    """Both trees side by side, the network's nodes first; found nodes that the network has too are invalid."""
    depth = max(network.max_depth, found.max_depth)
    same = (_paths(found, depth).unsqueeze(2) == _paths(network, depth).unsqueeze(1)).all(3)  # [B, L, N]
    same &= found.valid.unsqueeze(2) & network.valid.unsqueeze(1)
    known, both = same.any(2), same.any(1)  # [B, L], [B, N]
    nodes = torch.arange(found.size, device=found.tokens.device) + network.size
    column = torch.where(known, same.to(torch.uint8).argmax(2), nodes)  # [B, L] where each found node is now
    parents = torch.cat((network.parents, F.pad(column, (1, 0), value=-1).gather(1, found.parents + 1)), dim=1)
    tree = DraftTree(
        tokens=torch.cat((network.tokens, found.tokens), dim=1),
        parents=parents,
        logprob=torch.cat((network.logprob, found.logprob), dim=1),
        valid=torch.cat((network.valid, found.valid & ~known), dim=1),
        max_depth=depth,
        sources=torch.cat((both * int(Source.BOTH), torch.full_like(found.tokens, Source.LOOKUP)), dim=1),
    )
    # a node of both takes the higher of its two probabilities
    theirs = _steps(found).unsqueeze(2).masked_fill(~same, -math.inf).amax(1)  # [B, N]
    steps = torch.cat((torch.maximum(_steps(network), theirs), _steps(found)), dim=1)
    return replace(tree, logprob=_along_paths(tree, steps.double().masked_fill(~tree.valid, 0.0)).to(torch.float32))


def _steps(tree: DraftTree) -> Tensor:
    """[B, N] log-probabilities of the steps to a tree's nodes."""
    return tree.logprob - F.pad(tree.logprob, (1, 0)).gather(1, tree.parents + 1)


def _paths(tree: DraftTree, depth: int) -> Tensor:
    """[B, N, D] the tokens on the path to each node, by level; -1 past its end."""
    levels = tree.depth[:, 1:].unsqueeze(2) == torch.arange(1, depth + 1, device=tree.tokens.device)  # [B, N, D]
    # integers, exact in float64, a type in which accelerators can multiply matrices
    numbers = levels.double() * (tree.tokens + 1).unsqueeze(2)
    return tree.ancestors[:, 1:, 1:].double() @ numbers - 1.0


def _better_chain(tree: DraftTree, scores: Tensor) -> Tensor:
    """[B, C] bool: the nodes of each row's more valuable chain, given logarithms of path values."""
    values = scores.exp().masked_fill(~tree.valid, 0.0)
    assert tree.sources is not None
    found = tree.sources == int(Source.LOOKUP)
    shared = tree.sources == int(Source.BOTH)
    copies = (values * found).sum(1) > (values * ~(found | shared)).sum(1)  # [B]
    return tree.valid & (shared | (found == copies.unsqueeze(1)))
