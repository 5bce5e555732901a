"""Head and choice in one: the best token of every node, greedy or drawn, and a drafter's best guesses, without logits.

A program multiplies 64 final states by some of the head's outputs, with the tiles and sums of any linear layer, and
keeps the best. So the choice equals that from the logits, which are only computed when they are read. For
log-probabilities a program also sums its part of the probabilities; another launch merges the parts in order.

Shapes: B rows, N nodes of a tree, W nodes of a level, T tokens of a pass, H hidden size, V vocabulary, K guesses. A
node index counts the root as 0.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from eyas.targets.native.decoder import Warp
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


@triton.jit
def _scores(  # type: ignore[no-untyped-def]
    x, weight, scales, offsets, bias, rows, depths, ids, seeds, positions, divisors, noise_scales, token, out, present,
    inside, inputs: tl.constexpr, block: tl.constexpr, width: tl.constexpr, biased: tl.constexpr, bits: tl.constexpr,
    grouped: tl.constexpr, divides: tl.constexpr, draws: tl.constexpr, maps: tl.constexpr,
):  # fmt: skip
    """The logits [64, N] of some of the head's outputs, divided and with noise; -inf where there is no output."""
    dtype = x.dtype.element_ty
    sums, _ = product(
        x, token.to(tl.int64) * inputs, present, weight, scales, offsets, weight, scales, offsets, out, inside, x, 0.0,
        inputs, block, width, False, False, False, False, bits, grouped,
    )  # fmt: skip
    if biased:
        sums += tl.load(bias + out, inside, 0.0).to(tl.float32)[None, :]
    value = sums.to(dtype).to(tl.float32)
    row = token
    if divides | draws:
        row = tl.load(rows + token, present, 0)
    if divides:
        value = tl.div_rn(value, tl.load(divisors + row, present, 1.0)[:, None] + tl.zeros_like(value))
    if draws:
        position = tl.load(positions + row, present, 0) + tl.load(depths + token, present, 0)
        name = out
        if maps:
            name = tl.load(ids + out, inside, 0)
        noise = gumbel(tl.load(seeds + row, present, 0), position, name)
        value = value + noise * tl.load(noise_scales + row, present, 0.0)[:, None]
    return tl.where(inside[None, :], value, float("-inf"))


@triton.jit(do_not_specialize=["tokens", "tiles"])
def _choose(  # type: ignore[no-untyped-def]
    x, weight, scales, offsets, bias, rows, depths, ids, seeds, positions, divisors, noise_scales, best, found, marks,
    tokens, tiles, inputs: tl.constexpr, outputs: tl.constexpr, block: tl.constexpr, width: tl.constexpr,
    biased: tl.constexpr, bits: tl.constexpr, grouped: tl.constexpr, divides: tl.constexpr, draws: tl.constexpr,
    maps: tl.constexpr, count: tl.constexpr, sums: tl.constexpr,
):  # fmt: skip
    """Keep the `count` best of some of the head's outputs, and, with `sums`, the sum of all their probabilities."""
    token = tl.program_id(1) * 64 + tl.arange(0, 64)
    out = tl.program_id(0) * width + tl.arange(0, width)
    present = token < tokens
    value = _scores(
        x, weight, scales, offsets, bias, rows, depths, ids, seeds, positions, divisors, noise_scales, token, out,
        present, out < outputs, inputs, block, width, biased, bits, grouped, divides, draws, maps,
    )  # fmt: skip
    place = token.to(tl.int64) * tiles + tl.program_id(0)
    if sums:
        highest = tl.max(value, axis=1)
        tl.store(marks + place * 2, highest, present)
        tl.store(marks + place * 2 + 1, tl.sum(tl.exp(value - highest[:, None]), axis=1), present)
    for rank in range(0, count):
        most, at = tl.max(value, axis=1, return_indices=True, return_indices_tie_break_left=True)
        tl.store(best + place * count + rank, most, present)
        tl.store(found + place * count + rank, tl.program_id(0) * width + at, present)
        value = tl.where(tl.arange(0, width)[None, :] == at[:, None], float("-inf"), value)


