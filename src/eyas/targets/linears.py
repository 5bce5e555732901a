"""Linear layers for a CPU: weights prepacked for its matrix kernels, and layers with one input fused into one product.

A plain `nn.Linear` reads its row-major weight at little more than half the memory's speed when there are few tokens;
oneDNN's own blocked layout is read at full speed, which bounds decoding. A product of few tokens also costs some 10 us
besides reading its weight, as long as a small weight takes; a layer's q, k and v (or gate and up) read the same input,
so their weights can be one. Modules are replaced generically, as by quantisation: no model code is touched, and which
linears to fuse is observed, not looked up by name. The numbers stay the same up to float rounding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from eyas.targets.architecture import logits_agree

PREPACKABLE = (torch.float32, torch.bfloat16)
"""Dtypes that oneDNN has prepacked kernels for."""
WIDEST = 2048
"""Most features of a fused output. Wider ones were measured to lose 2 to 6% of the linears' time from 128 or 512 tokens
on, and have little to gain when tokens are few: their weights take longer to read."""
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
        return _prepack(weight)

    def restored(self) -> Tensor:
        """The row-major weight [out, in] of the prepacked one."""
        return self._prepacked.to_dense()

    def multiply(self, x: Tensor) -> Tensor:
        """Multiply x [..., in] of the weight's dtype -> [..., out], without a gradient."""
        return _product(x, self._prepacked, self.bias)

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


def _prepack(weight: Tensor) -> Tensor:
    """A weight [out, in] in oneDNN's own layout."""
    prepacked: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
    return prepacked


def _product(x: Tensor, prepacked: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply x [..., in] by a weight in oneDNN's layout -> [..., out]."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, prepacked, bias, "none", [], "")
    return out


class _Product(torch.autograd.Function):
    """A product with a frozen prepacked weight whose input has a gradient (a drafter that trains below a head)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, multiply: Callable[[Tensor], Tensor], restored: Callable[[], Tensor]) -> Tensor:
        ctx.restored = restored
        return multiply(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0] @ ctx.restored(), None, None


def fuse_linears(module: nn.Module, trial: Callable[[], Tensor]) -> int:
    """Fuse prepacked linears below `module` that `trial`, a run of the model, gives the same input.

    Fused are children of one parent with the same input dtype, all with or all without bias, each called once with the
    same tensor, unchanged; never tied ones. `trial` returns something to compare (logits): if it fails or the result
    differs afterwards, all linears are separate again. Returns how many were fused.
    """
    try:
        calls, expected = _record_calls(module, trial)
    except _TRIAL_ERRORS:
        return 0  # this model can't be tried
    groups = _groups(module, calls)
    calls.clear()  # they hold linears whose weights are about to be replaced
    fused = [child for group in groups for child in _fuse(group)]
    groups.clear()
    if fused and not _computes_alike(trial, expected):
        for parent, name, linear in fused:
            plain = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
            plain.weight = nn.Parameter(linear.weight, requires_grad=False)
            if linear.bias is not None:
                plain.bias = nn.Parameter(linear.bias, requires_grad=False)
            setattr(parent, name, PrepackedLinear(plain, shared=False, transposed=linear.transposed))
        return 0
    return len(fused)


class FusedLinear(PrepackedLinear):
    """A linear whose weight is a slice of the rows of a fused weight."""

    def __init__(self, linear: PrepackedLinear, fused: _FusedWeight, index: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._dtype, self._first, self._shared, self.stacked = linear._dtype, linear._first, None, None
        self.transposed = linear.transposed
        self._fused, self._index = fused, index
        bias = None if fused.bias is None else fused.bias.narrow(0, *fused.rows[index])
        self.register_buffer("bias", bias, persistent=False)

    @property
    def weight(self) -> Tensor:
        """The row-major weight [out, in], restored on demand."""
        weight: Tensor = self._fused.prepacked.to_dense()
        return weight.narrow(0, *self._fused.rows[self._index])

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x [..., in] -> [..., out]; a view of the fused product, not contiguous for several tokens."""
        return self._fused.part(x, self._index, self._dtype)


_MEMO = "_eyas_fused_parts"


class _FusedWeight:
    """The prepacked weights of several linears as one, its rows in their order.

    The first linear called with an input computes for all; the others take their columns. These are kept with the input
    tensor itself, so no thread and no other input can see them; each is handed out once, the last one removes the memo,
    and parts that nobody fetches are freed with the input. A linear that finds no part computes anew.

    An input written to between two calls is noticed by its version. Tensors of inference mode have none: there the
    linears rely on the trial (`fuse_linears`), in which the model's code was seen to leave it alone.
    """

    def __init__(self, linears: list[PrepackedLinear]) -> None:
        self.prepacked = _prepack(torch.cat([linear.weight for linear in linears]))
        biases = [linear.bias for linear in linears if linear.bias is not None]
        self.bias = torch.cat(biases) if biases else None
        stops = list(accumulate(linear.out_features for linear in linears))
        self.rows = [
            (stop - linear.out_features, linear.out_features) for stop, linear in zip(stops, linears, strict=True)
        ]
        """The first row and the number of rows of each linear."""

    def part(self, x: Tensor, index: int, dtype: torch.dtype) -> Tensor:
        """Multiply x [..., in] -> [..., out] of linear number `index`."""
        if torch.is_grad_enabled() and x.requires_grad:
            traced: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
                x.to(dtype), partial(_product, prepacked=self.prepacked, bias=self.bias), self.prepacked.to_dense
            )
            return traced.narrow(-1, *self.rows[index])
        state = (torch.is_inference_mode_enabled(), None if x.is_inference() else x._version)
        kept: tuple[_FusedWeight, object, dict[int, Tensor]] | None = x.__dict__.get(_MEMO)
        if kept is not None and kept[0] is self and kept[1] == state:
            own = kept[2].pop(index, None)
            if not kept[2]:
                x.__dict__.pop(_MEMO, None)
            if own is not None:
                return own
        whole = _product(x.to(dtype), self.prepacked, self.bias)
        parts = {i: whole.narrow(-1, *rows) for i, rows in enumerate(self.rows)}
        own = parts.pop(index)
        x.__dict__[_MEMO] = (self, state, parts)
        return own


