"""The walk: which tokens a verification pass commits.

Sample at the root; while a child carries the token that was sampled, move there and sample again. What is
emitted is what plain decoding would have sampled, whatever the tree. For a given set of children this
accepts as often as any lossless rule can: with the target's probability of the children.

Shapes: B rows, N nodes, D the tree's greatest depth, V vocabulary. A "place" counts the root as 0 and node
i as i + 1; place N + 1 is off the tree, where finished rows wait.
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
    """The outcome of a round for each row: `accepted + 1` tokens."""

    tokens: Tensor  # [B, D + 1] emitted tokens, -1 past the end
    path: Tensor  # [B, D + 1] places whose logits gave the tokens = committed positions; 0 past the end
    accepted: Tensor  # [B] number of draft tokens among them

    @staticmethod
    def of(places: Tensor, tokens: Tensor, nodes: int) -> Walk:
        """From `places` [B, D + 1] (past `nodes` = off the tree) and the `tokens` [B, D + 1] chosen there."""
        alive = places <= nodes
        return Walk(tokens.masked_fill(~alive, -1), places.masked_fill(~alive, 0), alive.sum(dim=1) - 1)


class WalkRule(Protocol):
    """A rule of verification."""

    @property
    def lossless(self) -> bool:
        """Is the output distributed as plain sampling's?"""

    def __call__(self, logits: NodeLogits, tree: DraftTree, sampler: Sampler, rows: range) -> Walk:
        """Judge `tree` by the target's `logits` of its root and nodes."""


class SeededWalk:
    """The default: exactly the tokens that plain decoding with the same seeds emits."""

    lossless = True

    def __call__(self, logits: NodeLogits, tree: DraftTree, sampler: Sampler, rows: range) -> Walk:
        if sampler.needs(rows).plain:
            return _greedy(logits.best(), tree)
        return _sampled(logits, tree, sampler, rows)


def _sampled(logits: NodeLogits, tree: DraftTree, sampler: Sampler, rows: range) -> Walk:
    """Sample at the places walked, and only there."""
    path = sampler.path(rows, tree.max_depth + 1)
    vocab_size = logits.vocab_size
    # one number says "this token below that place": (place of the parent) * V + token
    names = torch.add(tree.tokens, tree.parents + 1, alpha=vocab_size).masked_fill_(~tree.valid, -1)  # [B, N]
    place = logits.index.new_zeros(len(rows))  # [B]
    places, tokens = [place], [path.sample(logits.at(place))]
    for _ in range(tree.max_depth):
        path.advance(tokens[-1])
        name = torch.add(tokens[-1], place, alpha=vocab_size)
        found, child = (names == name.unsqueeze(1)).max(dim=1)
        place = torch.where(found, child + 1, tree.size + 1)
        places.append(place)
        tokens.append(path.sample(logits.at(place)))
    return Walk.of(torch.stack(places, dim=1), torch.stack(tokens, dim=1), tree.size)


def _greedy(best: Tensor, tree: DraftTree) -> Walk:
    """The same for rows whose token at a place is `best` [B, 1 + N] however the place was reached."""
    off = tree.size + 1
    parents = tree.parents + 1  # [B, N] places
    places = torch.arange(1, off, device=best.device)
    follows = (tree.tokens == best.gather(1, parents)) & tree.valid
    # the place after each place; the first of twins
    after = torch.full((best.shape[0], off + 1), off, dtype=torch.int64, device=best.device)
    after.scatter_reduce_(1, parents, torch.where(follows, places, off), "amin")
    walked = [torch.zeros_like(after[:, :1])]
    for _ in range(tree.max_depth):
        walked.append(after.gather(1, walked[-1]))
    path = torch.cat(walked, dim=1)  # [B, D + 1]
    return Walk.of(path, best.gather(1, path.clamp(max=tree.size)), tree.size)


# Typical acceptance: LOSSY. It trades the target's distribution for longer accepted drafts.
#
# Medusa's rule (arXiv 2401.10774): a draft token is good enough when the target finds it not too improbable, p(x) >
# min(epsilon, delta * exp(-H(p))), whether or not the target would have sampled it. The threshold sinks where the
# target is unsure. Probable tokens that are drafted are emitted more often than p says, and at temperature 0 a token
# that is not the best may be emitted: outputs differ from plain decoding's, so this is never the default.
#
# p is the target's distribution after penalties, temperature and filters. A greedy row has no temperature: there p is
# the distribution at temperature 1, unfiltered, and the closing token is the argmax.
#
# Shapes: B rows, N nodes, D the tree's greatest depth, V vocabulary; places as in `walk`.


class TypicalWalk:
    """Moves to the most probable acceptable child; where there is none, samples the last token."""

    lossless = False

    def __init__(self, epsilon: float = 0.09, delta: float = 0.3) -> None:
        if not (0.0 <= epsilon <= 1.0 and delta >= 0.0):
            raise UsageError(f"typical acceptance: epsilon {epsilon} must be in [0, 1], delta {delta} at least 0")
        self.epsilon = epsilon
        self.delta = delta

    def __call__(self, logits: NodeLogits, tree: DraftTree, sampler: Sampler, rows: range) -> Walk:
        path = sampler.path(rows, tree.max_depth + 1)
        row = torch.arange(len(rows), device=logits.index.device)
        place = torch.zeros_like(row)  # [B]
        places, tokens = [place], []
        for _ in range(tree.max_depth):
            warped = path.warped(logits.at(place))  # [B, V]
            found, child = self._best_child(warped, tree, place)
            tokens.append(torch.where(found, tree.tokens[row, child], path.choose(warped)))
            path.advance(tokens[-1])
            place = torch.where(found, child + 1, tree.size + 1)
            places.append(place)
        tokens.append(path.sample(logits.at(place)))
        return Walk.of(torch.stack(places, dim=1), torch.stack(tokens, dim=1), tree.size)

    def _best_child(self, warped: Tensor, tree: DraftTree, place: Tensor) -> tuple[Tensor, Tensor]:
        """Is there an acceptable child of `place` [B], and which node is the most probable: two [B]."""
        probs = warped.softmax(dim=-1)
        entropy = torch.special.entr(probs).sum(dim=-1, keepdim=True)
        threshold = (self.delta * torch.exp(-entropy)).clamp(max=self.epsilon)  # [B, 1]
        drafted = probs.gather(1, tree.tokens)  # [B, N]
        good = (drafted > threshold) & tree.valid & (tree.parents + 1 == place.unsqueeze(1))
        best, child = drafted.masked_fill(~good, -1.0).max(dim=1)
        return best >= 0, child
