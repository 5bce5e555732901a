"""Head and choice in one: the best token of every node, greedy or drawn, without its logits.

A program multiplies 64 final states by some of the head's outputs, with the tiles and sums of any linear layer, and
keeps the best. So what is chosen is what would be chosen from the logits, which are only computed for who asks.

Shapes: B rows, N nodes of a tree, T tokens of a pass, H hidden size, V vocabulary. A node index counts the root as 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.targets.triton.linear import ROWS, SAME, Weight, given, linear, on_device_of, product
from eyas.tree import NodeLogits
from eyas.tree.draft_tree import NodeDraws


@triton.jit
def _mixed(x):  # type: ignore[no-untyped-def]
    """SplitMix64's finalizer of uint64."""
    x = x ^ (x >> 30)
    x = x * 0xBF58476D1CE4E5B9
    x = x ^ (x >> 27)
    x = x * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def gumbel(seed, position, token):  # type: ignore[no-untyped-def]
    """Gumbel noise [M, N] of seeds [M], positions [M] and tokens [N], as `eyas.verify.path.gumbel` defines it."""
    key = _mixed(seed.to(tl.uint64)) + position.to(tl.uint64)
    one = token.to(tl.uint64) + 1
    bits = _mixed(_mixed(key)[:, None] + (one * 0x9E3779B97F4A7C15)[None, :]) >> 12
    uniform = bits.to(tl.int64).to(tl.float64) * 2.220446049250313e-16 + 1.1102230246251565e-16
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit(do_not_specialize=["tokens", "tiles"])
def _choose(  # type: ignore[no-untyped-def]
    x, weight, scales, offsets, bias, rows, depths, seeds, positions, divisors, noise_scales, best, found, tokens,
    tiles, inputs: tl.constexpr, outputs: tl.constexpr, block: tl.constexpr, width: tl.constexpr, biased: tl.constexpr,
    bits: tl.constexpr, grouped: tl.constexpr, draws: tl.constexpr,
):  # fmt: skip
    dtype = x.dtype.element_ty
    token = tl.program_id(1) * 64 + tl.arange(0, 64)
    out = tl.program_id(0) * width + tl.arange(0, width)
    present = token < tokens
    inside = out < outputs
    sums, _ = product(
        x, token.to(tl.int64) * inputs, present, weight, scales, offsets, weight, scales, offsets, out, inside, x, 0.0,
        inputs, block, width, False, False, False, False, bits, grouped,
    )  # fmt: skip
    if biased:
        sums += tl.load(bias + out, inside, 0.0).to(tl.float32)[None, :]
    value = sums.to(dtype).to(tl.float32)
    if draws:
        row = tl.load(rows + token, present, 0)
        position = tl.load(positions + row, present, 0) + tl.load(depths + token, present, 0)
        value = tl.div_rn(value, tl.load(divisors + row, present, 1.0)[:, None] + tl.zeros_like(value))
        noise = gumbel(tl.load(seeds + row, present, 0), position, out)
        value = value + noise * tl.load(noise_scales + row, present, 0.0)[:, None]
    value = tl.where(inside[None, :], value, float("-inf"))
    most, at = tl.max(value, axis=1, return_indices=True, return_indices_tie_break_left=True)
    place = token.to(tl.int64) * tiles + tl.program_id(0)
    tl.store(best + place, most, present)
    tl.store(found + place, tl.program_id(0) * width + at, present)


def chosen(
    final: Tensor,
    head: Weight,
    draws: NodeDraws | None = None,
    rows: Tensor | None = None,
    depths: Tensor | None = None,
) -> Tensor:
    """[T] the token with the highest logit of each of the final states [T, H], the first among equals.

    With `draws`, the token drawn for a state's row, in `rows` [T] of B, that many positions after the root's next token
    as its entry in `depths` [T].
    """
    block, width = head.tile(final.dtype)
    tiles, tokens = triton.cdiv(head.outputs, width), len(final)
    best = torch.empty(tokens, tiles, dtype=torch.float32, device=final.device)
    found = torch.empty(tokens, tiles, dtype=torch.int32, device=final.device)
    columns = (
        [final] * 4 if draws is None else [part.contiguous() for part in (draws.seeds, draws.positions, *draws[:2])]
    )
    _choose[(tiles, triton.cdiv(tokens, ROWS))](
        final, head.values, given(head.scales, final), given(head.offsets, final), given(head.bias, final),
        given(rows, final), given(depths, final), *columns, best, found, tokens, tiles, head.inputs, head.outputs,
        block, width, head.bias is not None, head.bits, head.group, draws is not None, num_stages=4, **SAME,
    )  # fmt: skip
    at = best.max(dim=1, keepdim=True).indices
    return found.gather(1, at).squeeze(1).long()


class HeadLogits(NodeLogits):
    """Logits that are computed when somebody reads them; tokens are chosen without."""

    _final: Tensor
    _head: Weight
    _finish: Callable[[Any], Any] | None

    def __init__(self, final: Tensor, index: Tensor, head: Weight, finish: Callable[[Any], Any] | None) -> None:
        """Of `final` states [T, H]; `finish` is what the model applies to its head's output; None = nothing."""
        vars(self).update(index=index, _final=final.contiguous(), _head=head, _finish=finish)  # it is frozen

    @cached_property
    def rows(self) -> Tensor:
        """[T, V] the logits."""
        with on_device_of(self._final):
            made = linear(self._final, self._head)
        return made if self._finish is None else self._finish(made)

    @property
    def vocab_size(self) -> int:
        return self._head.outputs

    @property
    def chooses(self) -> bool:
        return self._finish is None or super().chooses

    def best(self) -> Tensor:
        if self._finish is not None:
            return super().best()
        with on_device_of(self._final):
            return chosen(self._final, self._head)[self.index]

    def drawn(self, draws: Callable[[], NodeDraws | None], depths: Tensor) -> Tensor | None:
        how = draws() if self._finish is None else None
        if how is None:
            return None
        rows, at = self._of_tokens(depths)
        with on_device_of(self._final):
            return chosen(self._final, self._head, how, rows, at)[self.index]

    def _of_tokens(self, depths: Tensor) -> tuple[Tensor, Tensor]:
        """[T] the row and the depth of each token; cells without one repeat another, whose own cell comes first."""
        batch, nodes = self.index.shape
        cells = torch.arange(batch * nodes, device=self.index.device)
        first = cells.new_full((len(self._final),), batch * nodes - 1)
        first = first.scatter_reduce(0, self.index.flatten(), cells, "amin")
        return first // nodes, depths.expand(batch, nodes).flatten()[first]
