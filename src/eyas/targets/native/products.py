"""Which kernels multiply a model's linear layers on this machine, and how."""

from __future__ import annotations

import torch
from torch import nn

from eyas.targets.linears import PrepackedLinear
from eyas.targets.native.library import KINDS, MAX_TOKENS_PER_PRODUCT, Microkernel, loaded_kernels
from eyas.targets.native.linears import NativeLinear
from eyas.targets.native.microkernels import chosen_microkernels
from eyas.targets.native.packed import WeightFormat
from eyas.targets.native.packed_linears import PackedLinear


def _microkernels_of(model: nn.Module) -> int | None:
    """What computes most of a model's native products, see `chosen_microkernels`; None if none, or integers."""
    weights = {module.kind for module in model.modules() if isinstance(module, NativeLinear)} - set(WeightFormat)
    return None if not weights or _is_packed(model) else chosen_microkernels() * (KINDS[torch.bfloat16] in weights)


def _is_packed(model: nn.Module) -> bool:
    return any(isinstance(module, PackedLinear) for module in model.modules())


def multiplies_by_vectors(model: nn.Module) -> bool:
    """Whether a model's products are native and without tiles, so that few tokens already make them compute-bound."""
    return _is_packed(model) or _microkernels_of(model) not in (None, Microkernel.TILES)


def describe_products(model: nn.Module) -> str:
    """Which kernels multiply a model's linear layers on this machine, and how, for the log."""
    if _is_packed(model):
        return "eyas's, in integers" + " (VNNI)" * loaded_kernels().vnni
    microkernels = _microkernels_of(model)
    if microkernels is None:
        return "oneDNN's" if any(isinstance(module, PrepackedLinear) for module in model.modules()) else "PyTorch's"
    if microkernels == Microkernel.TILES:
        return "eyas's, by AMX tiles"
    tokens = [str(tokens) for tokens in range(1, MAX_TOKENS_PER_PRODUCT + 1) if microkernels >> tokens & 1]
    return "eyas's" + f", in pairs (vdpbf16ps) where {', '.join(tokens)} tokens go together" * bool(tokens)
