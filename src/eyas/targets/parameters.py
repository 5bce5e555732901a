"""How many parameters a model has: counted alike wherever its weights are kept, packed or not."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import nn

from eyas.targets.fingerprint import weight_shapes
from eyas.targets.linears import PrepackedLinear
from eyas.targets.native.packed_linears import PackedEmbedding


def parameter_count(model: nn.Module) -> int:
    """The number of a loaded model's parameters, native layers' included; a tied one counts once.

    Quantized weights count as what they stand for, not as the numbers that they are stored in.
    """
    if getattr(model, "is_quantized", False):  # by a library, whose layers have scales and several weights in a number
        return described_parameter_count(type(model), model.config)
    return sum(map(prod, weight_shapes(model).values()))


def weight_bytes(model: nn.Module) -> int:
    """The memory of a loaded model's tensors, packed ones included; a tied one counts once."""
    tensors = {}
    for part in model.modules():
        held = part.table if isinstance(part, PackedEmbedding) else part
        for tensor in (*part._parameters.values(), *part._buffers.values(), *vars(held).values()):
            if isinstance(tensor, torch.Tensor):
                tensors[id(tensor)] = tensor.nbytes
    return sum(tensors.values())


def described_parameter_count(model_class: type[Any], config: Any) -> int:
    """The number of parameters of a transformers `model_class` with this config, from the config alone."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in model_class(config).parameters())


def weight_formats(model: nn.Module) -> str | None:
    """The 4-bit and 8-bit formats of a model's packed weights, such as `Q4_1, Q8_0`; None if there are none."""
    found = {module.name for module in model.modules() if isinstance(module, PrepackedLinear)}
    return ", ".join(sorted(name for name in found if name is not None)) or None
