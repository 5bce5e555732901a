"""Every drafter kind and toggle for every consumer: a round trip, or a refusal that names the field."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eyas.drafters.block.network import Block, BlockNetwork
from eyas.drafters.checkpoint import load_network, open_checkpoint, save_network
from eyas.drafters.kinds import KINDS
from eyas.drafters.network import DraftNetwork, set_vocabulary
from eyas.errors import ExportError
from eyas.interop.export.consumers import CONSUMERS
from eyas.interop.export.drafter import ServedTarget
from eyas.interop.export.export import export
from eyas.targets.attention import grouped_attention

from ... import tiny
from ...pairs import tokenizer

ALL = ("safeailab", "sglang", "vllm", "speculators", "atom", "tensorrt-llm", "openvino", "gguf")
E3: dict[str, Any] = {"draft_vocab_size": 120, "taps": [2, 4, 5], "embedding": "shared"}
E1: dict[str, Any] = {"embedding": "shared", "head": "shared"}
FULL: dict[str, Any] = {**E3, "draft_vocab_size": None, "head": "shared"}
BLOCK: dict[str, Any] = {"taps": [2, 4, 5], "embedding": "shared", "head": "shared"}
SLIDING: dict[str, Any] = {"sliding_window": 64, "use_sliding_window": True, "layer_types": ["sliding_attention"]}
WINDOW: dict[str, Any] = {**BLOCK, **SLIDING}
SELECTOR: dict[str, Any] = {"conv_kernel_size": 3, "selector_top_k": 5}
MIXED = {**WINDOW, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LONG = {
    "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 2.1, 2.2, 2.3], "original_max_position_embeddings": 64, "factor": 4.0,
}  # fmt: skip


def rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **values}}


Row = tuple[str, dict[str, Any], dict[str, str]]
# name -> kind, settings, consumer -> the fields it refuses; a consumer that isn't named can represent it
TABLE: dict[str, Row] = {
    "eagle3": ("eagle3", E3, {"atom": "draft_vocab_size"}),
    "eagle3, own embedding": ("eagle3", {**E3, "embedding": "own"},
        {"sglang": "embedding", "atom": "draft_vocab_size", "tensorrt-llm": "embedding"} | {"openvino": "embedding"}),
    "eagle3, full": ("eagle3", {**FULL, "head": "own"}, {}),
    "eagle3, full, all own": ("eagle3", {**FULL, "embedding": "own", "head": "own"},
        {"sglang": "embedding", "tensorrt-llm": "embedding"} | {"openvino": "embedding"}),
    "eagle3, full, nothing own": ("eagle3", FULL, {}),
    "eagle3, shared head": ("eagle3", {**E3, "head": "shared"}, {"atom": "draft_vocab_size"}),
    "eagle3, fc_norm": ("eagle3", {**FULL, "fc_norm": True}, {"safeailab": "fc_norm", "gguf": "fc_norm"}
        | {"openvino": "fc_norm"}),
    "eagle3, norm_output": ("eagle3", {**FULL, "norm_output": True},
        {"safeailab": "norm_output", "gguf": "norm_output"} | {"openvino": "norm_output"}),
    "eagle3, both": ("eagle3", {**FULL, "norm_output": True, "fc_norm": True},
        {"safeailab": "fc_norm norm_output", "gguf": "fc_norm norm_output"} | {"openvino": "fc_norm norm_output"}),
    "eagle3, norm_before_residual": ("eagle3", {**FULL, "norm_before_residual": True},
        dict.fromkeys(("safeailab", "sglang", "atom", "tensorrt-llm"), "norm_before_residual")
        | {"openvino": "norm_before_residual"}),
    "eagle3, norm_before_fc": ("eagle3", {**FULL, "norm_before_fc": True},
        dict.fromkeys(("safeailab", "atom"), "norm_before_fc") | {"openvino": "norm_before_fc"}),
    "eagle3, every norm": ("eagle3", {**FULL, "norm_before_fc": True, "fc_norm": True},
        {"safeailab": "fc_norm norm_before_fc", "atom": "norm_before_fc", "tensorrt-llm": "norm_before_fc",
         "vllm": "norm_before_fc", "speculators": "norm_before_fc", "gguf": "fc_norm"}
        | {"openvino": "fc_norm norm_before_fc"}),
    "eagle3, qk_norm": ("eagle3", {**FULL, "qk_norm": True},
        dict.fromkeys(("safeailab", "sglang", "atom", "tensorrt-llm", "gguf"), "qk_norm") | {"openvino": "qk_norm"}),
    "eagle3, two layers": ("eagle3", {**FULL, "num_hidden_layers": 2},
        dict.fromkeys(("safeailab", "sglang", "atom", "tensorrt-llm", "gguf"), "num_hidden_layers")
        | {"openvino": "num_hidden_layers"}),
    "eagle3, attention_bias": ("eagle3", {**FULL, "attention_bias": True},
        dict.fromkeys(("safeailab", "sglang", "atom", "gguf"), "attention_bias") | {"openvino": "attention_bias"}),
    "eagle3, mlp_bias": ("eagle3", {**FULL, "mlp_bias": True},
        dict.fromkeys(("safeailab", "sglang", "atom", "gguf"), "mlp_bias")),
    "eagle3, qk_norm and biases": ("eagle3", {**FULL, "qk_norm": True, "attention_bias": True, "mlp_bias": True},
        {"safeailab": "qk_norm attention_bias mlp_bias", "sglang": "attention_bias mlp_bias qk_norm",
         "vllm": "attention_bias mlp_bias", "speculators": "attention_bias mlp_bias",
         "atom": "qk_norm attention_bias mlp_bias", "tensorrt-llm": "qk_norm",
         "gguf": "qk_norm attention_bias mlp_bias"} | {"openvino": "qk_norm attention_bias"}),
    "eagle3, four taps": ("eagle3", {**FULL, "taps": [1, 2, 4, 5], "num_aux_hidden_states": 4},
        {"safeailab": "num_aux_hidden_states taps", "speculators": "num_aux_hidden_states",
         "gguf": "num_aux_hidden_states"} | {"openvino": "num_aux_hidden_states"}),
    "eagle3, other taps": ("eagle3", {**FULL, "taps": [1, 3, 6]}, {"safeailab": "taps"}),
    "eagle3, default taps": ("eagle3", {**FULL, "taps": None}, {}),
    "eagle3, taps in disorder": ("eagle3", {**FULL, "taps": [5, 2, 4]}, dict.fromkeys(ALL[:-1], "taps")),
    "eagle3, tap 0": ("eagle3", {**FULL, "taps": [0, 2, 4]},
        dict.fromkeys(("safeailab", "sglang", "tensorrt-llm"), "taps")),
    "eagle3, last boundary": ("eagle3", {**FULL, "taps": [2, 4, 8]}, dict.fromkeys(("safeailab", "sglang"), "taps")),
    "eagle3, after the norm": ("eagle3", {**FULL, "taps": [2, 4, 9]}, dict.fromkeys(ALL, "taps")),
    "eagle3, gelu": ("eagle3", {**FULL, "hidden_act": "gelu"},
        dict.fromkeys((*ALL[1:6], "gguf"), "hidden_act")),
    "eagle3, theta": ("eagle3", {**FULL, **rope("default", rope_theta=123456.7)}, {}),
    "eagle3, eps": ("eagle3", {**FULL, "rms_norm_eps": 1e-5}, {}),
    "eagle3, linear": ("eagle3", {**FULL, **rope("linear", factor=2.0)}, {"atom": "rope_parameters"}),
    "eagle3, dynamic": ("eagle3", {**FULL, **rope("dynamic", factor=2.0)}, dict.fromkeys(ALL[1:], "rope_parameters")),
    "eagle3, llama3": ("eagle3", {**FULL, "rope_parameters": LLAMA3},
        dict.fromkeys(("safeailab", "atom"), "rope_parameters")),
    "eagle3, yarn": ("eagle3", {**FULL, "rope_parameters": YARN},
        dict.fromkeys(("safeailab", "atom"), "rope_parameters")),
    "eagle3, yarn and its factor": ("eagle3", {**FULL, "rope_parameters": {**YARN, "attention_factor": 1.1}},
        dict.fromkeys((*ALL[:6], "gguf"), "rope_parameters")),
    "eagle3, longrope": ("eagle3", {**FULL, "rope_parameters": LONG}, dict.fromkeys(ALL, "rope_parameters")),
    "eagle3, wider": ("eagle3", {**FULL, "hidden_size": 48, "head_dim": 8, "embedding": "own", "head": "own"},
        {"sglang": "embedding"} | {"openvino": "hidden_size embedding"}),
    "eagle3, wider heads": ("eagle3", {**FULL, "head_dim": 16}, {}),
    "eagle3, a tree": ("eagle3", {**FULL, "default_tree": "dynamic:4,3,9"}, {}),
    "eagle3, window": ("eagle3", {**FULL, "draft_window": 64}, dict.fromkeys(ALL, "draft_window")),
    "eagle3, sliding": ("eagle3", {**FULL, **SLIDING}, dict.fromkeys({*ALL} - {"vllm"}, "sliding_window")),
    "eagle3, sliding from the draft": ("eagle3", {**FULL, **SLIDING, "sliding_anchored": True},
        dict.fromkeys({*ALL} - {"speculators"}, "sliding_window")),
    "eagle1": ("eagle1", E1, {"vllm": "bias"} | dict.fromkeys(ALL[3:], "kind")),
    "eagle1, no bias": ("eagle1", {**E1, "bias": False}, {"sglang": "bias"} | dict.fromkeys(ALL[3:], "kind")),
    "eagle1, own embedding": ("eagle1", {**E1, "bias": False, "embedding": "own"},
        {"sglang": "bias embedding"} | dict.fromkeys(ALL[3:], "kind")),
    "eagle1, own head": ("eagle1", {**E1, "bias": False, "head": "own"},
        {"safeailab": "head", "sglang": "bias head", "vllm": "head"} | dict.fromkeys(ALL[3:], "kind")),
    "eagle1, qkv_bias": ("eagle1", {**E1, "qkv_bias": True, "bias": False},
        {"sglang": "bias qkv_bias"} | dict.fromkeys(ALL[3:], "kind")),
    "eagle1, biases": ("eagle1", {**E1, "attention_bias": True, "mlp_bias": True, "bias": False},
        {"safeailab": "attention_bias mlp_bias", "sglang": "bias attention_bias mlp_bias"}
        | dict.fromkeys(ALL[3:], "kind")),
    "eagle1, reduced": ("eagle1", {**E1, "draft_vocab_size": 120, "bias": False},
        {"safeailab": "draft_vocab_size", "sglang": "draft_vocab_size bias", "vllm": "draft_vocab_size"}
        | dict.fromkeys(ALL[3:], "kind")),
    "eagle1, wider heads": ("eagle1", {**E1, "head_dim": 16, "bias": False},
        {"safeailab": "head_dim", "sglang": "bias"} | dict.fromkeys(ALL[3:], "kind")),
    "eagle1, two layers": ("eagle1", {**E1, "num_hidden_layers": 2, "bias": False},
        {"sglang": "bias"} | dict.fromkeys(ALL[3:], "kind")),
    "mla": ("mla", E3, {"atom": "draft_vocab_size", "tensorrt-llm": "rope_parameters"}),
    "mla, full": ("mla", FULL, {"tensorrt-llm": "rope_parameters"}),
    "mla, yarn": ("mla", {**FULL, "rope_parameters": YARN}, {}),
    "mla, 3.1": ("mla", {**FULL, "rope_parameters": YARN, "fc_norm": True, "norm_output": True}, {}),
    "mla, yarn and mscale": ("mla", {**FULL, "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}}, {}),
    "mla, yarn and half of it": ("mla", {**FULL, "rope_parameters": {**YARN, "mscale": 0.7}},
        dict.fromkeys(("sglang", "vllm", "atom", "tensorrt-llm"), "rope_parameters")),
    "mla, plain queries": ("mla", {**FULL, "rope_parameters": YARN, "q_lora_rank": None},
        dict.fromkeys(("vllm", "atom", "tensorrt-llm"), "q_lora_rank")),
    "mla, halves": ("mla", {**FULL, "rope_parameters": YARN, "rope_interleave": False},
        dict.fromkeys(("sglang", "vllm", "atom", "tensorrt-llm"), "rope_interleave")),
    "mla, norm_before_fc": ("mla", {**FULL, "rope_parameters": YARN, "norm_before_fc": True},
        dict.fromkeys(("vllm", "atom"), "norm_before_fc")),
    "mla, norm_before_residual": ("mla", {**FULL, "rope_parameters": YARN, "norm_before_residual": True},
        dict.fromkeys(("sglang", "atom", "tensorrt-llm"), "norm_before_residual")),
    "mla, attention_bias": ("mla", {**FULL, "rope_parameters": YARN, "attention_bias": True},
        dict.fromkeys(("sglang", "vllm", "atom", "tensorrt-llm"), "attention_bias")),
    "mla, mlp_bias": ("mla", {**FULL, "rope_parameters": YARN, "mlp_bias": True},
        dict.fromkeys(("sglang", "vllm", "atom", "tensorrt-llm"), "mlp_bias")),
    "mla, two layers": ("mla", {**FULL, "rope_parameters": YARN, "num_hidden_layers": 2},
        dict.fromkeys(("sglang", "atom", "tensorrt-llm"), "num_hidden_layers")),
    "dflash": ("dflash", BLOCK, {}),
    "dflash, all own": ("dflash", {**BLOCK, "embedding": "own", "head": "own"}, {"sglang": "embedding head"}),
    "dflash, own embedding": ("dflash", {**BLOCK, "embedding": "own"}, {"sglang": "embedding"}),
    "dflash, reduced": ("dflash", {**BLOCK, "draft_vocab_size": 120}, {"sglang": "draft_vocab_size"}),
    "dflash, two layers": ("dflash", {**BLOCK, "num_hidden_layers": 2}, {}),
    "dflash, default taps": ("dflash", {**BLOCK, "taps": None, "num_aux_hidden_states": 1}, {}),
    "dflash, other blocks": ("dflash", {**BLOCK, "block_size": 9, "mask_token_id": 7}, {}),
    "dflash, taps in disorder": ("dflash", {**BLOCK, "taps": [5, 2, 4]}, dict.fromkeys(ALL[1:4], "taps")),
    "dflash, tap 0": ("dflash", {**BLOCK, "taps": [0, 2, 4]}, {"sglang": "taps"}),
    "dflash, last boundary": ("dflash", {**BLOCK, "taps": [2, 4, 8]}, {"sglang": "taps"}),
    "dflash, anchor predicts": ("dflash", {**BLOCK, "sample_from_anchor": True},
        dict.fromkeys((*ALL[1:4], "gguf"), "sample_from_anchor")),
    "dflash, no norms": ("dflash", {**BLOCK, "qk_norm": False}, dict.fromkeys((*ALL[1:4], "gguf"), "qk_norm")),
    "dflash, attention_bias": ("dflash", {**BLOCK, "attention_bias": True}, {"gguf": "attention_bias"}),
    "dflash, mlp_bias": ("dflash", {**BLOCK, "mlp_bias": True}, dict.fromkeys((*ALL[1:4], "gguf"), "mlp_bias")),
    "dflash, gelu": ("dflash", {**BLOCK, "hidden_act": "gelu"}, dict.fromkeys((*ALL[1:4], "gguf"), "hidden_act")),
    "dflash, eps": ("dflash", {**BLOCK, "rms_norm_eps": 1e-5}, {}),
    "dflash, llama3": ("dflash", {**BLOCK, "rope_parameters": LLAMA3}, {}),
    "dflash, yarn": ("dflash", {**BLOCK, "rope_parameters": YARN}, {}),
    "dflash, longrope": ("dflash", {**BLOCK, "rope_parameters": LONG},
        dict.fromkeys((*ALL[1:4], "gguf"), "rope_parameters")),
    "dflash, wider": ("dflash", {**BLOCK, "hidden_size": 48, "head_dim": 8, "embedding": "own", "head": "own"},
        {"sglang": "hidden_size embedding head", "speculators": "hidden_size", "gguf": "hidden_size"}),
    "dflash, wider heads": ("dflash", {**BLOCK, "head_dim": 16}, {}),
    "dflash, a tree": ("dflash", {**BLOCK, "default_tree": "dynamic:4,3,9"}, {}),
    "dflash, window": ("dflash", WINDOW, {"speculators": "sliding_window"}),
    "dflash, window both ways": ("dflash", {**WINDOW, "is_causal": False},
        dict.fromkeys(("sglang", "speculators"), "sliding_window")),
    "dflash, window from the anchor": ("dflash", {**WINDOW, "sliding_anchored": True},
        dict.fromkeys(("sglang", "vllm", "gguf"), "sliding_window")),
    "dflash, windows by layer": ("dflash", MIXED, dict.fromkeys(("speculators", "gguf"), "sliding_window")),
    "dflash, narrow window": ("dflash", {**WINDOW, "sliding_window": 2, "is_causal": False},
        dict.fromkeys(("sglang", "speculators", "gguf"), "sliding_window")),
    "dspark, windows by layer": ("dspark", MIXED, dict.fromkeys(("sglang", "speculators", "gguf"), "sliding_window")),
    "jetspec": ("dflash", {**BLOCK, "is_causal": True},
        dict.fromkeys(("sglang", "speculators"), "causal")),
    "dspark, causal": ("dspark", {**BLOCK, "is_causal": True}, dict.fromkeys(ALL[1:4], "causal")),
    "dflash2": ("dflash2", {**BLOCK, **SELECTOR}, dict.fromkeys({*ALL} - {"sglang", "gguf"}, "kind")),
    "dflash2, window": ("dflash2", {**WINDOW, **SELECTOR, "is_causal": False},
        dict.fromkeys({*ALL} - {"sglang", "gguf"}, "kind")),
    "dflash2, windows by layer": ("dflash2", {**MIXED, **SELECTOR},
        {"gguf": "sliding_window"} | dict.fromkeys({*ALL} - {"sglang", "gguf"}, "kind")),
    "dflash2, many candidates": ("dflash2", {**BLOCK, **SELECTOR, "selector_top_k": 6},
        {"gguf": "selector_top_k"} | dict.fromkeys({*ALL} - {"sglang", "gguf"}, "kind")),
    "dflash2, reduced": ("dflash2", {**BLOCK, **SELECTOR, "draft_vocab_size": 120},
        dict.fromkeys(("sglang", "gguf"), "draft_vocab_size") | dict.fromkeys({*ALL} - {"sglang", "gguf"}, "kind")),
    "domino": ("domino", BLOCK, dict.fromkeys(ALL, "kind")),
    "xpress": ("xpress", BLOCK, dict.fromkeys(ALL, "kind")),
    "lilicorr": ("lilicorr", BLOCK, dict.fromkeys(ALL, "kind")),
    "dspark": ("dspark", BLOCK, {}),
    "dspark, all own": ("dspark", {**BLOCK, "embedding": "own", "head": "own"}, {"sglang": "embedding head"}),
    "dspark, reduced": ("dspark", {**BLOCK, "draft_vocab_size": 120}, {"sglang": "draft_vocab_size"}),
    "dspark, known anchor": ("dspark", {**BLOCK, "sample_from_anchor": False}, {"sglang": "sample_from_anchor"}),
    "dspark, no Markov head": ("dspark",
        {**BLOCK, "markov_rank": 0, "enable_confidence_head": False, "confidence_head_with_markov": False},
        {"sglang": "markov_rank enable_confidence_head"}
        | dict.fromkeys(("vllm", "speculators", "gguf"), "markov_rank")),
    "dspark, gated": ("dspark", {**BLOCK, "markov_rank": 8, "markov_head_type": "gated"},
        dict.fromkeys(("vllm", "speculators", "gguf"), "markov_head_type")),
    "dspark, rnn": ("dspark", {**BLOCK, "markov_rank": 8, "markov_head_type": "rnn"},
        dict.fromkeys(("vllm", "speculators", "gguf"), "markov_head_type")),
    "dspark, no confidence": ("dspark", {**BLOCK, "enable_confidence_head": False},
        {"sglang": "enable_confidence_head"}),
    "dspark, confidence alone": ("dspark", {**BLOCK, "confidence_head_with_markov": False},
        {"gguf": "confidence_head_with_markov"}),
    "peagle": ("peagle", {**E3, "mask_token_id": 7}, {}),
    "peagle, all own": ("peagle", {**FULL, "embedding": "own", "head": "own", "num_depths": 5}, {}),
    "peagle, norms": ("peagle", {**FULL, "norm_before_residual": True, "norm_before_fc": True, "qk_norm": True}, {}),
    "peagle, fc_norm": ("peagle", {**FULL, "fc_norm": True}, {"speculators": "fc_norm"}),
    "peagle, every norm": ("peagle", {**FULL, "fc_norm": True, "norm_before_fc": True},
        {"vllm": "norm_before_fc", "speculators": "fc_norm norm_before_fc"}),
    "peagle, four taps": ("peagle", {**FULL, "taps": [1, 2, 4, 5], "num_aux_hidden_states": 4, "num_hidden_layers": 2},
        {"speculators": "num_aux_hidden_states"}),
    "peagle, qk_norm and biases": ("peagle", {**FULL, "qk_norm": True, "attention_bias": True, "mlp_bias": True},
        dict.fromkeys(("vllm", "speculators"), "attention_bias mlp_bias")),
    "peagle, longrope": ("peagle", {**FULL, "taps": [5, 2, 4], "rope_parameters": LONG},
        dict.fromkeys(("vllm", "speculators"), "taps rope_parameters")),
    "peagle, sliding": ("peagle",
        {**FULL, **SLIDING, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}, {}),
    "peagle, sliding from the draft": ("peagle",
        {**FULL, **SLIDING, "num_hidden_layers": 1, "sliding_anchored": True},
        dict.fromkeys(("vllm", "speculators"), "sliding_window")),
    "mlp": ("mlp", {"embedding": "shared", "head": "shared"}, dict.fromkeys(ALL, "kind")),
    "medusa": ("medusa", {"head": "shared"}, dict.fromkeys(ALL, "kind")),
    "mtp": ("mtp", {**E1, "zero_first": True}, dict.fromkeys(ALL, "kind")),
}  # fmt: skip
for _name, (_kind, _settings, _refused) in TABLE.items():
    if _kind == "mla":
        _refused.update(dict.fromkeys(("safeailab", "speculators", "openvino", "gguf"), "kind"))
    if _kind in ("dflash", "dspark"):
        _refused.update(dict.fromkeys(("safeailab", "atom", "tensorrt-llm", "openvino"), "kind"))
    if _kind == "peagle":
        _refused.update(dict.fromkeys(set(ALL) - {"vllm", "speculators"}, "kind"))


def build(name: str) -> DraftNetwork:
    """A random drafter of a row, in bfloat16's numbers so that no format has to round."""
    kind, settings, _ = TABLE[name]
    vocab = len(tokenizer())
    given = {**settings, "vocab_size": vocab, "draft_vocab_size": settings.get("draft_vocab_size") or vocab}
    made = tiny.network(kind, **{"target_hidden_size": tiny.HIDDEN, **given})
    if made.config.draft_vocab_size == vocab:
        set_vocabulary(made, torch.arange(vocab))
    return made.to(torch.bfloat16).to(torch.float32)


