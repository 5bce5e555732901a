"""Linear layers for a CPU: weights prepacked for its matrix kernels.

A plain `nn.Linear` reads its row-major weight at little more than half the memory's speed when there are few tokens;
oneDNN's own blocked layout is read at full speed, which bounds decoding. Modules are replaced generically, as by
quantisation: no model code is touched. The numbers stay the same up to float rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

PREPACKABLE = (torch.float32, torch.bfloat16)
"""Dtypes that oneDNN has prepacked kernels for."""
SAMPLED = 1024
"""Row-major values of a weight that are kept for fingerprints."""


def can_prepack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are prepacked kernels for this device and dtype."""
    return (
        device.type == "cpu"
        and dtype in PREPACKABLE
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and (dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def prepack_linears(
    module: nn.Module,
    layout: Callable[..., PrepackedLinear] | None = None,
    dtype: torch.dtype | None = None,
) -> int:
    """Replace every plain float `nn.Linear` below `module` by a prepacked one; returns how many were replaced.

    So is GPT-2's `Conv1D`, a linear with a transposed weight. By default the new ones are in oneDNN's layout.
    With a `dtype`, the only one that `layout` is for, weights in another stay as they are.
    Quantised layers stay as they are, whoever made them. Tied weights also stay row-major, for the embedding.
    """
    made = layout or PrepackedLinear
    shared = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    found = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if _is_plain(child) and dtype in (None, child.weight.dtype)
    ]
    for parent, name, child in found:
        transposed = not isinstance(child, nn.Linear)
        setattr(parent, name, made(_untransposed(child), shared=id(child.weight) in shared, transposed=transposed))
        if id(child.weight) not in shared:
            child.weight = nn.Parameter(torch.empty(0), requires_grad=False)  # free it before the next is prepacked
    return len(found)


def _untransposed(module: nn.Linear | Conv1D) -> nn.Linear:
    """A linear, or the one that computes what a `Conv1D` does."""
    if isinstance(module, nn.Linear):
        return module
    inputs, outputs = module.weight.shape
    linear = nn.Linear(inputs, outputs, device="meta")
    linear.weight = nn.Parameter(module.weight.detach().T.contiguous(), requires_grad=False)
    linear.bias = module.bias
    return linear


def _is_plain(module: nn.Module) -> TypeGuard[nn.Linear | Conv1D]:
    """Whether a module is a linear, or a `Conv1D`, of float weights and computes as such.

    Libraries quantise by subclassing the layer or its weight, by adding tensors to it, or others for its weight, or by
    replacing its `forward`.
    """
    if type(module) not in (nn.Linear, Conv1D) or set(module._parameters) != {"weight", "bias"}:
        return False
    added = [*module._buffers, *module._forward_hooks, *module._forward_pre_hooks]
    own = type(module.weight.data) is Tensor and not added and "forward" not in vars(module)
    return own and module.weight.dtype in PREPACKABLE


class PrepackedLinear(nn.Module):
    """A frozen replacement of `nn.Linear` in oneDNN's layout; subclasses have another.

    It holds the prepacked weight only, unless the weight is an embedding's.
    """

    bias: Tensor | None

    def __init__(
        self, linear: nn.Linear, shared: bool, stacked: Tensor | None = None, transposed: bool = False
    ) -> None:
        """Whether the weight is `shared` with an embedding, and how the model's own parameter differs from it.

        `stacked` is one [E, ...] that holds the weights of which this one was made; it may be the `transposed` one.
        """
        super().__init__()
        self.stacked = None if stacked is None else tuple(stacked.shape)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._dtype = linear.weight.dtype
        self.transposed = transposed
        given = linear.weight.T if transposed else linear.weight if stacked is None else stacked
        rows = 1 + SAMPLED // given[0].numel()  # not all of them: what is transposed would be copied
        self._first = given.detach()[:rows].flatten()[:SAMPLED].clone()
        self._shared = linear.weight if shared else None
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach(), persistent=False)
        self._prepacked = self._pack(linear.weight.detach())

    def _pack(self, weight: Tensor) -> Tensor:
        """A row-major weight [out, in] in this layout."""
        prepacked: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
        return prepacked

    def restored(self) -> Tensor:
        """The row-major weight [out, in] of the prepacked one."""
        return self._prepacked.to_dense()

    def multiply(self, x: Tensor) -> Tensor:
        """Multiply x [..., in] of the weight's dtype -> [..., out], without a gradient."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._prepacked, self.bias, "none", [], "")
        return out

    @property
    def weight(self) -> Tensor:
        """The row-major weight [out, in], restored on demand for callers that read it rather than multiply."""
        return self.restored() if self._shared is None else self._shared

    @property
    def tied(self) -> bool:
        """Whether the weight is an embedding's as well."""
        return self._shared is not None

    def first(self, count: int) -> Tensor:
        """The first `count` values of the model's own parameter (at most 1024), without restoring it."""
        return self._first[:count]

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x [..., in] -> [..., out], with a gradient to `x` if it requires one."""
        x = x.to(self._dtype)
        if torch.is_grad_enabled() and x.requires_grad:
            traced: Tensor = _Product.apply(x, self.multiply, self.restored)  # type: ignore[no-untyped-call]
            return traced
        return self.multiply(x)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, dtype={self._dtype}"


class _Product(torch.autograd.Function):
    """A product with a frozen prepacked weight whose input has a gradient (a drafter that trains below a head)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, multiply: Callable[[Tensor], Tensor], restored: Callable[[], Tensor]) -> Tensor:
        ctx.restored = restored
        return multiply(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0] @ ctx.restored(), None, None
