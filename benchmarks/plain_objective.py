"""The objectives as one would first write them, to measure eyas's own against. The same loss and gradients.

EAGLE-3: keys of all steps are concatenated under a full mask per step, every position is computed at every step, and
logits of teacher and drafter are made for all positions at once. Block drafters: a chat's context and all of its blocks
lie end to end under one full mask, and logits are made for all guesses at once; the anchors are those that eyas draws.

Shapes: B chats, S positions, K steps or guesses, V / Vd full / draft vocabulary, D head size, n anchors; in blocks B
slots.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.data.features import FeatureBatch
from eyas.drafters.block.network import Block, BlockNetwork
from eyas.drafters.network import DraftNetwork
from eyas.train.loss.block import sampled_anchors
from eyas.train.loss.config import LossConfig


class MaskedAttention:
    """Softmax over the keys of all steps."""

    def __init__(self) -> None:
        self._keys: dict[int, list[Tensor]] = {}
        self._values: dict[int, list[Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B, heads, S, D], k, v [B, kv, S, D] -> [B, heads, S, D]."""
        self._keys.setdefault(layer, []).append(k)
        self._values.setdefault(layer, []).append(v)
        count, width, groups = len(self._keys[layer]), q.shape[2], q.shape[1] // k.shape[1]
        keys, values = (torch.cat(x[layer], dim=2) for x in (self._keys, self._values))  # [B, kv, count*S, D]
        causal = torch.ones(width, width, dtype=torch.bool, device=q.device).tril()
        own = torch.eye(width, dtype=torch.bool, device=q.device)
        seen = torch.cat([causal] + [own] * (count - 1), dim=1)
        mask = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill(~seen, float("-inf"))
        keys, values = (x.repeat_interleave(groups, dim=1) for x in (keys, values))
        scores = q @ keys.transpose(2, 3) / q.shape[-1] ** 0.5 + mask
        return scores.softmax(-1, dtype=torch.float32).to(values.dtype) @ values


def plain_loss(
    network: DraftNetwork,
    head: Callable[[Tensor], Tensor],
    batch: FeatureBatch,
    steps: int,
    decay: float,
) -> Tensor:
    """Summed loss [] of a batch."""
    width = batch.tokens.shape[1]
    with torch.no_grad():
        logits = head(batch.final).float()  # [B, S, V]
        teacher = logits[:, :, network.target_ids].softmax(-1)  # [B, S, Vd]
    positions = torch.arange(width, device=batch.tokens.device).expand_as(batch.tokens)
    attention = MaskedAttention()
    hidden = network.fuse(batch.taps).to(batch.taps.dtype)
    loss = torch.zeros((), device=batch.tokens.device)
    for step in range(steps):
        tokens = F.pad(batch.tokens[:, 1 + step :], (0, 1 + step))
        hidden, normed = network.step(tokens, hidden, positions + step, attention)
        log_q = network.logits(normed).float().log_softmax(-1)  # [B, S, Vd]
        target = F.pad(teacher[:, 1 + step :], (0, 0, 0, 1 + step))
        counts = F.pad(batch.loss_mask[:, 2 + step :], (0, 2 + step))
        loss = loss - decay**step * ((target * log_q).sum(-1) * counts).sum()
    return loss


class MaskedBlocks:
    """Attention of one chat's blocks under a full mask; its context's keys and values come first."""

    def __init__(self, positions: Tensor, width: int, slots: int) -> None:
        """`positions` [n] are the last context positions that the blocks see."""
        count = len(positions)
        context = torch.arange(width) <= positions.repeat_interleave(slots).unsqueeze(1)
        block = torch.arange(count).repeat_interleave(slots)
        self._mask = torch.cat((context, block.unsqueeze(1) == block), dim=1)  # [n * B, S + n * B]
        self._context: dict[int, tuple[Tensor, Tensor]] = {}

    def store(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Keep a layer's keys and values [1, kv, S, D] of the context."""
        self._context[layer] = keys, values

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [1, heads, n * B, D], k, v [1, kv, n * B, D] -> [1, heads, n * B, D]."""
        keys, values = (
            torch.cat((old.to(new.dtype), new), dim=2) for old, new in zip(self._context[layer], (k, v), strict=True)
        )
        return F.scaled_dot_product_attention(
            q.to(v.dtype), keys.to(v.dtype), values, attn_mask=self._mask, enable_gqa=q.shape[1] > k.shape[1]
        )


def plain_block_loss(
    network: BlockNetwork, head: Callable[[Tensor], Tensor], batch: FeatureBatch, config: LossConfig
) -> Tensor:
    """Summed loss [] of a batch, a chat at a time."""
    drafts, size = network.config, network.config.block_size
    anchors = sampled_anchors(batch.loss_mask, config.anchors, (0,))
    steps, loss = config.unroll, torch.zeros(())
    for chat in range(len(batch.tokens)):
        tokens, mask = F.pad(batch.tokens[chat], (0, size + 2)), F.pad(batch.loss_mask[chat], (0, size + 2))
        at = torch.tensor([p for c, p in zip(anchors.chats, anchors.positions, strict=True) if c == chat])
        with torch.no_grad():
            teacher = F.pad(head(batch.final[chat]).float().softmax(-1), (0, 0, 0, size + 2))  # [S + ., V]
        attention = MaskedBlocks(at, batch.tokens.shape[1], size)
        context = network.fuse(batch.taps[chat : chat + 1]).to(batch.taps.dtype)
        network.read(context, torch.arange(batch.tokens.shape[1]).unsqueeze(0), attention.store)
        blocks = F.pad(tokens[at + 1].unsqueeze(1), (0, size - 1), value=drafts.mask_token_id)  # [n, B]
        positions = at.unsqueeze(1) + 1 + torch.arange(size)
        states = network.states(network.embed(blocks.view(1, -1)), positions.view(1, -1), attention)
        ahead = at.unsqueeze(1) + 1 + torch.arange(steps)  # [n, K] the token before each guess
        known = torch.stack((tokens[at], tokens[at + 1]), dim=1)
        block = network.begin(Block(states.view(len(at), size, -1), known, context[0, at], drafts.first))
        log_q = network.joined_logits(network.joined(block, tokens[ahead])).float().log_softmax(-1)  # [n, K, Vd]
        counts = mask[ahead + 1].long().cumprod(1) * config.decay ** torch.arange(steps)
        loss = loss - ((teacher[ahead] * log_q).sum(-1) * counts).sum()
    return loss
