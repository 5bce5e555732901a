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
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.runtime import to_device
from eyas.tree.acceptance import GROUPS
from eyas.tree.draft_tree import DraftTree, Lookup, NetworkDraft, Source, TreeSpec, all_valid
from eyas.tree.values import ValueTable

_COPY_SOURCES = frozenset((Source.LOOKUP, Source.DISPUTED))
"""The sources of nodes that the network didn't guess."""
_MAX_STEP = -1e-6
"""Upper bound on a step's logarithm, so that a child is worth less than its parent despite rounding."""


def unite(
    spec: TreeSpec, network: DraftTree | None, copies: DraftTree, values: ValueTable | None, groups: Tensor
) -> DraftTree:
    """Keep the best nodes of the `network`'s trees (None = it drafted nothing) and of the `copies`, within `spec`.

    Without `values`, steps are worth their probability; `groups` [B] are the rows' groups in them. For shapes with one
    child per node, each row gets the more valuable of its two chains.
    """
    if copies.tokens.device.type == "cpu":
        return _united_on_host(spec, network, copies, values, groups)
    merged = _tagged(copies) if network is None or not network.size else _merged(network, copies)
    scores = _path_values(merged, values, groups, spec.copy_exponents)  # [B, C]
    allowed = merged.valid
    if spec.max_fanout == 1:
        allowed = _better_chain(merged, scores)
    kept = spec.keep(scores, allowed)
    most = min(spec.max_nodes, merged.size)
    computed = NetworkDraft() if network is None else network.network
    return replace(merged.keeping(kept, most, None), network=computed, lookup=Lookup(alone=network is None))


def path_values(tree: DraftTree, values: ValueTable | None, groups: Tensor) -> Tensor:
    """[B, C] logarithms of the values of paths to a tree's nodes, as float64; `groups` [B] of the rows."""
    if tree.tokens.device.type != "cpu":
        return _path_values(tree, values, groups)
    return torch.tensor(_Rows.of_tree(tree).worth(values, groups), dtype=torch.float64).view(tree.tokens.shape)


def expected_levels(
    copies: DraftTree, values: ValueTable | None, groups: Tensor, exponents: Sequence[float] | None = None
) -> list[list[float]]:
    """[B][levels] how likely each row's tree of `copies`, which is on the host, is right down to each level."""
    rows = _Rows.of(None, copies)
    made = []
    for parents, valid, worth in zip(
        rows.parents, rows.valid, rows.worth(values, groups, None, exponents), strict=True
    ):
        levels = list[float]()
        depth = list[int]()
        for parent, usable, value in zip(parents, valid, worth, strict=True):
            depth.append(depth[parent] + 1 if parent >= 0 else 0)
            if depth[-1] == len(levels):
                levels.append(0.0)
            levels[depth[-1]] += math.exp(value) * usable
        made.append([min(level, 1.0) for level in levels])
    return made


def _path_values(
    tree: DraftTree, values: ValueTable | None, groups: Tensor, exponents: Sequence[float] | None = None
) -> Tensor:
    above = F.pad(tree.logprob, (1, 0)).gather(1, tree.parents + 1)
    steps = tree.logprob - above
    if values is not None:
        sources = torch.zeros_like(tree.tokens) if tree.sources is None else tree.sources
        alike = (tree.parents.unsqueeze(2) == tree.parents.unsqueeze(1)) & tree.valid.unsqueeze(1)  # [B, C, C]
        alike &= sources.unsqueeze(2) == sources.unsqueeze(1)
        later = alike.tril(-1).any(2)  # some valid sibling of the same source comes before it
        steps = values.of_nodes(steps, later, groups.unsqueeze(1) + GROUPS * sources)
    if exponents is not None and tree.sources is not None:
        powers = to_device(list(exponents), steps.device, steps.dtype).unsqueeze(1)
        steps = torch.where(_copied(tree.sources), steps * powers, steps)
    steps = steps.double().clamp(max=_MAX_STEP).masked_fill(~tree.valid, 0.0)
    return _along_paths(tree, steps)


