"""Latent attention, absorbed, against transformers' DeepSeek-V3 on the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from eyas.drafters.formats.fields import Fields
from eyas.drafters.kinds.mla import LatentAttention, MlaConfig, read, write
from eyas.drafters.network import Rotary
from eyas.targets.attention import grouped_attention

from ... import tiny

SIZES: dict[str, Any] = {
    "num_attention_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 12,
    "max_position_embeddings": 256,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7,
    "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 64,
}  # fmt: skip
ROPES = {"plain": {"rope_type": "default", "rope_theta": 10000.0}, "yarn": YARN}


@pytest.mark.parametrize("rank", [12, None])
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize("bias", [False, True])
def test_it_is_deepseek_s_attention(rank: int | None, rope: str, interleave: bool, bias: bool) -> None:
    torch.manual_seed(0)
    settings = {**SIZES, "q_lora_rank": rank, "rope_interleave": interleave, "attention_bias": bias}
    theirs = DeepseekV3Config(
        **settings,
        hidden_size=32,
        num_key_value_heads=4,
        rope_parameters=dict(ROPES[rope]),
        attn_implementation="eager",
    )
    reference = DeepseekV3Attention(theirs, 0)
    with torch.no_grad():
        for weight in reference.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.2)
    config = MlaConfig(
        **settings,
        hidden_size=32,
        target_hidden_size=32,
        intermediate_size=48,
        vocab_size=9,
        draft_vocab_size=9,
        rope_parameters=ROPES[rope],
    )
    mine = LatentAttention(config, 32)
    mine.load_state_dict(reference.state_dict())
    x = 3 * torch.randn(2, 9, 32)
    positions = torch.arange(90, 99).expand(2, 9)
    seen = torch.ones(1, 1, 9, 9).tril().bool()
    cached: list[torch.Size] = []

    def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cached.extend((k.shape, v.shape))
        return grouped_attention(q, k, v, seen)

    added = torch.zeros(1, 1, 9, 9).masked_fill(~seen, -1e9)
    expected = reference(x, DeepseekV3RotaryEmbedding(theirs)(x, positions), added)[0]
    torch.testing.assert_close(mine(x, Rotary(config)(x, positions), 0, attend), expected, rtol=1e-4, atol=1e-5)
    assert [(shape[1], shape[3]) for shape in cached] == list(mine.kv_shape) == [(1, 20), (1, 16)]  # the latents only


def test_published_keys() -> None:
    made = tiny.network("mla", q_lora_rank=None, taps=[1, 2, 4]).config
    written = write(made)  # type: ignore[arg-type]
    assert written["architectures"] == ["Eagle3DeepseekV2ForCausalLM"]
    assert written["q_lora_rank"] is None
    experts = {"n_routed_experts": 256, "moe_intermediate_size": 64, "head_dim": 4, "num_key_value_heads": 4}
    assert read(Fields(written | experts, "config.json")) == made
