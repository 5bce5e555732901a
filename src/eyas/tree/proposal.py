"""Continuations that were found on the host, such as a copied passage, as draft trees of any shape.

Shapes: B rows, W frontier nodes, K children wanted of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, zip_longest

import torch
from torch import Tensor

from eyas.tree.draft_tree import DraftTree, Lookup, Proposal, TreeSpec
from eyas.tree.dynamic import BeamGrowth
from eyas.tree.shared import HostGrowth
from eyas.tree.union import unite

_ABSENT = -1e4
"""The log-probability of children that don't exist, where a shape wants more than there are."""


def grow(spec: TreeSpec, proposals: Sequence[Proposal], device: torch.device) -> DraftTree:
    """Grow trees of the shape `spec` from the nodes of the proposals [B] only; an empty proposal gives no nodes.

    They are grown on the host, where the proposals are, and copied to `device` when they are complete.
    """
    if not any(proposal.tokens for proposal in proposals):
        return replace(DraftTree.empty(len(proposals), device), lookup=Lookup(alone=True, proposals=proposals))
    levels = [proposal.levels(spec.depth) for proposal in proposals]
    sizes = [len(nodes) for row in levels for nodes in row]
    if spec.found_only:
        groups = torch.tensor(spec.groups or (0,) * len(proposals))
        tree = unite(spec, None, found_tree(proposals, spec.max_fanout == 1), spec.values, groups)
    elif spec.is_chain:
        tree = _subtrees([best_path(proposal, spec.depth) for proposal in proposals], proposals)
    elif max(sizes) <= spec.beam:  # a beam search would reach every node
        if spec.fits_all([sum(map(len, row)) for row in levels]):
            tree = _subtrees([list(chain.from_iterable(row)) for row in levels], proposals)
        else:
            tree = _grown_at_once(spec, proposals, levels)
    else:
        tree = _grown(spec, proposals)
    lookup = Lookup(alone=True, proposals=proposals, predicted=predicted_rows(proposals))
    return replace(on_device(tree, device), lookup=lookup)


def predicted_rows(proposals: Sequence[Proposal]) -> list[bool]:
    """[B] which rows' proposals come from their requests' predictions; empty = no row's."""
    rows = [proposal.predicted for proposal in proposals]
    return rows if any(rows) else []


def found_tree(proposals: Sequence[Proposal], chains: bool) -> DraftTree:
    """Trees on the host with all nodes of the proposals [B]; with `chains`, only their paths of best children."""
    every = [range(len(proposal.tokens)) for proposal in proposals]
    kept = [best_path(one, len(nodes)) for one, nodes in zip(proposals, every, strict=True)] if chains else every
    return _subtrees(kept, proposals)


def on_device(tree: DraftTree, device: torch.device) -> DraftTree:
    """Copy a tree that was made on the host to `device`; its number of nodes stays known."""
    if device.type == "cpu":
        return tree
    tokens, parents, logprob, valid = (
        part.to(device, non_blocking=True) for part in (tree.tokens, tree.parents, tree.logprob, tree.valid)
    )
    sources = None if tree.sources is None else tree.sources.to(device, non_blocking=True)
    counted = int(tree.valid.sum())
    return replace(
        tree,
        tokens=tokens,
        parents=parents,
        logprob=logprob,
        valid=valid,
        sources=sources,
        counted=counted,
        shared_ancestors=None,
    )


def best_path(proposal: Proposal, depth: int) -> list[int]:
    """The path of best children, at most `depth` long."""
    path: list[int] = []
    node = -1
    children = proposal.children()
    while children[node + 1] and len(path) < depth:
        node = children[node + 1][0]
        path.append(node)
    return path