class _Rows(NamedTuple):
    """Trees on the host: for each row, lists with an entry for each node."""

    tokens: list[list[int]]
    parents: list[list[int]]
    steps: list[list[float]]
    """Log-probabilities of the steps to the nodes, not of the paths."""
    valid: list[list[bool]]
    sources: list[list[int]]

    @classmethod
    def of_tree(cls, tree: DraftTree, source: int = Source.NETWORK) -> _Rows:
        """The rows of a tree, whose nodes come from `source` unless it says so itself."""
        tokens, parents, logprob, valid = (
            part.tolist() for part in (tree.tokens, tree.parents, tree.logprob, tree.valid)
        )
        sources = [[int(source)] * tree.size for _ in tokens] if tree.sources is None else tree.sources.tolist()
        steps = [
            [score - (scores[parent] if parent >= 0 else 0.0) for score, parent in zip(scores, above, strict=True)]
            for scores, above in zip(logprob, parents, strict=True)
        ]
        return cls(tokens, parents, steps, valid, sources)

    @classmethod
    def of(cls, network: DraftTree | None, copies: DraftTree) -> _Rows:
        """`_merged`, row by row: a found node is already known if its parent has a child with the same token."""
        theirs = cls.of_tree(copies, Source.LOOKUP)
        if network is None or not network.size:
            return theirs
        made = cls.of_tree(network)
        for tokens, parents, steps, valid, sources, *copied in zip(*made, *theirs, strict=True):
            at = dict[tuple[int, int], int]()
            for node, (token, parent, usable) in enumerate(zip(tokens, parents, valid, strict=True)):
                if usable:
                    at.setdefault((parent, token), node)
            columns = list[int]()
            guessed = {parent for parent, usable in zip(parents, valid, strict=True) if usable}
            for token, above, step, usable, source in zip(*copied, strict=True):
                parent = columns[above] if above >= 0 else -1
                known = at.get((parent, token)) if usable else None
                columns.append(len(tokens) if known is None else known)
                if known is not None:  # a node of both takes the higher of its two probabilities
                    steps[known] = max(steps[known], step)
                    sources[known] = int(Source.BOTH)
                tokens.append(token)
                parents.append(parent)
                steps.append(step)
                valid.append(usable and known is None)
                sources.append(int(Source.DISPUTED) if parent in guessed else source)
        return made

    def worth(
        self,
        values: ValueTable | None,
        groups: Tensor,
        calibrations: Sequence[float] | None = None,
        exponents: Sequence[float] | None = None,
    ) -> list[list[float]]:
        """[B][C] `path_values`.

        `calibrations` [B] count on paths once they leave what was found, and no node is worth more than its parent.
        """
        powers = [1.0] * len(self.tokens) if exponents is None else exponents
        shifts = [0.0] * len(self.tokens) if calibrations is None else list(map(math.log, calibrations))
        made = []
        for parents, steps, valid, sources, group, shift, power in zip(
            *self[1:], groups.tolist(), shifts, powers, strict=True
        ):
            sums = list[float]()
            begun = set[tuple[int, int]]()
            for parent, step, usable, source in zip(parents, steps, valid, sources, strict=True):
                own = min(step, 0.0)
                if values is not None:
                    own = values.of_step(own, (parent, source) in begun, group + GROUPS * source)
                if source in _COPY_SOURCES:
                    own *= power
                if usable:
                    begun.add((parent, source))
                worth, copied = (sums[parent], sources[parent] != Source.NETWORK) if parent >= 0 else (0.0, True)
                leaves = copied and source == Source.NETWORK
                own = min(own, _MAX_STEP) if usable else 0.0
                sums.append(min(worth, worth + own + (shift if leaves else 0.0)))
            made.append(sums)
        return made

    def better_chains(self, worth: Sequence[Sequence[float]]) -> list[list[bool]]:
        """[B][C] the nodes of each row's more valuable chain, given logarithms of path values, as `_better_chain`."""
        made = []
        for valid, sources, sums in zip(self.valid, self.sources, worth, strict=True):
            network = copies = 0.0
            for usable, source, value in zip(valid, sources, sums, strict=True):
                if usable and source in _COPY_SOURCES:
                    copies += math.exp(value)
                elif usable and source == Source.NETWORK:
                    network += math.exp(value)
            dropped = {Source.NETWORK} if copies > network else _COPY_SOURCES
            made.append([usable and source not in dropped for usable, source in zip(valid, sources, strict=True)])
        return made

    def tree(self, kept: Sequence[Sequence[bool]], max_depth: int) -> DraftTree:
        """Only the `kept` [B][C] nodes, in order, as tensors; no tree is deeper than `max_depth`."""
        chosen = [[node for node, wanted in enumerate(row) if wanted] for row in kept]
        width = max(map(len, chosen))
        counted = sum(map(len, chosen))
        numbers = list[list[list[int]]]()
        logprob = list[list[float]]()
        for nodes, tokens, parents, steps, sources in zip(
            chosen, self.tokens, self.parents, self.steps, self.sources, strict=True
        ):
            column = dict[int, int]()
            over = list[int]()
            sums = list[float]()
            spare = [0] * (width - len(nodes))
            for at, node in enumerate(nodes):
                above = column.get(parents[node], -1)
                column[node] = at
                over.append(above)
                sums.append(steps[node] + (sums[above] if above >= 0 else 0.0))
            own_tokens, own_sources = [tokens[node] for node in nodes], [sources[node] for node in nodes]
            numbers.append([[*own_tokens, *spare], [*over, *(-1 for _ in spare)], [*own_sources, *spare]])
            logprob.append([*sums, *map(float, spare)])
        its_tokens, its_parents, its_sources = torch.from_numpy(np.array(numbers, np.int64)).unbind(1)
        valid = all_valid(len(chosen), width)
        if counted < len(chosen) * width:
            valid = torch.tensor([[column < len(nodes) for column in range(width)] for nodes in chosen])
        return DraftTree(
            its_tokens,
            its_parents,
            torch.from_numpy(np.array(logprob, np.float32)),
            valid,
            max_depth=min(max_depth, width),
            sources=its_sources,
            counted=counted,
        )


