"""LiLiCorr (arXiv 2608.20530): DFlash's block, and a small transformer over the lattice of its candidates.

The k best candidates of all slots attend to each other, with a bias by the distance of their slots. Each candidate gets
an outgoing vector for its successors and an incoming one for its predecessors; the cosine of the two scores a step. The
anchor's outgoing vector comes from the target's fused state before it. Layers may have DFlash 2's convolutions.

It reads files of NVIDIA's Model Optimizer, as SGLang and TensorRT-LLM do: `lilicorr.*`, with sizes in `dflash_config`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from eyas.drafters.block.network import Block, Followed, among
from eyas.drafters.config import MAX_SIZE
from eyas.drafters.formats.fields import NESTED, Fields
from eyas.drafters.kinds.dflash import BLOCK_LOSS, block_kind, read_block, write_block
from eyas.drafters.kinds.dflash2 import CONVOLUTION, ConvolvedConfig, ConvolvedNetwork
from eyas.drafters.network import RMSNorm

_FEATURES = 5


class LiLiCorrConfig(ConvolvedConfig):
    """Sizes of DFlash's block and of the transformer over its lattice."""

    conv_kernel_size: int = Field(default=0, ge=0, le=256)
    """The taps of the layers' convolutions; 0 = no convolutions."""
    conv_group_size: int = Field(default=0, ge=0, le=MAX_SIZE)
    lilicorr_hidden_size: int = Field(ge=1, le=MAX_SIZE)
    """By default the drafter's width."""
    lilicorr_num_layers: int = Field(default=2, ge=1, le=64)
    lilicorr_num_heads: int = Field(default=4, ge=1, le=MAX_SIZE)
    lilicorr_mlp_ratio: float = Field(default=2.0, gt=0, le=64)
    lilicorr_candidate_topk: int = Field(default=8, ge=1, le=1024)
    """k, the candidates per slot."""
    lilicorr_factor_dim: int = Field(default=64, ge=1, le=MAX_SIZE)
    lilicorr_vector_eps: float = Field(default=1e-6, gt=0, lt=0.5)
    lilicorr_logit_scale: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    """The factor that turns cosines into logits."""

    @model_validator(mode="before")
    @classmethod
    def _as_wide_as_the_drafter(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("lilicorr_hidden_size") is None:
            return {**values, "lilicorr_hidden_size": values.get("hidden_size")}
        return values

    @model_validator(mode="after")
    def _fits(self) -> LiLiCorrConfig:
        if self.lilicorr_hidden_size % self.lilicorr_num_heads:
            raise ValueError(f"lilicorr_hidden_size {self.lilicorr_hidden_size} must be a multiple of its heads")
        if self.lilicorr_candidate_topk > self.draft_vocab_size or self.sample_from_anchor:
            raise ValueError("lilicorr_candidate_topk exceeds draft_vocab_size, or sample_from_anchor is not false")
        return self


def read(fields: Fields) -> LiLiCorrConfig:
    """The configuration in a checkpoint's config.json. Raises ConfigError, also for keys of unknown meaning."""
    nested = dict(fields.values.get(NESTED) or {})
    nested.pop("lilicorr_enabled", None)
    fields.values[NESTED] = nested
    made: LiLiCorrConfig = read_block(LiLiCorrConfig, "lilicorr", fields)
    return made


def write(config: LiLiCorrConfig) -> dict[str, Any]:
    """The config.json that SGLang, TensorRT-LLM and eyas read."""
    own = [name for name in LiLiCorrConfig.model_fields if name.startswith("lilicorr_")]
    values = write_block("LiLiCorrDraftModel", ("block_size", *CONVOLUTION, *own), config)
    values[NESTED] |= {"projector_type": "lilicorr", "lilicorr_enabled": True}
    return values


class _Layer(nn.Module):
    """A pre-norm layer of the transformer: attention with a bias, and an MLP."""

    def __init__(self, config: LiLiCorrConfig) -> None:
        super().__init__()
        size, eps = config.lilicorr_hidden_size, config.rms_norm_eps
        width = int(size * config.lilicorr_mlp_ratio)
        self.attn_norm = RMSNorm(size, eps=eps)
        self.mlp_norm = RMSNorm(size, eps=eps)
        self.attn = nn.MultiheadAttention(size, config.lilicorr_num_heads)
        self.mlp = nn.Sequential(nn.Linear(size, width), nn.SiLU(), nn.Linear(width, size))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """x [R, S, h], bias [heads, S, S]."""
        attn = self.attn
        heads = F.linear(self.attn_norm(x), attn.in_proj_weight, attn.in_proj_bias)
        q, k, v = heads.view(*x.shape[:2], 3, attn.num_heads, -1).permute(2, 0, 3, 1, 4)  # [R, heads, S, .]
        mixed = F.scaled_dot_product_attention(q, k, v, bias.to(q.dtype))
        x = x + attn.out_proj(mixed.transpose(1, 2).flatten(2))
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Lattice(NamedTuple):
    """The candidates of all guesses, and scores of their pairs: cosines times the logit scale."""

    ids: Tensor  # [R, D, k] draft ids
    logprobs: Tensor  # [R, D, k] by the block alone
    start: Tensor  # [R, k] scores after the anchor
    pairs: Tensor  # [R, D - 1, k, k] scores after each candidate of the guess before


class Correlator(nn.Module):
    """The transformer over the lattice, h wide."""

    def __init__(self, config: LiLiCorrConfig) -> None:
        super().__init__()
        wide = config.hidden_size
        size = config.lilicorr_hidden_size
        factors = config.lilicorr_factor_dim
        heads, slots = config.lilicorr_num_heads, config.guesses
        self.config = config
        self.token_proj = nn.Identity() if wide == size else nn.Linear(wide, size)
        self.pass_hidden_proj = nn.Linear(wide, size)
        self.context_proj = nn.Linear(wide, size)
        self.feature_mlp = nn.Sequential(
            nn.LayerNorm(_FEATURES), nn.Linear(_FEATURES, size), nn.SiLU(), nn.Linear(size, size)
        )
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, slots, 1, size))
        self.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, config.lilicorr_candidate_topk, size))
        self.relative_slot_bias = nn.Parameter(torch.zeros(heads, 2 * config.block_size - 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(heads))
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.lilicorr_num_layers))
        self.output_norm, self.anchor_norm = (RMSNorm(size, eps=config.rms_norm_eps) for _ in range(2))
        self.factor_input_proj = nn.Linear(3 * size, size)
        self.out_head, self.in_head, self.anchor_out_head = (nn.Linear(size, factors) for _ in range(3))
        for head in (self.out_head, self.in_head, self.anchor_out_head):  # not zero: a product of zeros has no gradient
            nn.init.normal_(head.weight, std=0.02)
            nn.init.zeros_(head.bias)

    def forward(self, embedded: Tensor, logprobs: Tensor, states: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        """`start` and `pairs` from embedded [R, D, k, H], logprobs [R, D, k], states [R, D, H] and context [R, H]."""
        slots, count = logprobs.shape[1:]
        ranks = torch.arange(count, device=logprobs.device).to(logprobs.dtype).expand_as(logprobs)
        features = (logprobs, logprobs.exp(), logprobs - logprobs.amax(-1, keepdim=True), ranks / max(count - 1, 1),
                    (ranks == 0).to(logprobs.dtype))  # fmt: skip
        x = self.token_proj(embedded) + self.pass_hidden_proj(states).unsqueeze(2)
        x = x + self.feature_mlp(torch.stack(features, dim=-1).to(states.dtype))
        x = (x + self.slot_embedding[0, :, :slots] + self.rank_embedding[0]).flatten(1, 2)
        slot = torch.arange(slots, device=x.device).repeat_interleave(count)
        apart = slot.unsqueeze(1) - slot
        bias = self.relative_slot_bias[:, apart + self.config.block_size - 1]
        bias = bias + (apart == 0) * self.same_slot_bias[:, None, None]
        for layer in self.layers:
            x = layer(x, bias)
        x = self.output_norm(x).unflatten(1, (slots, count))
        anchor = self.anchor_norm(self.context_proj(context))
        at_anchor = anchor[:, None, None].expand_as(x)
        factors = F.silu(self.factor_input_proj(torch.cat((x, at_anchor, x * at_anchor), dim=-1)))
        eps, scale = self.config.lilicorr_vector_eps, self.config.lilicorr_logit_scale
        leaving, entering, first = (
            F.normalize(head(read), dim=-1, eps=eps)
            for head, read in ((self.out_head, factors), (self.in_head, factors), (self.anchor_out_head, anchor))
        )
        start = (entering[:, 0] @ first.unsqueeze(2)).squeeze(2)
        return scale * start, scale * leaving[:, :-1] @ entering[:, 1:].transpose(2, 3)


class LiLiCorrNetwork(ConvolvedNetwork):
    """The block's layers and the transformer over the lattice."""

    config: LiLiCorrConfig

    def __init__(self, config: LiLiCorrConfig) -> None:
        super().__init__(config)
        self.lilicorr = Correlator(config)

    @property
    def corrections_per_guess(self) -> int:
        return self.config.lilicorr_candidate_topk

    def begin(self, block: Block) -> Block:
        states = block.guesses(self.config.guesses)
        logits = self.logits(states)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        best, ids = logits.topk(self.config.lilicorr_candidate_topk, dim=-1)
        logprobs = best - logits.logsumexp(-1, keepdim=True)
        # no gradient reaches the embedding from here
        embedded = self.embed(self.target_ids[ids].flatten(1)).detach().view(*ids.shape, -1)
        scored = self.lilicorr(embedded.to(states.dtype), logprobs, states, block.context.to(states.dtype))
        return block._replace(hints=Lattice(ids, logprobs, *(scores.to(logprobs.dtype) for scores in scored)))

    def follow(self, block: Block, slot: int, tokens: Tensor, memory: Tensor | None) -> Followed:
        """The candidates' scores and ids [R, W, 2 k]; after a token that is no candidate, the block's own logprobs."""
        ids, logprobs, start, pairs = block.hints
        count, width = ids.shape[2], tokens.shape[1]
        if slot == 0:
            scores = start.unsqueeze(1).expand(-1, width, -1)
        else:
            before = self.target_ids[ids[:, slot - 1]].unsqueeze(1) == tokens.unsqueeze(2)  # [R, W, k]
            scores = before.to(pairs.dtype) @ pairs[:, slot - 1]
            scores = torch.where(before.any(2, keepdim=True), scores, logprobs[:, slot].unsqueeze(1))
        # float32 holds the ids of any vocabulary exactly
        numbers = ids[:, slot].unsqueeze(1).expand(-1, width, count).to(scores.dtype)
        return torch.cat((scores, numbers), dim=-1), memory

    def corrected(self, logits: Tensor, latent: Tensor) -> Tensor:
        scores, numbers = latent.chunk(2, dim=-1)
        return among(logits, numbers.long(), scores)


KIND = block_kind(
    "lilicorr", LiLiCorrConfig, LiLiCorrNetwork, ("LiLiCorrDraftModel",), marks=("lilicorr.",), read=read, write=write,
    loss={**BLOCK_LOSS, "base_weight": 1.0},
)  # fmt: skip
