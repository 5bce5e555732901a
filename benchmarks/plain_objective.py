"""The EAGLE-3 objective as one would first write it, to measure eyas's own against.

Keys of all steps are concatenated under a full mask per step, every position is computed at every step, and logits of
teacher and drafter are made for all positions at once. The same loss and gradients, row by row.

Shapes: B chats, S positions, K steps, V / Vd full / draft vocabulary, D head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from eyas.data.features import FeatureBatch
from eyas.drafters.network import DraftNetwork


class MaskedAttention:
    """Softmax over the keys of all steps; `fused` leaves the work to torch's masked kernel."""

    def __init__(self, fused: bool) -> None:
        self._fused = fused
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
        if self._fused:
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=groups > 1)
        keys, values = (x.repeat_interleave(groups, dim=1) for x in (keys, values))
        scores = q @ keys.transpose(2, 3) / q.shape[-1] ** 0.5 + mask
        return scores.softmax(-1, dtype=torch.float32).to(values.dtype) @ values


def plain_loss(
    network: DraftNetwork,
    head: Callable[[Tensor], Tensor],
    batch: FeatureBatch,
    steps: int,
    decay: float,
    fused: bool = False,
) -> Tensor:
    """Summed loss [] of a batch."""
    width = batch.tokens.shape[1]
    with torch.no_grad():
        logits = head(batch.final).float()  # [B, S, V]
        teacher = logits[:, :, network.target_ids].softmax(-1)  # [B, S, Vd]
    positions = torch.arange(width, device=batch.tokens.device).expand_as(batch.tokens)
    attention = MaskedAttention(fused)
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
