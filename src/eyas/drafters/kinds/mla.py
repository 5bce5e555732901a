"""EAGLE-3 with multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434), for targets with MLA.

The cache holds one latent and one rotated key per position, shared by all heads, instead of keys and values. The
up-projections are absorbed: queries are projected into the latent space before the attention, and mixed latents out of
it afterwards, which is the same product in another order. The cache has the target's MLA shape. config.json has
EAGLE-3's keys and DeepSeek's sizes.

Shapes: B batch, S positions, N heads, C latent (kv_lora_rank), P / R plain / rotated channels of a head, Dv value
size.
"""

from __future__ import annotations

from math import log
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn

from eyas.drafters.config import MAX_SIZE, FusedTapsConfig
from eyas.drafters.formats.decoder import decoder_dict, read_fused_taps, taps_dict
from eyas.drafters.formats.fields import Fields
from eyas.drafters.kind import EAGLE3_MLA, Kind
from eyas.drafters.kinds.eagle3 import FusedTapsNetwork
from eyas.drafters.network import Attend, RMSNorm, Rope, described, rotate
from eyas.targets.native.decoder import DecoderDescription, DecoderForm, Heads
from eyas.targets.native.latent import LatentHeads
from eyas.targets.slots import KVShape

_MOE_AND_DERIVED = frozenset(
    "head_dim num_key_value_heads qk_head_dim ep_size first_k_dense_replace moe_intermediate_size moe_layer_freq "
    "n_group n_routed_experts n_shared_experts norm_topk_prob num_experts_per_tok num_nextn_predict_layers "
    "num_mtp_layers num_local_experts output_router_logits routed_scaling_factor scoring_func seq_aux topk_group "
    "topk_method aux_loss_alpha".split()
)
"""DeepSeek's config keys for experts and derived sizes. The MLP here is dense: experts would be extra tensors."""


class MlaConfig(FusedTapsConfig):
    """Sizes of the latents and of the parts of a head."""

    q_lora_rank: int | None = Field(ge=1, le=MAX_SIZE)
    """None = queries come from a single projection."""
    kv_lora_rank: int = Field(ge=1, le=MAX_SIZE)
    qk_nope_head_dim: int = Field(ge=1, le=MAX_SIZE)
    qk_rope_head_dim: int = Field(ge=2, le=MAX_SIZE, multiple_of=2)
    v_head_dim: int = Field(ge=1, le=MAX_SIZE)
    rope_interleave: bool = True
    """Whether channels that are rotated together are adjacent, instead of half a head apart."""

    @property
    def rope_size(self) -> int:
        return self.qk_rope_head_dim


def read(fields: Fields) -> MlaConfig:
    """The configuration in a checkpoint's config.json. Raises ConfigError, also for keys of unknown meaning."""
    for key in _MOE_AND_DERIVED & set(fields.values):
        fields.ignore(key, "of experts or derived: the MLP here is dense, and experts would be extra tensors")
    read_fused_taps(fields)
    fields.default("q_lora_rank", None)
    return fields.finish(MlaConfig)


def write(config: MlaConfig) -> dict[str, Any]:
    """The config.json that SGLang, vLLM, ATOM and eyas read."""
    values = decoder_dict(config, "Eagle3DeepseekV2ForCausalLM")
    return values | {"q_lora_rank": config.q_lora_rank} | taps_dict(config)


class Absorbed(nn.Linear):
    """A projection that is read as a matrix and never run as a layer, so its weight isn't prepacked."""