@torch.inference_mode()
def logits(network: DraftNetwork) -> Tensor:
    """Over two steps, written out here."""
    config = network.config
    draw = torch.Generator().manual_seed(5)
    taps = torch.randn(1, 7, config.tap_count, config.target_hidden_size, generator=draw)
    tokens = torch.randint(config.vocab_size, (1, 7), generator=draw)
    mask = torch.ones(1, 1, 7, 7).tril().bool()

    def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return grouped_attention(q, k, v, mask)

    if isinstance(network, BlockNetwork):
        context = network.fuse(taps)
        network.read(context, torch.arange(7)[None], lambda *_: None)
        tokens = tokens[:, : network.config.guesses]
        mask = mask[..., : tokens.shape[1], : tokens.shape[1]]
        states = network.states(network.embed(tokens), torch.arange(tokens.shape[1])[None], attend)
        block = network.begin(Block(states, tokens[:, :2], context[:, -1], 0))
        return network.joined_logits(network.joined(block, tokens))
    fed, one = network.step(tokens, network.fuse(taps), torch.arange(7)[None], attend)
    _, two = network.step(tokens.flip(1), fed, 400 + torch.arange(7)[None], attend)
    return torch.stack((network.logits(one), network.logits(two)))


Saved = tuple[DraftNetwork, Path, Tensor]


