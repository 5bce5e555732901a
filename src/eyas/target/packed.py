"""Linear layers with weights packed for the CPU's matrix kernels.

A plain `nn.Linear` reads its row-major weight at little more than half the memory's speed when there are few
tokens; oneDNN's own blocked layout reads at full speed, which is what decoding is bound by. The numbers are the same
up to float rounding. Packing replaces modules generically, as quantisation does; no model code is touched.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_KEPT = 1024
PACKABLE = (torch.float32, torch.bfloat16)


class _Product(torch.autograd.Function):
    """The packed product; its weight is frozen, its input may want a gradient (a drafter that trains under it)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
        ctx.packed = packed
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0] @ ctx.packed.to_dense(), None, None


def pack(weight: Tensor) -> Tensor:
    """A weight [out, in] in oneDNN's own layout, as `multiply` takes it."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
    return packed


def multiply(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """[..., in] -> [..., out], with a gradient to `x` where it wants one."""
    if torch.is_grad_enabled() and x.requires_grad:
        traced: Tensor = _Product.apply(x, packed, bias)  # type: ignore[no-untyped-call]
        return traced
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


class PackedLinear(nn.Module):
    """A frozen stand-in for `nn.Linear`. The packed copy is the only one, unless the weight is shared."""

    bias: Tensor | None

    def __init__(self, linear: nn.Linear, shared: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._dtype = linear.weight.dtype
        self._first = linear.weight.detach().flatten()[:_KEPT].clone()
        self._packed = pack(linear.weight.detach())
        self._shared = linear.weight if shared else None
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach(), persistent=False)

    @property
    def weight(self) -> Tensor:
        """The row-major weight [out, in]: unpacked on demand, for callers that read rather than multiply."""
        return self._packed.to_dense() if self._shared is None else self._shared

    @property
    def tied(self) -> bool:
        """Is the weight also an embedding's?"""
        return self._shared is not None

    def first(self, count: int) -> Tensor:
        """The weight's first `count` values (at most 1024), without unpacking it."""
        return self._first[:count]

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return multiply(x.to(self._dtype), self._packed, self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, dtype={self._dtype}"


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Is there a packed kernel for this device and type?"""
    return (
        device.type == "cpu"
        and dtype in PACKABLE
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and (dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def pack_linears(module: nn.Module) -> int:
    """Replace every `nn.Linear` below `module`; returns how many. Tied weights stay where the embedding needs them."""
    shared = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    found = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and child.weight.dtype in PACKABLE
    ]
    for parent, name, child in found:
        setattr(parent, name, PackedLinear(child, id(child.weight) in shared))
        if id(child.weight) not in shared:
            child.weight = nn.Parameter(torch.empty(0), requires_grad=False)  # free it before the next is packed
    return len(found)
