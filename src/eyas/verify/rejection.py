"""The classic rule of speculative sampling: accept a drawn token by p/q, else draw from what p has over q.

Leviathan et al. (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318): the drafter draws a token x from a distribution
q of its own; the target, whose distribution is p, accepts it with probability min(1, p(x) / q(x)), or else draws from
max(p - q, 0), normalised. The outcome is distributed as p. It isn't what plain decoding draws with the same seed.

Shapes: B rows, N nodes of a chain, W frontier nodes, V vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.errors import UsageError
from eyas.tree import DraftTree, Draws, NodeLogits
from eyas.verify.path import gumbel, keep_min_p, keep_top_k, keep_top_p
from eyas.verify.sampler import Coupling, Sampler
from eyas.verify.walk import SeededWalk, Walk

_DRAFT_STREAM, _ACCEPT_STREAM = 0x51ED270B2D5A9C33, 0x2545F4914F6CDD1D
"""Turn a request's seed into those of two further streams of noise, independent of the one it samples with."""


class IndependentDraws(Coupling):
    """Ranks children by draws from the drafter's own distribution, with noise of its own, and keeps the distributions.

    Temperature and filters are those of the request, as in the papers: q is made of the drafter's logits as p is of
    the target's. Draws are of chains only: one node a level.
    """

    def __init__(self, sampler: Sampler, rows: range) -> None:
        """For the drafts of the slots `rows`."""
        own = sampler.coupling(rows, True)
        super().__init__(own.state, own.needs, rows, True, own.legal)
        self._probs: list[Tensor] = []
        self._ids: Tensor | None = None

    def rank(self, logits: Tensor, steps_ahead: int, target_ids: Tensor | None) -> Tensor:
        state, rows, needs = self.state, self.rows, self.needs
        logits = self.warped(logits, steps_ahead, target_ids)
        shape, flat = logits.shape, logits[:, 0]
        if needs.top_k:
            flat = keep_top_k(flat, state.top_k[rows], needs.top_k)
        if needs.top_p:
            flat = keep_top_p(flat, state.top_p_cut[rows])
        if needs.min_p:
            flat = keep_min_p(flat, state.min_p[rows])
        scale = state.noise_scale[rows].unsqueeze(1)
        self._probs.append(distribution(flat, scale))
        self._ids = target_ids
        ids = state.token_ids if target_ids is None else target_ids
        noise = gumbel(state.seed[rows] ^ _DRAFT_STREAM, state.position[rows].unsqueeze(1) + steps_ahead, ids)[:, 0]
        return torch.addcmul(flat, noise, scale).log_softmax(dim=-1).view(shape)

    def kept(self, tree: DraftTree) -> DraftTree:
        """The tree with the distributions that its tokens were drawn from."""
        return replace(tree, draws=Draws(tuple(self._probs), self._ids, tree.valid)) if self._probs else tree


def distribution(logits: Tensor, noise_scale: Tensor) -> Tensor:
    """The probabilities [B, V] that a row's warped logits are sampled by: those of a greedy row are 1 at the best."""
    best = F.one_hot(logits.argmax(dim=-1), logits.shape[-1]).to(torch.float32)
    return torch.where(noise_scale > 0, logits.softmax(dim=-1), best)


class RejectionWalk:
    """Speculative sampling by rejection: LOSSLESS IN DISTRIBUTION, but not equal to plain decoding with the same seed.

    At temperature 0 it emits what plain decoding emits. It needs chains of fixed length, of a drafter that draws from a
    distribution: a tree of which nodes were left out because of what was drawn would bias the outcome.
    """

    lossless = True
    seeded = False

    def __call__(self, logits: NodeLogits, tree: DraftTree, sampler: Sampler, rows: range) -> Walk:
        if not sampler.needs(rows).noise or not tree.size:
            return SeededWalk()(logits, tree, sampler, rows)
        if tree.draws is None:
            raise UsageError(
                "the rejection rule needs the distributions that a chain was drawn from: this tree has none"
            )
        state, draws, size = sampler.path(rows, tree.max_depth + 1), tree.draws, tree.size
        uniform = self._uniform(sampler, rows, tree.max_depth)
        scale = sampler.state.noise_scale[rows.start : rows.stop].unsqueeze(1)
        node = logits.index.new_zeros(len(rows))  # [B]
        path, tokens = [node], []
        for level in range(tree.max_depth):
            warped = state.warped(logits.at(node))
            p, q = distribution(warped, scale), draws.at(level, logits.vocab_size)
            drawn, was_drawn = tree.tokens[:, level], draws.valid[:, level]
            p_drawn, q_drawn = (each.gather(1, drawn.unsqueeze(1)).squeeze(1) for each in (p, q))
            good = was_drawn & (uniform[:, level] * q_drawn < p_drawn)
            left = (p - q).clamp(min=0.0)
            # nothing is left where q is p but for rounding
            from_p = ~was_drawn | (left.sum(dim=-1) == 0)
            tokens.append(torch.where(good, drawn, state.choose(torch.where(from_p.unsqueeze(1), warped, left.log()))))
            state.advance(tokens[-1])
            node = torch.where(good & (node == level), level + 1, size + 1)
            path.append(node)
        tokens.append(state.sample(logits.at(node)))
        return Walk.of(torch.stack(path, dim=1), torch.stack(tokens, dim=1), tree)

    @staticmethod
    def _uniform(sampler: Sampler, rows: range, steps: int) -> Tensor:
        """[B, steps] what decides on the draws, uniform in (0, 1)."""
        here, ids = slice(rows.start, rows.stop), sampler.state.token_ids[:1]
        positions = sampler.state.position[here].unsqueeze(1) + torch.arange(steps, device=ids.device)
        noise = gumbel(sampler.state.seed[here] ^ _ACCEPT_STREAM, positions, ids).squeeze(2)
        return noise.neg().exp().neg().exp()