@pytest.fixture(scope="module")
def saved(served_target: ServedTarget, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Saved]:
    """A row's drafter, its directory and its logits, once for all consumers."""

    @cache
    def save(name: str) -> Saved:
        original = build(name)
        path = tmp_path_factory.mktemp("drafter")
        if "shared" in (original.config.embedding, original.config.head):
            original.borrow(served_target.partial)
        save_network(original, path, {"note": "x"})
        return original, path, logits(original)

    return save


@pytest.mark.every(3)
@pytest.mark.parametrize(("name", "consumer"), tiny.sample([*TABLE], ALL))
def test_a_round_trip_or_a_refusal(
    name: str, consumer: str, saved: Callable[[str], Saved], served_target: ServedTarget, tmp_path: Path
) -> None:
    original, drafter, expected = saved(name)
    output = tmp_path / "out"
    refused = TABLE[name][2].get(consumer)
    if refused is not None:
        with pytest.raises(ExportError) as caught:
            export(drafter, consumer, output, served_target)
        lines = [line.strip() for line in str(caught.value).splitlines()[1:-1]]
        assert {line.partition(":")[0] for line in lines} == set(refused.split())
        assert "What you can do: serve it with" in str(caught.value)
        assert not output.exists()
        return
    done = export(drafter, consumer, output, served_target)
    loaded = load_network(output, served_target.partial)
    found = loaded.state_dict()
    for key, tensor in original.state_dict().items():
        if key in found:
            assert torch.equal(found.pop(key), tensor), key
        else:  # left out only where it is the target's
            assert key in ("embed_tokens.weight", "lm_head.weight")
            assert done.changes
    assert set(found) <= {"embed_tokens.weight", "lm_head.weight"}  # copies of the target's
    layers = served_target.partial.num_layers
    assert loaded.config.taps == (original.config.taps_of(layers) if TABLE[name][0] != "eagle1" else None)
    # biased layers round by where their weights lie in memory: built here, mapped from a file there
    rounded = bool(done.changes) or getattr(original.config, "markov_head_type", "vanilla") != "vanilla"
    close = {"rtol": 1e-4, "atol": 1e-4} if rounded else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(logits(loaded), expected, **close)
    assert str(output) in done.command
    assert "accept length | not measured" in (output / "README.md").read_text()