class LatentAttention(nn.Module):
    """Attention whose input may be wider than its output, under DeepSeek's parameter names."""

    def __init__(self, config: MlaConfig, width: int) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.latent = config.kv_lora_rank
        self.plain = config.qk_nope_head_dim
        self.rotated = config.qk_rope_head_dim
        self.interleaved = config.rope_interleave
        q_size = self.heads * (self.plain + self.rotated)
        bias = config.attention_bias
        eps = config.rms_norm_eps
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(width, q_size, bias=False)
        else:
            self.q_a_proj = nn.Linear(width, config.q_lora_rank, bias=bias)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps=eps)
            self.q_b_proj = nn.Linear(config.q_lora_rank, q_size, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, self.latent + self.rotated, bias=bias)
        self.kv_a_layernorm = RMSNorm(self.latent, eps=eps)
        self.kv_b_proj = Absorbed(self.latent, self.heads * (self.plain + config.v_head_dim), bias=False)
        self.o_proj = nn.Linear(self.heads * config.v_head_dim, config.hidden_size, bias=bias)
        # `attend` scales by the size of the keys that it gets, C + R; the right scale is by a head's size, P + R
        ratio = (self.latent + self.rotated) / (self.plain + self.rotated)
        self.scale = ratio**0.5 * yarn_mscale(config.rope_parameters) ** 2

    @property
    def kv_shape(self) -> tuple[KVShape, KVShape]:
        """The shapes of the keys and values that a cache holds."""
        return KVShape(1, self.latent + self.rotated), KVShape(1, self.latent)

    def forward(self, x: Tensor, rope: Rope, layer: int, attend: Attend) -> Tensor:
        """x [B, S, width] -> [B, S, H]."""
        q_plain, q_turned = self._queries(x).tensor_split((self.plain,), dim=-1)  # [B, N, S, P], [B, N, S, R]
        latent, k_turned = self.kv_a_proj_with_mqa(x).tensor_split((self.latent,), dim=-1)
        latent = self.kv_a_layernorm(latent).unsqueeze(1)  # [B, 1, S, C]
        up = torch.unflatten(self.kv_b_proj.weight, 0, (self.heads, -1))  # [N, P + Dv, C]
        to_keys, to_values = up.tensor_split((self.plain,), dim=1)
        q = torch.cat((q_plain @ to_keys, self._turn(q_turned, rope)), dim=-1)  # [B, N, S, C + R]
        k = torch.cat((latent, self._turn(k_turned.unsqueeze(1), rope)), dim=-1)  # [B, 1, S, C + R]
        mixed = attend(layer, q * self.scale, k, latent) @ to_values.transpose(1, 2)  # [B, N, S, Dv]
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _queries(self, x: Tensor) -> Tensor:
        """[B, S, width] -> [B, N, S, P + R]."""
        q = self.q_proj(x) if hasattr(self, "q_proj") else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        out: Tensor = q.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return out

    def _turn(self, x: Tensor, rope: Rope) -> Tensor:
        """Apply RoPE to x [B, heads, S, R], whose rotated pairs are adjacent if interleaved."""
        if self.interleaved:
            x = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
        return rotate(x, rope)


class MlaNetwork(FusedTapsNetwork):
    """EAGLE-3 with latent attention."""

    config: MlaConfig

    def attention(self, width: int) -> nn.Module:
        return LatentAttention(self.config, width)

    def description(self) -> DecoderDescription:
        config = self.config
        size = config.kv_lora_rank + config.qk_rope_head_dim
        latent = LatentHeads(
            config.kv_lora_rank,
            config.q_lora_rank or 0,
            config.v_head_dim,
            config.rope_interleave,
            rotated=config.qk_rope_head_dim,
        )
        attention: Any = self.layers[0].self_attn
        heads = Heads(config.num_attention_heads, 1, size, attention.scale * size**-0.5, latent=latent)
        form = DecoderForm(returns_normed=config.norm_output, fuse=self.fusion)
        return described(self, heads, self.norm, self.rotary, form)


def yarn_mscale(rope: dict[str, object]) -> float:
    """How much YaRN sharpens the attention; it enters the scale squared (once for queries, once for keys)."""
    factor = rope.get("factor")
    weight = rope.get("mscale_all_dim")
    if rope.get("rope_type", "default") == "default" or not isinstance(factor, int | float) or factor <= 1:
        return 1.0
    return 0.1 * weight * log(factor) + 1.0 if isinstance(weight, int | float) and weight else 1.0


KIND = Kind(
    "mla",
    MlaConfig,
    MlaNetwork,
    read,
    write,
    architectures=frozenset(
        "Eagle3DeepseekV2ForCausalLM Eagle3DeepseekV3ForCausalLM Eagle3DeepSeekV3ForCausalLM".split()
    ),
    family=EAGLE3_MLA,
    full_map=True,
    paired_inputs=tuple(f"layers.0.self_attn.{part}.weight" for part in ("q_proj", "q_a_proj", "kv_a_proj_with_mqa")),
)
