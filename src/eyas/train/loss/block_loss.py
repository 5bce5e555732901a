"""The loss of block drafters, forward and backward for some blocks at a time.

Blocks depend on each other only through the context's keys and values. These are made once; then groups of blocks run
through layers, head and loss, and back, before the next group begins. So the memory of states and logits doesn't grow
with the number of blocks, and nothing is computed twice. Gradients are added to one buffer for each parameter and each
layer's context; the backward pass only scales them, as in `draft_loss`.

Shapes: n blocks of B slots, K guesses of a block, C chats, S positions, A taps, Ht target hidden, H draft hidden, M
answer tokens, g blocks of a group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.nn import functional as F

from eyas.data.features import FeatureBatch
from eyas.drafters.block.network import BlockNetwork
from eyas.train.loss.block import Blocks, blocks_at, guessed, read_context
from eyas.train.loss.block_attention import Anchors, BlockAttention
from eyas.train.loss.config import LossConfig
from eyas.train.loss.draft_loss import TokenLoss, TokenScores
from eyas.train.loss.token_loss import Teacher, teacher_of
from eyas.train.loss.ttt import ChainRows

SLOTS = 256
"""The least number of slots that a group has; in wide networks half as many as a layer's width, so that adding up the
weights' gradients takes little time beside computing them."""


def block_loss(
    network: BlockNetwork, head: Callable[[Tensor], Tensor], vocab_size: int, config: LossConfig,
    batch: FeatureBatch, taps: Tensor, anchors: Anchors, starts: Tensor | None = None,
) -> tuple[TokenScores, ChainRows]:  # fmt: skip
    """The summed loss of the blocks after `anchors`, and their guesses.

    `head` is the target's; taps [C, S, A, Ht] are what the network reads, those of `batch` with or without noise;
    `starts` [C] the positions at which it has the chats begin, None = 0.
    """
    blocks = blocks_at(network.config, batch.tokens, batch.loss_mask, anchors, config.unroll, starts)
    context: list[Tensor] = []  # the keys and the values of each layer in turn
    read_context(network, taps, lambda _, keys, values: context.extend((keys, values)), starts)
    group = _Group(network, teacher_of(batch, head, network.target_ids, vocab_size), vocab_size, config)
    hidden, trained = network.embed(blocks.masked), {n: p for n, p in group.named_parameters() if p.requires_grad}
    tensors = (hidden, *context, *trained.values())
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        scores = TokenScores(*_Grouped.apply(group, blocks, list(trained), *tensors))  # type: ignore[no-untyped-call]
    else:
        scores = _total([group(blocks.part(part), hidden[part], context) for part in group.parts(blocks)])
    return scores, blocks.rows()


class _Group(nn.Module):
    """The loss of some blocks, as a module so that it can be called with other tensors as its parameters."""

    def __init__(self, network: BlockNetwork, teacher: Teacher, vocab_size: int, config: LossConfig) -> None:
        super().__init__()
        self.network = network
        self._teacher, self._vocab_size, self._config = teacher, vocab_size, config

    def parts(self, blocks: Blocks) -> list[slice]:
        """The groups of a batch's blocks: at least one, since every process needs gradients of all parameters."""
        config, count = self.network.config, len(blocks.masked)
        most = max(1, max(SLOTS, config.hidden_size // 2) // config.block_size)
        if self._config.kl_decay is not None:  # its loss depends on the mean over all guesses
            most = max(1, count)
        return [slice(start, start + most) for start in range(0, max(1, count), most)]

    def forward(
        self, blocks: Blocks, hidden: Tensor, context: list[Tensor], buffers: list[Tensor | None] | None = None
    ) -> TokenScores:
        """Scores over all answer tokens of the batch; hidden [g, B, H], and `buffers` for the context's gradients."""
        network, config, rows = self.network, self._config, blocks.rows()
        attention = BlockAttention(blocks.anchors)
        for layer, at in enumerate(range(0, len(context), 2)):
            keys, values = (None, None) if buffers is None else buffers[at : at + 2]
            attention.store(layer, context[at], context[at + 1], (keys, values))
        states = guessed(network, hidden, blocks, attention)
        token_loss = TokenLoss(
            self._teacher, network.joined_logits, network.joined_parameters(), network.target_ids, self._vocab_size,
            config,
        )  # fmt: skip
        scores = token_loss(list(network.joined(states, blocks.before).unbind(1)), rows)
        confidence = network.confidence(states, blocks.before)  # [g, K], None without such a head
        weight = 1.0 if config.confidence_weight is None else config.confidence_weight
        if confidence is None or not weight:
            return scores
        return scores._replace(loss=scores.loss + weight * _confidence_loss(confidence, scores, rows, config.decay))


class _Grouped(torch.autograd.Function):
    """Runs each group forward and backward; hidden [n, B, H], the context, and the trained parameters by name."""

    @staticmethod
    def forward(
        ctx: Any, group: _Group, blocks: Blocks, names: list[str], hidden: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        count = len(tensors) - len(names)
        leaves = [x.detach().requires_grad_(x.requires_grad) for x in tensors]
        context, weights = leaves[:count], dict(zip(names, leaves[count:], strict=True))
        buffers = [
            torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) if x.requires_grad else None
            for x in context
        ]
        given, found = [], []
        for part in group.parts(blocks):
            with torch.enable_grad():
                own = hidden[part].detach().requires_grad_(hidden.requires_grad)
                scores: TokenScores = functional_call(group, weights, (blocks.part(part), own, context, buffers))
                scores.loss.backward()  # type: ignore[no-untyped-call]
            given.append(own.grad)
            found.append(scores._replace(loss=scores.loss.detach()))
        embedded = torch.cat([x for x in given if x is not None]) if hidden.requires_grad else None
        of_context = [None if x is None else x.to(like.dtype) for x, like in zip(buffers, context, strict=True)]
        # every process of DDP and FSDP needs gradients of all parameters, even if it has no anchor
        of_weights = (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in weights.values())
        ctx.found = [embedded, *of_context, *of_weights]
        total = _total(found)
        ctx.mark_non_differentiable(total.right, total.overlap, total.by_token)
        return total.loss, total.right, total.overlap, total.by_token

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        found, ctx.found = ctx.found, []  # so that they can become the parameters' own without a copy
        return None, None, None, *(None if x is None else x.mul_(grad) for x in found)


def _total(found: list[TokenScores]) -> TokenScores:
    """The scores of all groups together: each guess is in one of them."""
    loss, right, overlap, by_token = found[0]
    for more in found[1:]:
        loss, right, overlap = loss + more.loss, right | more.right, overlap + more.overlap
        by_token = by_token + more.by_token
    return TokenScores(loss, right, overlap, by_token)


def _confidence_loss(confidence: Tensor, scores: TokenScores, rows: ChainRows, decay: float) -> Tensor:
    """Binary cross entropy of the confidences [g, K] with the rates at which sampled guesses are accepted."""
    at = rows.guesses.T  # [M, K]
    said = F.pad(confidence, (0, 0, 0, 1)).gather(0, at.clamp(min=0))  # there may be no blocks at all
    said = said.to(torch.promote_types(said.dtype, torch.float32))
    found = F.binary_cross_entropy_with_logits(said, scores.overlap.clamp(0, 1), reduction="none")
    weights = decay ** torch.arange(at.shape[1], device=at.device) * (at >= 0)
    return (found * weights).sum()
