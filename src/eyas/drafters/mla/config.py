"""What an MLA drafter is made of: EAGLE-3's keys and DeepSeek's sizes, as the field writes them."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from eyas.drafters.config import WIDEST
from eyas.drafters.eagle3.config import FusedTapsConfig, read_fused_taps, taps_dict
from eyas.drafters.formats.fields import Fields
from eyas.drafters.published import decoder_dict

# What DeepSeek configs say of experts and of derived sizes. The MLP here is dense: experts would be extra tensors.
_MOE_AND_DERIVED = frozenset(
    "head_dim num_key_value_heads qk_head_dim ep_size first_k_dense_replace moe_intermediate_size moe_layer_freq "
    "n_group n_routed_experts n_shared_experts norm_topk_prob num_experts_per_tok num_nextn_predict_layers "
    "num_mtp_layers num_local_experts output_router_logits routed_scaling_factor scoring_func seq_aux topk_group "
    "topk_method aux_loss_alpha".split()
)


class MlaConfig(FusedTapsConfig):
    """Sizes of the latents and of a head's parts."""

    q_lora_rank: int | None = Field(ge=1, le=WIDEST)
    """None = queries come from one plain projection."""
    kv_lora_rank: int = Field(ge=1, le=WIDEST)
    qk_nope_head_dim: int = Field(ge=1, le=WIDEST)
    qk_rope_head_dim: int = Field(ge=2, le=WIDEST, multiple_of=2)
    v_head_dim: int = Field(ge=1, le=WIDEST)
    rope_interleave: bool = True

    @property
    def rope_size(self) -> int:
        return self.qk_rope_head_dim


def read(fields: Fields) -> MlaConfig:
    """Read a checkpoint's configuration; refuse a key that is neither known nor to be overlooked."""
    for key in _MOE_AND_DERIVED & set(fields.values):
        fields.ignore(key, "of experts or derived: the MLP here is dense, and experts would be extra tensors")
    read_fused_taps(fields)
    fields.default("q_lora_rank", None)
    return fields.finish(MlaConfig)


def config_to_dict(config: MlaConfig) -> dict[str, Any]:
    """The config.json form that SGLang, vLLM, ATOM and eyas read."""
    values = decoder_dict(config, "Eagle3DeepseekV2ForCausalLM")
    return values | {"q_lora_rank": config.q_lora_rank} | taps_dict(config)