def _united_on_host(
    spec: TreeSpec, network: DraftTree | None, copies: DraftTree, values: ValueTable | None, groups: Tensor
) -> DraftTree:
    """`unite` with lists, because between two passes a PyTorch operation takes as long as a dozen nodes."""
    rows = _Rows.of(network, copies)
    depth = max(copies.max_depth, 0 if network is None else network.max_depth)
    worth = rows.worth(values, groups, spec.calibrations, spec.copy_exponents)
    kept = spec.keep_on_host(worth, rows.better_chains(worth) if spec.max_fanout == 1 else rows.valid)
    promise = list[float]()
    for chosen, sources, sums, calibration in zip(
        kept, rows.sources, worth, spec.calibrations or [1.0] * len(kept), strict=True
    ):
        promise.append(0.0)
        for wanted, source, value in zip(chosen, sources, sums, strict=True):
            if wanted and source not in _COPY_SOURCES:
                promise[-1] += math.exp(value) / (calibration if source == Source.NETWORK else 1.0)
    computed = replace(NetworkDraft() if network is None else network.network, promise=promise)
    return replace(rows.tree(kept, depth), network=computed, lookup=Lookup(alone=network is None))


def _copied(sources: Tensor) -> Tensor:
    """Which nodes the network didn't guess."""
    return (sources == int(Source.LOOKUP)) | (sources == int(Source.DISPUTED))


def _along_paths(tree: DraftTree, steps: Tensor) -> Tensor:
    """[B, C] the sum of `steps` [B, C] on the path to each node."""
    return (tree.ancestors[:, 1:, 1:].to(steps.dtype) @ steps.unsqueeze(2)).squeeze(2)


def _tagged(copies: DraftTree) -> DraftTree:
    return replace(copies, sources=torch.full_like(copies.tokens, Source.LOOKUP))


def _merged(network: DraftTree, copies: DraftTree) -> DraftTree:
    """Both trees side by side, the network's nodes first; found nodes that the network has too are invalid."""
    depth = max(network.max_depth, copies.max_depth)
    same = (_paths(copies, depth).unsqueeze(2) == _paths(network, depth).unsqueeze(1)).all(3)  # [B, L, N]
    same &= copies.valid.unsqueeze(2) & network.valid.unsqueeze(1)
    # [B, L], [B, N]
    known = same.any(2)
    both = same.any(1)
    nodes = torch.arange(copies.size, device=copies.tokens.device) + network.size
    column = torch.where(known, same.to(torch.uint8).argmax(2), nodes)  # [B, L] where each found node is now
    parents = torch.cat((network.parents, F.pad(column, (1, 0), value=-1).gather(1, copies.parents + 1)), dim=1)
    # [B, L] whether the network has a node below the same parent
    contrary = (parents[:, network.size :].unsqueeze(2) == network.parents.unsqueeze(1)) & network.valid.unsqueeze(1)
    copied = torch.where(contrary.any(2), int(Source.DISPUTED), int(Source.LOOKUP))
    tree = DraftTree(
        tokens=torch.cat((network.tokens, copies.tokens), dim=1),
        parents=parents,
        logprob=torch.cat((network.logprob, copies.logprob), dim=1),
        valid=torch.cat((network.valid, copies.valid & ~known), dim=1),
        max_depth=depth,
        sources=torch.cat((both * int(Source.BOTH), copied), dim=1),
    )
    # a node of both takes the higher of its two probabilities
    theirs = _steps(copies).unsqueeze(2).masked_fill(~same, -math.inf).amax(1)  # [B, N]
    steps = torch.cat((torch.maximum(_steps(network), theirs), _steps(copies)), dim=1)
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
    copied = _copied(tree.sources)
    shared = tree.sources == int(Source.BOTH)
    copies = (values * copied).sum(1) > (values * ~(copied | shared)).sum(1)  # [B]
    return tree.valid & (shared | (copied == copies.unsqueeze(1)))