@triton.jit(do_not_specialize=["tiles"])
def _merge_ranks(  # type: ignore[no-untyped-def]
    best, found, marks, ids, scores, guesses, tiles, count: tl.constexpr, lanes: tl.constexpr
):
    """The `count` best of a token's outputs, and their log-probabilities, from the best of each tile."""
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, lanes)
    there = lane < tiles
    base = token * tiles
    highest = tl.load(marks + (base + lane) * 2, there, float("-inf"))
    total = tl.load(marks + (base + lane) * 2 + 1, there, 0.0)
    most = tl.max(highest, axis=0)
    whole = tl.log(tl.sum(total * tl.exp(highest - most), axis=0))
    taken = tl.zeros([lanes], tl.int32)  # of each tile's outputs, which are in order
    front = tl.load(best + (base + lane) * count, there, float("-inf"))
    for rank in range(0, count):
        score, at = tl.max(front, axis=0, return_indices=True, return_indices_tie_break_left=True)
        which = (base + at) * count + tl.sum(tl.where(lane == at, taken, 0), axis=0)
        tl.store(scores + token * count + rank, (score - most) - whole)
        tl.store(guesses + token * count + rank, tl.load(ids + tl.load(found + which)))
        taken = tl.where(lane == at, taken + 1, taken)
        more = (lane == at) & (taken < count)
        following = tl.load(best + (base + lane) * count + taken, more, float("-inf"))
        front = tl.where(lane == at, following, front)


class _Kept(NamedTuple):
    """What programs keep of each tile of the head's outputs."""

    best: Tensor  # [T, tiles, K] scores, best first
    found: Tensor  # [T, tiles, K] int32 outputs
    marks: Tensor  # [T, tiles, 2] the highest score, and the sum of all probabilities relative to its


def _kept(
    final: Tensor, head: Weight, count: int, warp: Warp, rows: Tensor | None, depths: Tensor | None,
    ids: Tensor | None, sums: bool,
) -> _Kept:  # fmt: skip
    """Of final states [T, H], whose rows [T] of the `warp` and depths [T] are given; see `chosen` and `ranked`."""
    block, width = head.tile(final.dtype)
    tiles, tokens = triton.cdiv(head.outputs, width), len(final)
    best = torch.empty(tokens, tiles, count, dtype=torch.float32, device=final.device)
    found = torch.empty(tokens, tiles, count, dtype=torch.int32, device=final.device)
    marks = torch.empty(tokens, tiles, 2, dtype=torch.float32, device=final.device) if sums else best
    divisors, scales, seeds, positions = (given(None if part is None else part.contiguous(), final) for part in warp)
    _choose[(tiles, triton.cdiv(tokens, ROWS))](
        final, head.values, given(head.scales, final), given(head.offsets, final), given(head.bias, final),
        given(rows, final), given(depths, final), given(ids, final), seeds, positions, divisors, scales, best, found,
        marks, tokens, tiles, head.inputs, head.outputs, block, width, head.bias is not None, head.bits, head.group,
        warp[0] is not None, warp[1] is not None, ids is not None, count, sums, num_stages=4, **SAME,
    )  # fmt: skip
    return _Kept(best, found, marks)


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
    warp = (None,) * 4 if draws is None else (draws.divisors, draws.scales, draws.seeds, draws.positions)
    kept = _kept(final, head, 1, warp, rows, depths, None, False)
    at = kept.best[:, :, 0].max(dim=1, keepdim=True).indices
    return kept.found[:, :, 0].gather(1, at).squeeze(1).long()


def ranked(
    states: Tensor, head: Weight, count: int, warp: Warp, steps_ahead: int, ids: Tensor
) -> tuple[Tensor, Tensor]:
    """The best `count` guesses after states [B, W, H]: log-probabilities [B, W, K], and tokens among `ids` [V].

    The first of equals is better. See `DraftKernels.best`.
    """
    batch, width, size = states.shape
    tokens = torch.arange(batch * width, device=states.device)
    kept = _kept(
        states.reshape(-1, size).contiguous(), head, count, warp, tokens // width,
        torch.full_like(tokens, steps_ahead), ids, True,
    )  # fmt: skip
    scores = torch.empty(batch, width, count, dtype=torch.float32, device=states.device)
    guesses = torch.empty(batch, width, count, dtype=torch.int64, device=states.device)
    tiles = kept.best.shape[1]
    _merge_ranks[(batch * width,)](*kept, ids, scores, guesses, tiles, count, triton.next_power_of_2(tiles), **SAME)
    return scores, guesses


class HeadLogits(NodeLogits):
    """Logits that are computed only when they are read; tokens are chosen without them."""

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