_TRIAL_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, AttributeError)
"""What models raise that can't be tried, or not with fused linears."""


class _LinearCall(NamedTuple):
    """The input of a linear, and a copy of it: a difference later on shows that the model writes to it."""

    given: Tensor
    copied: Tensor


def _record_calls(
    module: nn.Module, trial: Callable[[], Tensor]
) -> tuple[dict[PrepackedLinear, list[_LinearCall]], Tensor]:
    """The calls of every prepacked linear in a trial, and the trial's result."""
    calls: dict[PrepackedLinear, list[_LinearCall]] = {}

    def record(linear: nn.Module, args: tuple[Tensor, ...]) -> None:
        assert isinstance(linear, PrepackedLinear)
        calls.setdefault(linear, []).extend(_LinearCall(x, x.clone()) for x in args)

    handles = [part.register_forward_pre_hook(record) for part in module.modules() if isinstance(part, PrepackedLinear)]
    try:
        with torch.inference_mode():
            return calls, trial()
    finally:
        for handle in handles:
            handle.remove()


class _Child(NamedTuple):
    """A linear as a child of its parent module."""

    parent: nn.Module
    name: str
    linear: PrepackedLinear


def _groups(module: nn.Module, calls: dict[PrepackedLinear, list[_LinearCall]]) -> list[list[_Child]]:
    """The sets of linears that can be fused, in the order of their parents."""
    parents = Counter(child for parent in module.modules() for child in parent.children())
    groups = []
    for parent in module.modules():
        alike: dict[object, list[_Child]] = {}
        for name, child in parent.named_children():
            if type(child) is not PrepackedLinear or child.tied or parents[child] > 1 or len(calls.get(child, ())) != 1:
                continue
            key = (id(calls[child][0].given), child.in_features, child.first(0).dtype, child.bias is None)
            alike.setdefault(key, []).append(_Child(parent, name, child))
        for group in alike.values():
            inputs = [calls[child.linear][0].copied for child in group]
            narrow = sum(child.linear.out_features for child in group) <= WIDEST
            if len(group) > 1 and narrow and all(torch.equal(inputs[0], other) for other in inputs):
                groups.append(group)
    return groups


def _fuse(group: list[_Child]) -> list[_Child]:
    """Replace the linears of a group, which is emptied so that their weights are freed; returns the new ones."""
    weight = _FusedWeight([child.linear for child in group])
    made = [
        _Child(parent, name, FusedLinear(linear, weight, index)) for index, (parent, name, linear) in enumerate(group)
    ]
    for parent, name, fused in made:
        setattr(parent, name, fused)
    group.clear()
    return made


@torch.inference_mode()
def _computes_alike(trial: Callable[[], Tensor], expected: Tensor) -> bool:
    """Whether a trial runs and its result is the expected one but for rounding."""
    try:
        found = trial()
    except _TRIAL_ERRORS:
        return False
    return logits_agree(found, expected, expected.dtype)