@pytest.mark.parametrize(("consumer", "shares"), [("vllm", True), ("sglang", True), ("atom", False)])
def test_an_embedding_that_is_the_target_s_is_left_out_where_it_is_shared(
    consumer: str, shares: bool, served_target: ServedTarget, tmp_path: Path
) -> None:
    network = build("eagle3, full, all own")
    weight = served_target.embedding.to(torch.float32)
    with torch.no_grad():
        network.embed_tokens.weight.copy_(weight)
    save_network(network, tmp_path / "drafter")
    done = export(tmp_path / "drafter", consumer, tmp_path / "out", served_target)
    found = open_checkpoint(tmp_path / "out")
    assert found.config.embedding == ("shared" if shares else "own")
    assert done.sizes.get("embedding") == (None if shares else weight.nbytes)
    assert any("MB left out" in change for change in done.changes) is shares


def test_the_table_has_every_kind_and_consumer_and_toggle() -> None:
    assert {row[0] for row in TABLE.values()} == set(tiny.TRAINED)
    assert set(CONSUMERS) == set(ALL)
    neutral = {"hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size",
               "max_position_embeddings", "target_hidden_size", "kv_lora_rank", "qk_nope_head_dim",
               "qk_rope_head_dim", "v_head_dim"}  # fmt: skip
    for kind in ("eagle1", "eagle3", "mla"):
        tried = {key for row in TABLE.values() if row[0] == kind for key in row[1]}
        fields = set(KINDS[kind].config.model_fields) - neutral
        missing = (
            fields
            - tried
            - (
                {
                    "taps",
                    "hidden_act",
                    "rope_parameters",
                    "rms_norm_eps",
                    "default_tree",
                    "num_aux_hidden_states",
                    "rope_interleave",
                    "draft_window",
                }
                if kind != "eagle3"
                else set()
            )
        )
        assert not missing, (kind, missing)
