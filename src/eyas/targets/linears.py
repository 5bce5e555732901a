"""Linear layers with weights packed for the CPU's matrix kernels.

A plain `nn.Linear` reads its row-major weight at little more than half the memory's speed when there are few
tokens; oneDNN's own blocked layout reads at full speed, which is what decoding is bound by. The numbers are the same
up to float rounding. Packing replaces modules generically, as quantisation does; no model code is touched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_KEPT = 1024
PREPACKABLE = (torch.float32, torch.bfloat16)


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


class PrepackedLinear(nn.Module):
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


def can_prepack(device: torch.device, dtype: torch.dtype) -> bool:
    """Is there a packed kernel for this device and type?"""
    return (
        device.type == "cpu"
        and dtype in PREPACKABLE
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and (dtype != torch.bfloat16 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


def prepack_linears(module: nn.Module) -> int:
    """Replace every `nn.Linear` below `module`; returns how many. Tied weights stay where the embedding needs them."""
    shared = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    found = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and child.weight.dtype in PREPACKABLE
    ]
    for parent, name, child in found:
        setattr(parent, name, PrepackedLinear(child, id(child.weight) in shared))
        if id(child.weight) not in shared:
            child.weight = nn.Parameter(torch.empty(0), requires_grad=False)  # free it before the next is packed
    return len(found)


# Sibling linears as one product: a layer's q, k and v read the same input, so their weights can be one.
#
# A product of few tokens costs some 10 us besides reading its weight, which is as long as a small weight takes. Which
# linears are siblings is watched, not looked up by name; no model code is touched.


WIDEST = 2048
"""Features of a joint output. Wider ones were measured to lose 2 to 6% of the linears' time from 128 or 512 tokens on,
and have little to gain when tokens are few: their weights take longer to read."""
_MEMO = "_eyas_siblings"


class _Joint:
    """One packed weight, its rows those of several linears one after the other, and what is left of its last product.

    The first sibling called with an input computes for all; the others take their columns. These lie with the input
    tensor itself, so no thread and no other input can meet them; each is handed out once, the last one takes the note
    along, and if one is never asked for they go with the input. A sibling that finds nothing computes anew.

    An input written to between two siblings is noticed by its version. Tensors of inference mode have none: there
    siblings rely on the trial (`fuse_linears`), in which the model's code was seen to leave it alone.
    """

    def __init__(self, linears: list[PrepackedLinear]) -> None:
        self.packed = pack(torch.cat([linear.weight for linear in linears]))
        biases = [linear.bias for linear in linears if linear.bias is not None]
        self.bias = torch.cat(biases) if biases else None
        ends = list(accumulate(linear.out_features for linear in linears))
        self.rows = [
            (end - linear.out_features, linear.out_features) for end, linear in zip(ends, linears, strict=True)
        ]

    def part(self, x: Tensor, index: int, dtype: torch.dtype) -> Tensor:
        """[..., in] -> [..., out] of linear number `index`."""
        if torch.is_grad_enabled() and x.requires_grad:
            return multiply(x.to(dtype), self.packed, self.bias).narrow(-1, *self.rows[index])
        state = (torch.is_inference_mode_enabled(), None if x.is_inference() else x._version)
        kept: tuple[_Joint, object, dict[int, Tensor]] | None = x.__dict__.get(_MEMO)
        if kept is not None and kept[0] is self and kept[1] == state:
            own = kept[2].pop(index, None)
            if not kept[2]:
                x.__dict__.pop(_MEMO, None)
            if own is not None:
                return own
        whole = multiply(x.to(dtype), self.packed, self.bias)
        parts = {i: whole.narrow(-1, *rows) for i, rows in enumerate(self.rows)}
        own = parts.pop(index)
        x.__dict__[_MEMO] = (self, state, parts)
        return own


class FusedLinear(PrepackedLinear):
    """A packed linear whose weight is some rows of a joint one."""

    def __init__(self, linear: PrepackedLinear, joint: _Joint, index: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._dtype, self._first, self._shared = linear._dtype, linear._first, None
        self._joint, self._index = joint, index
        bias = None if joint.bias is None else joint.bias.narrow(0, *joint.rows[index])
        self.register_buffer("bias", bias, persistent=False)

    @property
    def weight(self) -> Tensor:
        """The row-major weight [out, in], unpacked on demand."""
        weight: Tensor = self._joint.packed.to_dense()
        return weight.narrow(0, *self._joint.rows[self._index])

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out], a view where siblings share a product of several tokens."""
        return self._joint.part(x, self._index, self._dtype)


