"""Tiny random target checkpoints with an MTP module in each published layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from torch import Tensor

from ... import tiny

HIDDEN, LAYERS = tiny.HIDDEN, tiny.LAYERS

_GLM: dict[str, Any] = {
    "vocab_size": tiny.VOCAB, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1, "use_qk_norm": True, "attention_bias": True, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}  # fmt: skip

_OUTER = {
    "deepseek": {
        "enorm": "{p}enorm", "hnorm": "{p}hnorm", "proj": "{p}eh_proj", "norm": "{p}shared_head.norm",
        "head": "{p}shared_head.head", "embedding": "{p}embed_tokens",
    },
    "nemotron": {
        "enorm": "{p}0.enorm", "hnorm": "{p}0.hnorm", "proj": "{p}0.eh_proj", "norm": "{p}1.final_layernorm",
    },
    "qwen": {
        "enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden", "proj": "mtp.fc", "norm": "mtp.norm",
    },
    "mimo": {
        "enorm": "{p}token_layernorm", "hnorm": "{p}hidden_layernorm", "proj": "{p}input_proj",
        "norm": "{p}final_layernorm",
    },
}  # fmt: skip
_PREFIX = {
    "deepseek": "model.layers.{layer}.", "qwen": "mtp.layers.{module}.", "mimo": "model.mtp_layers.{module}.",
    "nemotron": "mtp.layers.",
}  # fmt: skip
_BLOCKS = {"nemotron": {"0.": 1, "1.": 3}}
"""Layout -> prefix of each layer in a module -> the target's layer that it copies; by default the last."""


def model(architecture: str) -> Any:
    """A random model; GLM-4.5 isn't among the shared architectures."""
    if architecture != "glm4moe":
        return tiny.build_model(architecture)
    torch.manual_seed(0)
    made = tf.AutoModelForCausalLM.from_config(tf.Glm4MoeConfig(**_GLM)).eval().requires_grad_(False)
    for parameter in made.parameters():
        if parameter.dim() > 1:
            parameter.copy_(torch.randn_like(parameter) * 0.28)
        else:
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return made


def module_tensors(target: Any, layout: str, module: int = 0) -> dict[str, Tensor]:
    """A random MTP module for a model, under the names of a layout."""
    torch.manual_seed(5 + module)
    hidden, layers = target.config.hidden_size, target.config.num_hidden_layers
    prefix = _PREFIX[layout].format(layer=layers + module, module=module)
    held: dict[str, Tensor] = {}
    blocks = _BLOCKS.get(layout, {"": -1})
    states = {
        stem + name: tensor
        for stem, layer in blocks.items()
        for name, tensor in target.model.layers[layer].state_dict().items()
    }
    for name, tensor in states.items():
        norm = tensor.dim() == 1 and "norm" in name
        drawn = torch.randn_like(tensor) * (0.1 if tensor.dim() == 1 else 0.3) + (1.0 if norm else 0.0)
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(drawn):
                gate, up = both.chunk(2)
                stem = f"{prefix}{name.removesuffix('gate_up_proj')}{expert}."
                held[stem + "gate_proj.weight"] = gate.clone()
                held[stem + "up_proj.weight"] = up.clone()
        elif name.endswith(("experts.down_proj", "experts.up_proj")):
            stem, _, part = name.rpartition(".")
            for expert, one in enumerate(drawn):
                held[f"{prefix}{stem}.{expert}.{part}.weight"] = one.clone()
        else:
            held[prefix + name] = drawn
    names = {part: name.format(p=prefix) + ".weight" for part, name in _OUTER[layout].items()}
    for part in ("enorm", "hnorm", "norm"):
        held[names[part]] = 1 + 0.1 * torch.randn(hidden)
    held[names["proj"]] = 0.3 * torch.randn(hidden, 2 * hidden)
    if layout == "deepseek":  # published files repeat the target's tensors
        held[names["embedding"]] = target.get_input_embeddings().weight.clone()
        held[names["head"]] = target.get_output_embeddings().weight.clone()
    if layout == "qwen":
        held = {name: tensor - 1 if "norm" in name else tensor for name, tensor in held.items()}
    return held


def save(path: Path, architecture: str, layout: str | None, modules: int = 1) -> dict[str, Tensor]:
    """Save a target with modules of a layout (None: without modules); returns the modules' tensors as in the file."""
    made = model(architecture)
    made.save_pretrained(path)
    if layout is None:
        return {}
    held = {name: tensor for i in range(modules) for name, tensor in module_tensors(made, layout, i).items()}
    save_file({**load_file(path / "model.safetensors"), **held}, path / "model.safetensors", metadata={"format": "pt"})
    return held
