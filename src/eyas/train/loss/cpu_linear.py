"""Runs the float32 linear layers of a CPU training step through oneDNN.

torch multiplies float32 matrices with MKL, which doesn't use the AVX-512 units of AMD's processors: oneDNN is 2.2 to
2.4 times as fast there, in the product and in both gradients, and as fast as MKL on Intel's. With AVX2 alone it takes
up to a third longer for the weights' gradients, so products stay with MKL there. Results are equal up to rounding.
Weights aren't prepacked and modules aren't changed: linear layers called inside `with OneDnnLinears():` run through
this file.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


def fast_linears(device: torch.device) -> AbstractContextManager[Any]:
    """`OneDnnLinears` on a CPU with AVX-512 and a torch built with oneDNN; elsewhere a context that does nothing."""
    has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return OneDnnLinears() if device.type == "cpu" and has_onednn and wide else nullcontext()


class OneDnnLinears(TorchFunctionMode):
    """Replaces `F.linear` for plain float32 CPU tensors, except under autocast, which uses half precision."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.linear and _plain(args) and not kwargs and not torch.is_autocast_enabled("cpu"):
            return _Linear.apply(*args, *[None] * (3 - len(args)))  # type: ignore[no-untyped-call]
        return func(*args, **kwargs or {})


def _plain(args: tuple[Any, ...]) -> bool:
    """Whether all arguments are plain float32 CPU tensors or None, not shards or other subclasses."""
    return all(
        x is None or (type(x) in (Tensor, torch.nn.Parameter) and x.dtype == torch.float32 and x.device.type == "cpu")
        for x in args
    )


class _Linear(torch.autograd.Function):
    """x [..., in], weight [out, in], bias [out] or None -> [..., out]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x = x.contiguous()  # a slice, such as one of several heads, would run in oneDNN's slow reference code
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        flat = grad.flatten(0, -2)
        return (
            _product(grad, weight.T) if ctx.needs_input_grad[0] else None,
            _product(flat.T, x.flatten(0, -2).T) if ctx.needs_input_grad[1] else None,
            flat.sum(0) if ctx.needs_input_grad[2] else None,
        )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not x.numel():  # oneDNN refuses an empty batch
        return F.linear(x, weight, bias)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out
