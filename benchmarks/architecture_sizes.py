"""Sizes that make the models of `architectures` tiny: by config field, and settings of single model types."""

from __future__ import annotations

from typing import Any

_NAMES = {
    97: "vocab_size unpadded_vocab_size vocab_size_per_layer_input",
    64: "hidden_size d_model n_embd backbone_hidden_size embedding_size emb_dim input_embedding_size "
    "output_embedding_size",
    96: "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim d_inner dff dim_ff ffn_hidden_size "
    "intermediate_size_mlp expert_ffn_hidden_size dense_intermediate_size shared_intermediate_size "
    "feed_forward_size",
    32: "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size "
    "shared_experts_intermediate_size mamba_d_head mamba_head_dim",
    4: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers "
    "num_encoder_layers num_attention_heads n_head n_heads num_heads decoder_attention_heads "
    "encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads attention_heads "
    "swa_num_attention_heads num_experts n_routed_experts num_local_experts moe_num_experts rank index_n_heads "
    "mamba_n_heads mamba_num_heads linear_num_heads linear_num_key_heads mamba_d_conv",
    2: "num_key_value_heads swa_num_key_value_heads num_experts_per_tok moe_topk moe_top_k moe_k top_k_experts n_group "
    "zero_expert_num n_groups mamba_n_groups mamba_ngroups n_mamba_heads",
    16: "head_dim swa_head_dim kv_lora_rank q_lora_rank v_head_dim dim_head kv_channels attention_head_size "
    "index_head_dim hidden_size_per_layer_input query_pre_attn_scalar o_lora_rank laurel_rank adapter_rank "
    "qk_rope_head_dim qk_nope_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim state_size "
    "ssm_state_size mamba_d_state",
    8: "rotary_dim linear_num_value_heads",
    1: "n_shared_experts moe_num_shared_experts topk_group first_k_dense_replace moe_layer_start_index",
    6: "sliding_window sliding_window_size",
    256: "max_position_embeddings n_positions n_ctx max_target_positions max_source_positions max_seq_len "
    "max_sequence_length context_length original_max_position_embeddings",
}
SIZES: dict[str, Any] = {name: size for size, names in _NAMES.items() for name in names.split()}
SIZES["tie_word_embeddings"] = False  # a tied head mostly repeats the last token
"""Field -> size, set in every config that has the field with a default other than None."""

_LATENT = {"num_key_value_heads": 4}
_LINEAR = ["linear_attention", "full_attention"] * 2
_SHARED_KEYS = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "activation_sparsity_pattern": None,
}
_VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SPECIAL: dict[str, dict[str, Any] | str] = {
    "axk1": _LATENT,
    "bailing_hybrid": {**_LATENT, "layer_types": _LINEAR, "n_group": 1, "topk_group": 1},
    "bamba": {"attn_layer_indices": [1, 3]},
    "beam": _LATENT,
    "deepseek_v2": {**_LATENT, "num_experts_per_tok": 2, "n_routed_experts": 4},
    "deepseek_v3": _LATENT,
    "falcon_h1": {"mamba_d_ssm": 128},
    "granitemoehybrid": {"layer_types": _LINEAR},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {**_LATENT, "layer_types": _LINEAR, "q_lora_rank": None},
    "mamba2": {"head_dim": 32},
    "nemotron_h": {"layers_block_type": ["linear_attention", "full_attention", "moe", "linear_attention"]},
    "olmo_hybrid": {"layer_types": _LINEAR, "linear_num_key_heads": 4, "linear_num_value_heads": 8},
    "zaya": {"num_experts_per_tok": 1},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1},
    "dots3_note": {"text_config": {"num_key_value_heads": 4}},
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma3": {"vision_config": {**_VISION, "model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14}},
    "gemma3n": "its towers need the timm library; the decoder is gemma3n_text",
    "gemma3n_text": _SHARED_KEYS,
    "gemma4_text": _SHARED_KEYS,
    "glm4_moe_lite": _LATENT,
    "minicpm3": _LATENT,
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "youtu": _LATENT,
    "xmod": {"default_language": "en_XX"},
    "cohere_compass_text": {"head_dim": 16},
    "gemma4_assistant": "it is a drafter of its own kind: it reads the keys of a Gemma 4 target",
    "gemma4_unified_assistant": "it is a drafter of its own kind: it reads the keys of a Gemma 4 target",
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "lfm2": {"layer_types": ["full_attention", "conv"] * 2},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"] * 2},
    "longcat_flash": _LATENT,
}
"""Model type -> additional fields (nested for sub-configs), or the reason why no model is made."""
