"""Depth growth: a deeper model that computes the same function, to go on training from a shallow one.

Each layer is followed by copies of itself whose output projections are zero: at first they add nothing to
the residual stream. Training a shallow model and growing it costs a fraction of training the deep one
throughout (the idea of stacking: arXiv 1906.02341, 2405.15319; zero outputs instead of plain copies keep the
loss where it was).
"""

from __future__ import annotations

import copy

import torch
from transformers import LlamaForCausalLM

from eyas.errors import ConfigError


def grow_depth(model: LlamaForCausalLM, layers: int) -> LlamaForCausalLM:
    """`model` with `layers` layers, a multiple of what it has; same function."""
    have = model.config.num_hidden_layers
    if layers % have:
        raise ConfigError(f"can't grow {have} layers to {layers}: it must be a multiple")
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = layers
    grown = LlamaForCausalLM(config)
    times = layers // have
    state = {}
    for name, tensor in model.state_dict().items():
        head, _, tail = name.partition("model.layers.")
        if head or not tail:
            state[name] = tensor
            continue
        index, _, rest = tail.partition(".")
        writes = rest in ("self_attn.o_proj.weight", "mlp.down_proj.weight")
        for copy_number in range(times):
            value = torch.zeros_like(tensor) if writes and copy_number else tensor
            state[f"model.layers.{int(index) * times + copy_number}.{rest}"] = value
    grown.load_state_dict(state)
    return grown
