"""Sizes with which `architectures` makes models tiny: by name of the config's field, and what single types need."""

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
    "shared_experts_intermediate_size",
    4: "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers "
    "num_encoder_layers num_attention_heads n_head n_heads num_heads decoder_attention_heads "
    "encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads attention_heads "
    "swa_num_attention_heads num_experts n_routed_experts num_local_experts moe_num_experts rank index_n_heads",
    2: "num_key_value_heads swa_num_key_value_heads num_experts_per_tok moe_topk moe_top_k top_k_experts",
    16: "head_dim swa_head_dim kv_lora_rank q_lora_rank v_head_dim dim_head kv_channels attention_head_size "
    "index_head_dim hidden_size_per_layer_input query_pre_attn_scalar o_lora_rank laurel_rank adapter_rank",
    8: "qk_rope_head_dim qk_nope_head_dim rotary_dim",
    1: "n_shared_experts moe_num_shared_experts",
    6: "sliding_window sliding_window_size",
    256: "max_position_embeddings n_positions n_ctx max_target_positions max_source_positions max_seq_len "
    "max_sequence_length context_length original_max_position_embeddings",
}
SIZES: dict[str, Any] = {name: size for size, names in _NAMES.items() for name in names.split()}
SIZES["tie_word_embeddings"] = False  # a head that is the embedding mostly repeats the last token
"""Field -> size, set wherever a config has the field and its default isn't None."""

SPECIAL: dict[str, dict[str, Any] | str] = {}
"""What single types need besides, by field; or why none is made."""