class _Place(NamedTuple):
    """A linear and where it hangs."""

    parent: nn.Module
    name: str
    linear: PrepackedLinear


def fuse_linears(module: nn.Module, trial: Callable[[], Tensor]) -> int:
    """Join packed linears below `module` that `trial`, a run of the model, feeds alike; returns how many were joined.

    Joined are children of one parent with the same input type, bias or none, each called once with the same tensor,
    unchanged; never a tied one. `trial` returns something to compare (logits): if that fails or says something else
    afterwards, all are separate again.
    """
    try:
        calls, expected = _watch(module, trial)
    except _FAILURES:
        return 0  # it can't be tried this way
    groups = _groups(module, calls)
    calls.clear()  # they hold linears whose weights are about to be replaced
    joined = [place for group in groups for place in _join(group)]
    groups.clear()
    if joined and not _agrees(trial, expected):
        for parent, name, linear in joined:
            plain = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
            plain.weight = nn.Parameter(linear.weight, requires_grad=False)
            if linear.bias is not None:
                plain.bias = nn.Parameter(linear.bias, requires_grad=False)
            setattr(parent, name, PrepackedLinear(plain, shared=False))
        return 0
    return len(joined)


_FAILURES = (RuntimeError, ValueError, TypeError, IndexError, AttributeError)


class _Call(NamedTuple):
    given: Tensor
    values: Tensor
    """A copy, to see whether `given` is changed later on."""


def _watch(module: nn.Module, trial: Callable[[], Tensor]) -> tuple[dict[PrepackedLinear, list[_Call]], Tensor]:
    """What each packed linear was called with, and what the trial says."""
    calls: dict[PrepackedLinear, list[_Call]] = {}

    def note(linear: nn.Module, args: tuple[Tensor, ...]) -> None:
        assert isinstance(linear, PrepackedLinear)
        calls.setdefault(linear, []).extend(_Call(x, x.clone()) for x in args)

    handles = [part.register_forward_pre_hook(note) for part in module.modules() if isinstance(part, PrepackedLinear)]
    try:
        with torch.inference_mode():
            return calls, trial()
    finally:
        for handle in handles:
            handle.remove()


def _groups(module: nn.Module, calls: dict[PrepackedLinear, list[_Call]]) -> list[list[_Place]]:
    """The sets of siblings, in the order of their parents."""
    homes = Counter(child for parent in module.modules() for child in parent.children())
    groups = []
    for parent in module.modules():
        alike: dict[object, list[_Place]] = {}
        for name, child in parent.named_children():
            if (
                type(child) is PrepackedLinear
                and not child.tied
                and homes[child] == 1
                and len(calls.get(child, ())) == 1
            ):
                key = (id(calls[child][0].given), child.in_features, child.first(0).dtype, child.bias is None)
                alike.setdefault(key, []).append(_Place(parent, name, child))
        for group in alike.values():
            values = [calls[place.linear][0].values for place in group]
            narrow = sum(place.linear.out_features for place in group) <= WIDEST
            if len(group) > 1 and narrow and all(torch.equal(values[0], other) for other in values):
                groups.append(group)
    return groups


def _join(group: list[_Place]) -> list[_Place]:
    """Put siblings in the places of a group; the weights there before are let go."""
    joint = _Joint([place.linear for place in group])
    made = [
        _Place(parent, name, FusedLinear(linear, joint, index)) for index, (parent, name, linear) in enumerate(group)
    ]
    for parent, name, sibling in made:
        setattr(parent, name, sibling)
    group.clear()
    return made


@torch.inference_mode()
def _agrees(trial: Callable[[], Tensor], expected: Tensor) -> bool:
    """Does the trial still say the same, but for rounding?"""
    try:
        found = trial()
    except _FAILURES:
        return False
    return agree(found, expected, expected.dtype)


# Does a model run in another way still say the same? What is tried at load is judged by this.


def agree(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Are two tensors of logits equal but for the rounding of a model in `dtype`? Never where one is no number."""
    gap, scale = (found.float() - expected.float()).abs().max(), expected.float().abs().max()
    return bool(gap <= scale * (1e-3 if dtype == torch.float32 else 5e-2))
