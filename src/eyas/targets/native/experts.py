"""Mixture-of-experts layers on the native kernels: a router chooses some of a layer's MLPs for each token.

transformers keeps the weights of all experts in two stacked tensors. Their rows are contiguous, so the kernels see a
stack as one tall linear layer, with float or packed weights, and each expert as some panels of it.

Shapes: T tokens, E experts, K of them chosen per token, I size of an expert, H hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import byref
from typing import Any

import torch
from torch import Tensor, nn

from eyas.errors import UnsupportedModelError
from eyas.runtime import mapped_zeros
from eyas.targets.native.forms import ExpertsForm, RouterForm
from eyas.targets.native.library import PANEL, Experts, Gating, Linear, loaded_kernels
from eyas.targets.native.linears import NativeLinear, as_linear
from eyas.targets.native.packed_linears import PackedLinear
from eyas.targets.threads import threads_for

_LOG = logging.getLogger("eyas")
Packed = tuple[PackedLinear, PackedLinear]
"""Packed stacks: gate and up projections, and down projections."""


class NativeExperts(nn.Module):
    """A frozen replacement for transformers' stacked experts; a token's result doesn't depend on the other tokens."""

    def __init__(self, experts: Any, layout: type[NativeLinear], packed: Packed | None = None) -> None:
        """Pack the module's weights into panels, or use `packed` weights instead.

        Raises UnsupportedModelError for experts of a form that `ExpertsForm` doesn't know.
        """
        super().__init__()
        form = ExpertsForm.of(experts, experts.down_proj.dtype)
        self.num_experts, self.hidden_dim, self.intermediate_dim = form.down.shape
        self._gating = form.activation, form.alpha, form.limit
        self.first = "gate_up_proj" if form.gated else "up_proj"
        self.down_proj: NativeLinear
        first: NativeLinear
        if packed is not None:
            first, self.down_proj = packed
        else:
            both = as_linear(form.gate_up, form.gate_up_bias)
            down = as_linear(form.down, form.down_bias)
            first = layout(both, False, stacked=getattr(experts, self.first))
            self.down_proj = layout(down, False, stacked=experts.down_proj)
        setattr(self, self.first, first)
        if form.down_bias is not None:  # they stay parameters of the model
            self.gate_up_proj_bias = experts.gate_up_proj_bias
            self.down_proj_bias = experts.down_proj_bias
        size, hidden = self.intermediate_dim, self.hidden_dim
        parts = 1 + form.gated
        wanted = [(first, part, parts, size) for part in range(parts)] + [(self.down_proj, 0, 1, hidden)]
        self.linears = [
            (Linear * self.num_experts)(*(stack.rows((e * parts + part) * out, out) for e in range(self.num_experts)))
            for stack, part, parts, out in wanted
        ]
        """The gate (if any), up and down projections of all experts, as the kernels take them."""

    def struct(self, chosen: int, **router: Any) -> Experts:
        """The experts as the kernels take them, with `chosen` of them per token and the fields of a `router`."""
        gate, up, down = (None, *self.linears)[-3:]
        gating = Gating(*self._gating, 1.0)
        return Experts(gate, up, down, self.num_experts, chosen, gating=gating, **router)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Sum the outputs of experts `top_k_index` [T, K] for states [T, H], weighted by `top_k_weights` [T, K]."""
        if torch.is_grad_enabled() and hidden_states.requires_grad:
            raise RuntimeError("native experts have no gradient: set EYAS_NATIVE=0 to train through a target's layers")
        x = hidden_states.float().contiguous()
        weights = top_k_weights.float().contiguous()
        ids = top_k_index.long().contiguous()
        out = torch.empty_like(x)
        rounds = top_k_weights.dtype == torch.bfloat16
        struct = self.struct(ids.shape[1], rounds_weights=rounds)
        loaded_kernels().experts(
            byref(struct),
            x.data_ptr(),
            len(x),
            ids.data_ptr(),
            weights.data_ptr(),
            out.data_ptr(),
            hidden_states.dtype == torch.bfloat16,
            threads_for(len(x) * struct.weights),
        )
        return out.to(hidden_states.dtype)


class NativeRouter(NativeLinear):
    """A frozen replacement for a router that multiplies with the native kernels."""

    def __init__(self, form: RouterForm, dtype: torch.dtype) -> None:
        super().__init__(as_linear(form.weight, form.offset), False)
        self.form = form
        self._states = dtype

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]  # routers' own outputs
        """Return scores [T, E] of states x [..., H], and weights and indices [T, K] of the chosen experts."""
        scores = self.product(x.to(self._states), self.form.rounds_scores)
        weights, ids = self.form.choose(scores)
        rounded = self._states if self.form.rounds_scores else torch.float32
        return scores.to(rounded), weights.to(self._states if self.form.rounds_weights else torch.float32), ids


def can_stay_packed(experts: Any) -> bool:
    """Whether a module consists only of stacked weights of whole panels, so that packed weights can replace them."""
    weights = dict(experts.named_parameters())
    if set(weights) != {"gate_up_proj", "down_proj"} or any(weight.dim() != 3 for weight in weights.values()):
        return False
    count, hidden, size = weights["down_proj"].shape
    return tuple(weights["gate_up_proj"].shape) == (count, 2 * size, hidden) and size % PANEL == hidden % PANEL == 0


def replace_experts(model: nn.Module, layout: type[NativeLinear] | None, dtype: torch.dtype) -> int:
    """Replace every module of stacked experts in `dtype` below `model` by a native one; return how many were replaced.

    Their routers are replaced too, with float weights. Without a `layout`, only experts with packed weights are
    replaced. Modules that a trial shows to compute something else are left alone, and packed weights dequantized.
    """
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if not isinstance(child, NativeExperts) and (_packed(child) or (layout is not None and _is_stacked(child)))
    ]
    done = 0
    child: Any
    for parent, name, child in found:
        packed = _packed(child)
        if packed is not None:
            _replacement(child, packed, dtype, whole=False)
        made = _tried(child, layout or NativeLinear, dtype, packed)
        if made is None:
            if packed is not None:
                _replacement(child, packed, dtype, whole=True)
            continue
        setattr(parent, name, made)
        for stack in (made.first, "down_proj"):
            setattr(child, stack, None)  # free them before the next are packed
        _replace_router(parent, made, dtype)
        done += 1
    return done


def _is_stacked(module: nn.Module) -> bool:
    return hasattr(module, "down_proj") and not isinstance(module.down_proj, nn.Module)


def _packed(module: Any) -> Packed | None:
    """The packed stacks of a module of experts; None if it has no or other stacks."""
    both = getattr(module, "gate_up_proj", None)
    down = getattr(module, "down_proj", None)
    if not isinstance(both, PackedLinear) or not isinstance(down, PackedLinear) or down.stacked is None:
        return None
    return both, down


def _replacement(experts: Any, packed: Packed, dtype: torch.dtype, whole: bool) -> None:
    """Replace a module's `packed` weights by dequantized ones: the `whole` stacks, or only the experts to be tried.

    Weights that aren't written take no memory.
    """
    for name, stack in zip(("gate_up_proj", "down_proj"), packed, strict=True):
        assert stack.stacked is not None
        count, outputs, inputs = stack.stacked
        weight = mapped_zeros((count, outputs, inputs), dtype, torch.device("cpu"), huge=False)
        for expert in range(count) if whole else _tried_experts(count):
            weight[expert] = stack.lookup(torch.arange(expert * outputs, (expert + 1) * outputs))
        delattr(experts, name)
        setattr(experts, name, nn.Parameter(weight, requires_grad=False))


def _replace_router(parent: nn.Module, experts: NativeExperts, dtype: torch.dtype) -> None:
    """Replace the router among the children of `parent`, if its form is known."""
    shape = (experts.num_experts, experts.hidden_dim)
    for name, child in parent.named_children():
        weights = dict(child.named_parameters())
        if isinstance(child, nn.Linear) or "weight" not in weights or weights["weight"].shape != shape:
            continue
        try:
            setattr(parent, name, NativeRouter(RouterForm.of(child, dtype), dtype))
        except UnsupportedModelError as error:
            _LOG.info("a router isn't replaced: %s", error)


@torch.inference_mode()
def _tried(experts: Any, layout: type[NativeLinear], dtype: torch.dtype, packed: Packed | None) -> NativeExperts | None:
    """Make a native module of these experts; None, and a log line, if the two differ by more than rounding."""
    try:
        count, hidden, _ = ExpertsForm.of(experts, dtype).down.shape
    except (UnsupportedModelError, AttributeError, TypeError) as error:
        _LOG.debug("%s isn't replaced: %s", type(experts).__name__, error)
        return None
    states = torch.linspace(-3, 5, 2 * hidden).view(2, -1).cos()
    states[1] *= 100.0  # some experts clip large values
    first, middle, last = _tried_experts(count)
    ids = torch.tensor([[first, last], [middle, first]])
    weights = torch.tensor([[0.75, 0.25], [0.5, 0.5]])
    given = states.to(dtype), ids, weights.to(dtype)
    try:
        expected = experts(*given).float()
        with _as_floats(packed):
            made = NativeExperts(experts, NativeLinear, packed)  # first with float weights
            found = made(*given).float()
    except (UnsupportedModelError, RuntimeError, TypeError, AttributeError, IndexError) as error:
        _LOG.info("%s isn't replaced: %s", type(experts).__name__, error)
        return None
    most = expected.abs().amax(1) * (1e-4 if dtype == torch.float32 else 5e-2)
    if ((found - expected).abs().amax(1) > most).any():
        _LOG.info("%s isn't replaced: the native module gives other results", type(experts).__name__)
        return None
    return made if layout is NativeLinear and packed is None else NativeExperts(experts, layout, packed)


def _tried_experts(count: int) -> tuple[int, int, int]:
    """The experts, out of `count`, that are tried."""
    return 0, count // 2, count - 1


@contextmanager
def _as_floats(packed: Packed | None) -> Iterator[None]:
    """Make native experts in this context multiply packed weights by unquantized inputs."""
    for stack in packed or ():
        stack.as_floats = True
    try:
        yield
    finally:
        for stack in packed or ():
            stack.as_floats = False
