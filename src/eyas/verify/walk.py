"""The walk: which tokens a verification pass commits, by the lossless rule or by typical acceptance.

Shapes: B rows, N nodes, D the tree's greatest depth, V vocabulary. A node index counts the root as 0 and node i as
i + 1; rows whose walk has ended wait off the tree, at index N + 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eyas.errors import UsageError
from eyas.tree import DraftTree, NodeLogits
from eyas.verify.sampler import Sampler


@dataclass(frozen=True)
class Walk:
    """The path walked through each row's tree and the `accepted + 1` tokens that it emits."""

    tokens: Tensor  # [B, D + 1] emitted tokens, -1 past the end
    path: Tensor  # [B, D + 1] node indexes whose logits gave the tokens, to be committed; 0 past the end
    accepted: Tensor  # [B] number of draft tokens among them

    @staticmethod
    def of(path: Tensor, tokens: Tensor, size: int) -> Walk:
        """From a `path` [B, D + 1] that may leave the tree of `size` nodes and the `tokens` [B, D + 1] chosen there."""
        inside = path <= size
        return Walk(tokens.masked_fill(~inside, -1), path.masked_fill(~inside, 0), inside.sum(dim=1) - 1)


class WalkRule(Protocol):
    """A rule by which verification accepts draft tokens."""

    @property
    def lossless(self) -> bool:
        """Whether the output has the distribution of plain sampling."""

    def __call__(self, logits: NodeLogits, tree: DraftTree, sampler: Sampler, rows: range) -> Walk:
        """Walk the trees of the slots `rows`, given the target's `logits` at their roots and nodes."""


class SeededWalk:
    """The lossless default: emits exactly the tokens that plain decoding with the same seeds emits.

    Sample at the root; while a child carries the token that was sampled, move there and sample again. For a given set
    of children this accepts as often as any lossless rule can: with the target's probability of the children.
    """

    lossless = True

    def __call__(self, logits: NodeLogits, tree: DraftTree, sampler: Sampler, rows: range) -> Walk:
        if sampler.needs(rows).plain:
            return _greedy_walk(logits.best(), tree)
        return _sampled_walk(logits, tree, sampler, rows)


def _sampled_walk(logits: NodeLogits, tree: DraftTree, sampler: Sampler, rows: range) -> Walk:
    """The walk of rows that are sampled: at the nodes walked, and only there."""
    state = sampler.path(rows, tree.max_depth + 1)
    vocab_size = logits.vocab_size
    # one number for "this token below that node": (index of the parent) * V + token
    keys = torch.add(tree.tokens, tree.parents + 1, alpha=vocab_size).masked_fill_(~tree.valid, -1)  # [B, N]
    node = logits.index.new_zeros(len(rows))  # [B]
    path, tokens = [node], [state.sample(logits.at(node))]
    for _ in range(tree.max_depth):
        state.advance(tokens[-1])
        key = torch.add(tokens[-1], node, alpha=vocab_size)
        found, child = (keys == key.unsqueeze(1)).max(dim=1)
        node = torch.where(found, child + 1, tree.size + 1)
        path.append(node)
        tokens.append(state.sample(logits.at(node)))
    return Walk.of(torch.stack(path, dim=1), torch.stack(tokens, dim=1), tree.size)


def _greedy_walk(best: Tensor, tree: DraftTree) -> Walk:
    """The walk of rows whose token at each node is `best` [B, 1 + N], however the node was reached."""
    off = tree.size + 1
    parents = tree.parents + 1  # [B, N] node indexes
    nodes = torch.arange(1, off, device=best.device)
    follows = (tree.tokens == best.gather(1, parents)) & tree.valid
    # [B, N + 2] the node after each node; of twins the first
    after = torch.full((best.shape[0], off + 1), off, dtype=torch.int64, device=best.device)
    after.scatter_reduce_(1, parents, torch.where(follows, nodes, off), "amin")
    walked = [torch.zeros_like(after[:, :1])]
    for _ in range(tree.max_depth):
        walked.append(after.gather(1, walked[-1]))
    path = torch.cat(walked, dim=1)  # [B, D + 1]
    return Walk.of(path, best.gather(1, path.clamp(max=tree.size)), tree.size)


class TypicalWalk:
    """Typical acceptance, a LOSSY rule: it trades the target's distribution for longer accepted drafts.

    Medusa's rule (arXiv 2401.10774): a draft token is acceptable where the target finds it not too improbable, p(x) >
    min(epsilon, delta * exp(-H(p))), whether or not the target would have sampled it. The threshold sinks where the
    target is unsure. The walk moves to the most probable acceptable child; where there is none, it samples the last
    token. Probable tokens that are drafted are emitted more often than p says, and at temperature 0 a token that is not
    the best may be emitted: outputs differ from plain decoding's, so this is never the default.

    p is the target's distribution after penalties, temperature and filters. A greedy row has no temperature: there p is
    the distribution at temperature 1, unfiltered, and the closing token is the argmax.
    """

    lossless = False

    def __init__(self, epsilon: float = 0.09, delta: float = 0.3) -> None:
        if not (0.0 <= epsilon <= 1.0 and delta >= 0.0):
            raise UsageError(f"typical acceptance: epsilon {epsilon} must be in [0, 1], delta {delta} at least 0")
        self.epsilon = epsilon
        self.delta = delta

    def __call__(self, logits: NodeLogits, tree: DraftTree, sampler: Sampler, rows: range) -> Walk:
        state = sampler.path(rows, tree.max_depth + 1)
        row = torch.arange(len(rows), device=logits.index.device)
        node = torch.zeros_like(row)  # [B]
        path, tokens = [node], []
        for _ in range(tree.max_depth):
            warped = state.warped(logits.at(node))  # [B, V]
            found, child = self._best_child(warped, tree, node)
            tokens.append(torch.where(found, tree.tokens[row, child], state.choose(warped)))
            state.advance(tokens[-1])
            node = torch.where(found, child + 1, tree.size + 1)
            path.append(node)
        tokens.append(state.sample(logits.at(node)))
        return Walk.of(torch.stack(path, dim=1), torch.stack(tokens, dim=1), tree.size)

    def _best_child(self, warped: Tensor, tree: DraftTree, node: Tensor) -> tuple[Tensor, Tensor]:
        """Whether `node` [B] has an acceptable child, and the tree column of the most probable one: two [B]."""
        probs = warped.softmax(dim=-1)
        entropy = torch.special.entr(probs).sum(dim=-1, keepdim=True)
        threshold = (self.delta * torch.exp(-entropy)).clamp(max=self.epsilon)  # [B, 1]
        drafted = probs.gather(1, tree.tokens)  # [B, N]
        good = (drafted > threshold) & tree.valid & (tree.parents + 1 == node.unsqueeze(1))
        best, child = drafted.masked_fill(~good, -1.0).max(dim=1)
        return best >= 0, child