def _subtrees(kept: Sequence[Sequence[int]], proposals: Sequence[Proposal]) -> DraftTree:
    """Trees with the nodes `kept` [B] of each proposal, parents before children."""
    width = max(map(len, kept))
    deepest = 0
    tokens, parents = [[0] * width for _ in kept], [[-1] * width for _ in kept]
    logprobs, valid = [[0.0] * width for _ in kept], [[False] * width for _ in kept]
    for row, (nodes, proposal) in enumerate(zip(kept, proposals, strict=True)):
        reached = {-1: (-1, 0.0, 0)}  # node -> its column, its path's log-probability and its depth
        for column, node in enumerate(nodes):
            above, logprob, depth = reached[proposal.parents[node]]
            logprob, depth = logprob + proposal.logprobs[node], depth + 1
            reached[node] = column, logprob, depth
            tokens[row][column] = proposal.tokens[node]
            parents[row][column] = above
            logprobs[row][column] = logprob
            valid[row][column] = True
            deepest = max(deepest, depth)
    t = torch.tensor
    return DraftTree(t(tokens), t(parents), t(logprobs), t(valid), deepest, counted=sum(map(len, kept)))


def _grown_at_once(
    spec: TreeSpec, proposals: Sequence[Proposal], levels: Sequence[Sequence[Sequence[int]]]
) -> DraftTree:
    """Like `_grown` if all nodes are candidates, but without tensors for every level."""
    sizes = [max(map(len, rows)) for rows in zip_longest(*levels, fillvalue=())]
    count = sum(sizes)
    tokens, parents = [[-1] * count for _ in proposals], [[-1] * count for _ in proposals]
    steps, later = [[_ABSENT] * count for _ in proposals], [[False] * count for _ in proposals]
    for row, (proposal, of_row) in enumerate(zip(proposals, levels, strict=True)):
        columns = {-1: -1}
        begun = set[int]()
        start = 0
        for size, nodes in zip(sizes, of_row, strict=False):
            for column, node in enumerate(nodes, start):
                parent = columns[proposal.parents[node]]
                columns[node] = column
                tokens[row][column] = proposal.tokens[node]
                parents[row][column] = parent
                steps[row][column] = proposal.logprobs[node]
                later[row][column] = parent in begun
                begun.add(parent)
            start += size
    growth = spec.start(len(proposals), torch.device("cpu"), [bool(proposal.tokens) for proposal in proposals])
    assert isinstance(growth, BeamGrowth | HostGrowth)
    growth.expand_all(sizes, tokens, parents, steps, later)
    return _without_absent(growth.tree())


def _grown(spec: TreeSpec, proposals: Sequence[Proposal]) -> DraftTree:
    """Grow the trees level by level; children that a proposal lacks are removed again."""
    children = [proposal.children() for proposal in proposals]
    growth = spec.start(len(proposals), torch.device("cpu"), [bool(proposal.tokens) for proposal in proposals])
    nodes: list[list[int | None]] = [[-1] for _ in proposals]  # the frontier [B][W]; None = absent
    for _ in range(spec.depth):
        offered = [
            [[] if node is None else below[node + 1][: growth.fanout] for node in row]
            for row, below in zip(nodes, children, strict=True)
        ]
        frontier = growth.expand(*_tensors(offered, proposals, growth.fanout))
        if frontier is None:
            break
        nodes = [
            [_chosen(found[parent], proposal.tokens, token) for token, parent in zip(*chosen, strict=True)]
            for found, proposal, *chosen in zip(
                offered, proposals, frontier.tokens.tolist(), frontier.parents.tolist(), strict=True
            )
        ]
    return _without_absent(growth.tree())


def _without_absent(tree: DraftTree) -> DraftTree:
    """A tree that was grown with absent children, without them."""
    valid = tree.valid & (tree.logprob > _ABSENT / 2)
    return replace(tree, valid=valid, counted=None, shared_ancestors=None).compact()


def _tensors(offered: list[list[list[int]]], proposals: Sequence[Proposal], fanout: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities and tokens [B, W, K] of the `offered` nodes [B][W], padded with absent ones."""
    logprobs, tokens = [], []
    for proposal, row in zip(proposals, offered, strict=True):
        for found in row:
            missing = fanout - len(found)
            logprobs.append([*(proposal.logprobs[node] for node in found), *[_ABSENT] * missing])
            tokens.append([*(proposal.tokens[node] for node in found), *[-1] * missing])
    shape = (len(proposals), len(offered[0]), fanout)
    return torch.tensor(logprobs).view(shape), torch.tensor(tokens).view(shape)


def _chosen(found: list[int], tokens: list[int], token: int) -> int | None:
    """The sibling with the given token; None if there is none."""
    return next((node for node in found if tokens[node] == token), None)
