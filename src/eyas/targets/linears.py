"""Linear layers for a CPU: weights prepacked for its matrix kernels.

For few tokens, a plain `nn.Linear` reads its row-major weight at little more than half the memory bandwidth. oneDNN's
own blocked layout is read at full bandwidth, and bandwidth is what limits decoding. Modules are replaced generically,
as quantization libraries do it, without touching model code. Results stay the same up to float rounding.
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
"""Number of row-major values of a weight that are kept for fingerprints."""


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
    """Replace every plain float `nn.Linear` below `module` by a prepacked one; return how many were replaced.

    GPT-2's `Conv1D`, a linear with a transposed weight, is replaced too. The default `layout` is oneDNN's. Given a
    `dtype`, the only one that `layout` supports, weights of other dtypes stay as they are. So do layers that a library
    has quantized. Tied weights are also kept in row-major order, for the embedding.
    """
    made = layout or PrepackedLinear
    shared = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    found = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if _is_plain(child) and child.weight.dtype in (PREPACKABLE if dtype is None else (dtype,))
    ]
    for parent, name, child in found:
        transposed = not isinstance(child, nn.Linear)
        setattr(parent, name, made(_untransposed(child), shared=id(child.weight) in shared, transposed=transposed))
        if id(child.weight) not in shared:
            child.weight = nn.Parameter(torch.empty(0), requires_grad=False)  # free it before the next is prepacked
    return len(found)


def _untransposed(module: nn.Linear | Conv1D) -> nn.Linear:
    """Return the linear itself, or for a `Conv1D` the linear that computes the same."""
    if isinstance(module, nn.Linear):
        return module
    inputs, outputs = module.weight.shape
    linear = nn.Linear(inputs, outputs, device="meta")
    linear.weight = nn.Parameter(module.weight.detach().T.contiguous(), requires_grad=False)
    linear.bias = module.bias
    return linear


def _is_plain(module: nn.Module) -> TypeGuard[nn.Linear | Conv1D]:
    """Whether a module is an unmodified linear or `Conv1D` with float weights.

    Libraries quantize by subclassing the layer or its weight, by adding tensors to the layer or replacing its weight by
    others, or by replacing its `forward`.
    """
    if type(module) not in (nn.Linear, Conv1D) or set(module._parameters) != {"weight", "bias"}:
        return False
    added = [*module._buffers, *module._forward_hooks, *module._forward_pre_hooks]
    own = type(module.weight.data) is Tensor and not added and "forward" not in vars(module)
    return own and isinstance(module.weight, Tensor) and module.weight.is_floating_point()


class PrepackedLinear(nn.Module):
    """A frozen replacement for `nn.Linear` in oneDNN's layout; subclasses have other layouts.

    It holds only the prepacked weight, unless the weight is shared with an embedding.
    """

    bias: Tensor | None
    name: str | None = None
    """Name of the format of weights in 4 and 8 bits, as users know it; None = they are floats."""

    def __init__(
        self, linear: nn.Linear, shared: bool, stacked: Tensor | None = None, transposed: bool = False
    ) -> None:
        """Pack a weight, which may be `shared` with an embedding.

        The model's own parameter may differ: the `transposed` weight, or a `stacked` one [E, ...] of several experts.
        """
        super().__init__()
        self.stacked = None if stacked is None else tuple(stacked.shape)
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._dtype = linear.weight.dtype
        self.transposed = transposed
        given = linear.weight.T if transposed else linear.weight if stacked is None else stacked
        rows = 1 + SAMPLED // given[0].numel()  # only some rows, since flattening a transposed tensor copies it
        self._first = given.detach()[:rows].flatten()[:SAMPLED].clone()
        self._shared = linear.weight if shared else None
        self.register_buffer("bias", None if linear.bias is None else linear.bias.detach(), persistent=False)
        self._prepacked = self._pack(linear.weight.detach())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weight before it was packed, and of inputs and outputs."""
        return self._dtype

    def _pack(self, weight: Tensor) -> Tensor:
        """Convert a row-major weight [out, in] to this layout."""
        prepacked: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
        return prepacked

    def restored(self) -> Tensor:
        """Convert the prepacked weight back to a row-major one [out, in]."""
        return self._prepacked.to_dense()

    def multiply(self, x: Tensor) -> Tensor:
        """Multiply x [..., in] of the weight's dtype -> [..., out], without a gradient."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._prepacked, self.bias, "none", [], "")
        return out

    @property
    def weight(self) -> Tensor:
        """The row-major weight [out, in], restored on demand for callers that read it instead of multiplying by it."""
        return self.restored() if self._shared is None else self._shared

    @property
    def tied(self) -> bool:
        """Whether the weight is also an embedding's."""
        return self._shared is not None

    def first(self, count: int) -> Tensor:
        """The first `count` (at most 1024) values of the model's own parameter, without restoring it."""
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
    """A product with a frozen prepacked weight that passes gradients to its input (a drafter trained below a head)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, multiply: Callable[[Tensor], Tensor], restored: Callable[[], Tensor]) -> Tensor:
        ctx.restored = restored
        return multiply(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0] @ ctx.restored(), None, None
