"""Attention of a chain of guesses: causal over the true pairs, plus the row's own guesses, one key per step.

Step j of a row at position i takes a softmax over i + 1 true keys and j keys of its own. The true part is a causal
attention like that of step 0, computed by a fused kernel that also returns its log-sum-exp L; own key m adds the score
s_m = q k_m / sqrt(D), a diagonal instead of a matrix. Merged:

    total = log(exp L + sum exp s_m),  out = exp(L - total) * out_true + sum exp(s_m - total) * v_m

No mask and no score matrix is stored. The backward pass gives the merged `out` and `total` to the kernel, which then
returns the exact gradients of the true part, and adds those of the diagonals:
ds_m = exp(s_m - total) * (dO v_m - sum(dO * out)).

The kernels compute causal attention that also returns its log-sum-exp, forward and backward. A kernel's backward pass
takes `out` and `lse` from the caller. Given those of a softmax over *more* keys than the kernel has, it returns the
exact gradients for its own keys: P = exp(S - lse) and dS = P * (dP - sum(dO * O)) need nothing else of the other keys.

Shapes: B chats, S positions, R rows a later step computes, D / Dv head size of keys / values, J own keys,
heads = kv * G.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from eyas.drafters.window.layers import SlidingWindow
from eyas.drafters.window.window import Window

BLOCK = 64
"""Query rows that `Blocked` processes together; keys after the block's end are skipped, which halves the work."""

LONG = 1024
"""Positions above which torch's CPU flash kernel is faster than `Blocked`."""


class AttentionOutput(NamedTuple):
    """The result of a forward pass: out [B, heads, S, Dv], lse [B, heads, S] (float32 or float64), kernel data."""

    out: Tensor
    lse: Tensor
    extra: tuple[Any, ...] = ()


class CausalKernel(Protocol):
    """q [B, heads, S, D], k [B, kv, S, D], v [B, kv, S, Dv]; scores are scaled by D ** -0.5."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> AttentionOutput: ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, done: AttentionOutput
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k, v for `grad` [B, heads, S, Dv]."""


def choose_kernel(q: Tensor, v: Tensor) -> CausalKernel:
    """The fastest kernel that supports these tensors.

    On a CPU, blocked matmuls take 0.6 to 0.7 times as long as torch's flash kernel at 512 positions; at 2048, flash is
    faster by a seventh (docs/findings.md).
    """
    size = q.shape[-1]
    width = q.shape[2]
    same = q.shape[-1] == v.shape[-1]
    if not q.is_cuda:
        return CpuFlash() if same and width > LONG else Blocked()
    half = q.dtype in (torch.float16, torch.bfloat16)
    if half and same and size % 8 == 0 and size <= 256 and torch.cuda.get_device_capability(q.device)[0] >= 8:
        return CudaFlash()
    if (half or q.dtype == torch.float32) and size % 8 == 0 and v.shape[-1] % 8 == 0:
        return CudaEfficient()
    return Blocked()


class CpuFlash:
    """torch's CPU flash kernel, for keys and values of the same size."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> AttentionOutput:
        return AttentionOutput(*torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True))

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, done: AttentionOutput
    ) -> tuple[Tensor, Tensor, Tensor]:
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, done.out, done.lse, 0.0, True
        )
        return grads


class CudaFlash:
    """FlashAttention, for half precision and keys and values of the same size."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> AttentionOutput:
        out, lse, *extra = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True, False)
        return AttentionOutput(out, lse, tuple(extra[:6]))

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, done: AttentionOutput
    ) -> tuple[Tensor, Tensor, Tensor]:
        cum_q, cum_k, max_q, max_k, seed, offset = done.extra
        lse = done.lse.contiguous()  # the kernel ignores strides: gradients would be wrong
        grads: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, done.out, lse, cum_q, cum_k, max_q, max_k, 0.0, True, seed, offset
        )
        return grads


class CudaEfficient:
    """Memory-efficient attention, also for float32 and other value sizes; it repeats shared keys and pads lse."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> AttentionOutput:
        k, v = (_repeated(x, q.shape[1]) for x in (k, v))
        out, lse, seed, offset = torch.ops.aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, True)
        return AttentionOutput(out, lse.narrow(2, 0, q.shape[2]), (lse, seed, offset))

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, done: AttentionOutput
    ) -> tuple[Tensor, Tensor, Tensor]:
        padded, seed, offset = done.extra
        width = q.shape[2]
        padded = torch.cat((done.lse, padded.narrow(2, width, padded.shape[2] - width)), dim=2)
        wide_k, wide_v = (_repeated(x, q.shape[1]) for x in (k, v))
        dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            grad, q, wide_k, wide_v, None, done.out, padded, seed, offset, 0.0, [True, True, True, False], True
        )
        return dq, *(torch.unflatten(g, 1, (k.shape[1], -1)).sum(2) for g in (dk, dv))


class Seen(NamedTuple):
    """The keys that a block of rows sees: all before `stop` or, in a window, the sinks and those after the dropped."""

    stop: int
    sinks: int = 0
    dropped: int = 0
    turn: Callable[[Tensor, int], Tensor] = lambda keys, _: keys
    """Rotates keys forward by a number of positions."""

    def keys(self, x: Tensor) -> Tensor:
        """Select from keys [B*kv, S, D]; sinks are placed right before the keys after the dropped ones."""
        if not self.dropped:
            return x[:, : self.stop]
        return torch.cat((self.turn(x[:, : self.sinks], self.dropped), x[:, self.sinks + self.dropped : self.stop]), 1)

    def values(self, x: Tensor) -> Tensor:
        """Select from values [B*kv, S, Dv] in the same way."""
        return self._replace(turn=lambda sinks, _: sinks).keys(x)

    def add_keys(self, total: Tensor, part: Tensor) -> None:
        """Add `part`, the gradient of the selected keys, to `total`, the gradient of all keys."""
        if not self.dropped:
            total[:, : self.stop] += part
            return
        total[:, : self.sinks] += self.turn(part[:, : self.sinks], -self.dropped)
        total[:, self.sinks + self.dropped : self.stop] += part[:, self.sinks :]

    def add_values(self, total: Tensor, part: Tensor) -> None:
        """Add `part`, the gradient of the selected values, to `total`, the gradient of all values."""
        self._replace(turn=lambda sinks, _: sinks).add_keys(total, part)


class Blocked:
    """Plain matmuls over blocks of rows, for any device, size and dtype; backward recomputes the scores.

    Internally queries are [B*kv, S*G, D], so that queries with the same keys form one matrix, and a block of rows is a
    view of it.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> AttentionOutput:
        kv = k.shape[1]
        groups = q.shape[1] // k.shape[1]
        rows = _folded(q * q.shape[-1] ** -0.5, kv)
        keys = k.flatten(0, 1)
        values = v.flatten(0, 1)
        out = rows.new_empty(*rows.shape[:2], v.shape[-1])
        lse = rows.new_empty(*rows.shape[:2], 1, dtype=torch.promote_types(q.dtype, torch.float32))
        for block, seen in self._blocks(q.shape[2], groups):
            scores = (rows[:, block] @ seen.keys(keys).transpose(1, 2)).to(lse.dtype)  # [B*kv, R*G, K]
            self._hide(scores, groups, float("-inf"))
            peak = scores.amax(-1, keepdim=True)
            weights = scores.sub_(peak).exp_()
            total = weights.sum(-1, keepdim=True)
            out[:, block] = (weights.to(v.dtype) @ seen.values(values)).div_(total)
            lse[:, block] = total.log_().add_(peak)
        return AttentionOutput(_unfolded(out, q), _unfolded(lse, q).squeeze(-1))

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, done: AttentionOutput
    ) -> tuple[Tensor, Tensor, Tensor]:
        kv = k.shape[1]
        groups = q.shape[1] // k.shape[1]
        scale = q.shape[-1] ** -0.5
        rows = _folded(q * scale, kv)
        keys = k.flatten(0, 1)
        values = v.flatten(0, 1)
        dout = _folded(grad, kv)
        lse = _folded(done.lse.unsqueeze(-1), kv)
        delta = _folded((grad * done.out).sum(-1, keepdim=True, dtype=lse.dtype), kv)  # [B*kv, S*G, 1]
        drows = torch.empty_like(rows)
        dkeys, dvalues = (torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (keys, values))
        for block, seen in self._blocks(q.shape[2], groups):
            mine = seen.keys(keys)
            weights = torch.sub(rows[:, block] @ mine.transpose(1, 2), lse[:, block]).exp_()
            self._hide(weights, groups, 0.0)
            seen.add_values(dvalues, weights.to(v.dtype).transpose(1, 2) @ dout[:, block])
            slope = torch.sub(dout[:, block] @ seen.values(values).transpose(1, 2), delta[:, block])
            dscores = slope.mul_(weights).to(q.dtype)
            drows[:, block] = dscores @ mine
            seen.add_keys(dkeys, dscores.transpose(1, 2) @ rows[:, block])
        return _unfolded(drows.mul_(scale), q), dkeys.view(k.shape).to(k.dtype), dvalues.view(v.shape).to(v.dtype)

    def _blocks(self, width: int, groups: int) -> Iterator[tuple[slice, Seen]]:
        """The rows of each block as a slice of S*G, and the keys that they see, the last of which are their own."""
        for start in range(0, width, BLOCK):
            stop = min(start + BLOCK, width)
            yield slice(start * groups, stop * groups), Seen(stop)

    def _hide(self, scores: Tensor, groups: int, value: float) -> None:
        """Overwrite the scores [B*kv, R*G, K] of keys that a row doesn't see; the last R keys are the rows' own."""
        _hide_later(scores, groups, value)


class Windowed(Blocked):
    """Attention in a drafter's window, as in decoding: rows between two steps of the window see the same first pair.

    Keys are rotated by their positions in the chat. Only differences of positions matter, so only the sinks are rotated
    further, to right before the window. The work grows linearly with the length.
    """

    def __init__(self, window: Window, turn: Callable[[Tensor, int], Tensor]) -> None:
        self._window = window
        self._turn = turn

    def _blocks(self, width: int, groups: int) -> Iterator[tuple[slice, Seen]]:
        start = 0
        window = self._window
        while start < width:
            stop = min(start + BLOCK, width, window.next_step(start))
            dropped = window.dropped(start + 1)
            yield slice(start * groups, stop * groups), Seen(stop, window.sinks, dropped, self._turn)
            start = stop


class Sliding(Blocked):
    """Attention in a layer's sliding window: a row sees the last `size` pairs, its own included."""

    def __init__(self, size: int) -> None:
        self._size = size

    def _blocks(self, width: int, groups: int) -> Iterator[tuple[slice, Seen]]:
        for start in range(0, width, BLOCK):
            stop = min(start + BLOCK, width)
            yield slice(start * groups, stop * groups), Seen(stop, dropped=max(0, start + 1 - self._size))

    def _hide(self, scores: Tensor, groups: int, value: float) -> None:
        super()._hide(scores, groups, value)
        count = scores.shape[1] // groups
        keys = scores.shape[2]
        rows = torch.arange(keys - count, keys, device=scores.device).unsqueeze(1)  # where a row's own key is
        earlier = (torch.arange(keys, device=scores.device) <= rows - self._size).unsqueeze(1)  # [R, 1, K]
        torch.unflatten(scores, 1, (count, groups)).masked_fill_(earlier, value)


def _hide_later(scores: Tensor, groups: int, value: float) -> None:
    """Overwrite the scores [B*kv, R*G, K] of keys after each row, which are among the last R keys."""
    count = scores.shape[1] // groups
    later = torch.ones(count, count, dtype=torch.bool, device=scores.device).triu_(1).unsqueeze(1)
    torch.unflatten(scores, 1, (count, groups))[..., -count:].masked_fill_(later, value)


def _folded(x: Tensor, kv: int) -> Tensor:
    """[B, heads, S, D] -> [B*kv, S*G, D]."""
    return torch.unflatten(x, 1, (kv, -1)).transpose(2, 3).flatten(2, 3).flatten(0, 1)


def _unfolded(x: Tensor, like: Tensor) -> Tensor:
    """[B*kv, S*G, D] -> [B, heads, S, D], with the heads of a position adjacent in memory for the next linear."""
    batch, heads, width, _ = like.shape
    split = x.view(batch, -1, width, heads // (x.shape[0] // batch), x.shape[-1])  # [B, kv, S, G, D]
    return split.transpose(1, 2).flatten(2, 3).transpose(1, 2)


def _repeated(x: Tensor, heads: int) -> Tensor:
    """[B, kv, S, D] -> [B, heads, S, D]."""
    return x.unsqueeze(2).expand(-1, -1, heads // x.shape[1], -1, -1).flatten(1, 2)


class ChainAttention:
    """The `attend` function of an unrolled chain. `indices` [R0] are the rows of later steps, as indices into B * S.

    `kernel` computes the attention to true pairs, else the fastest one or, in a layer that has one, its sliding window.
    Step 0 has queries [B, heads, S, D], each later step [1, heads, R, D] for the first R of `indices`; R never grows.
    """

    def __init__(
        self, indices: Tensor, kernel: CausalKernel | None = None, windows: Sequence[SlidingWindow | None] = ()
    ) -> None:
        self._indices = indices
        self._kernel = kernel
        self._windows = windows
        self._true: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> keys, values of the true pairs
        self._own: dict[int, list[tuple[Tensor, Tensor]]] = {}  # layer -> keys, values of each later step

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [., heads, ., D], k [., kv, ., D], v [., kv, ., Dv] -> [., heads, ., Dv]."""
        q, k, v = _cast(q, k, v)
        window = self._windows[layer] if self._windows else None
        if window is None:
            kernel = self._kernel or choose_kernel(q, v)
        else:
            kernel = Sliding(window.after(len(self._own[layer]) + 1 if layer in self._own else 0))
        if layer not in self._true:
            self._true[layer] = (k, v)
            self._own[layer] = []
            out: Tensor = _Causal.apply(kernel, q, k, v)  # type: ignore[no-untyped-call]
            return out
        own = self._own[layer]
        own.append((k, v))
        indices = self._indices[: q.shape[2]]
        flat = [side for pair in own for side in pair]
        mixed: Tensor = _Chain.apply(kernel, indices, q, *self._true[layer], *flat)  # type: ignore[no-untyped-call]
        return mixed


class _Causal(torch.autograd.Function):
    """Step 0: causal attention of the true pairs."""

    @staticmethod
    def forward(ctx: Any, kernel: CausalKernel, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        done = kernel.forward(q, k, v)
        ctx.kernel = kernel
        ctx.extra = done.extra
        ctx.save_for_backward(q, k, v, done.out, done.lse)
        return done.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return None, *ctx.kernel.backward(grad, q, k, v, AttentionOutput(out, lse, ctx.extra))


class _Chain(torch.autograd.Function):
    """A later step: q [1, heads, R, D], the true keys and values [B, kv, S, .], then own pairs [1, kv, >= R, .]."""

    @staticmethod
    def forward(
        ctx: Any, kernel: CausalKernel, indices: Tensor, q: Tensor, k: Tensor, v: Tensor, *own: Tensor
    ) -> Tensor:
        done = kernel.forward(_spread(q, indices, k), k, v)
        lse = _spread_back(done.lse.unsqueeze(-1), indices)  # [1, heads, R, 1]
        count = len(indices)
        kv = k.shape[1]
        keys, values = (_stacked(own[side::2], count) for side in (0, 1))  # [R, kv, J, .]
        scores = (_grouped(q, kv) @ keys.transpose(2, 3)).to(lse.dtype) * q.shape[-1] ** -0.5  # [R, kv, G, J]
        true = _grouped(lse, kv)  # [R, kv, G, 1]
        total = torch.cat((true, scores), dim=-1).logsumexp(-1, keepdim=True)
        weights = (scores - total).exp()
        out = torch.addcmul(
            weights.to(v.dtype) @ values,
            _grouped(_spread_back(done.out, indices), kv),
            (true - total).exp().to(v.dtype),
        )
        ctx.kernel = kernel
        ctx.extra = done.extra
        ctx.sizes = [x.shape[2] for x in own]
        ctx.save_for_backward(indices, q, k, v, out, total, weights, *own)
        return _ungrouped(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        indices, q, k, v, out, total, weights, *own = ctx.saved_tensors
        count = len(indices)
        kv = k.shape[1]
        scale = q.shape[-1] ** -0.5
        done = AttentionOutput(
            _spread(_ungrouped(out), indices, k), _spread(_ungrouped(total), indices, k).squeeze(-1), ctx.extra
        )
        dq, dk, dv = ctx.kernel.backward(_spread(grad, indices, k), _spread(q, indices, k), k, v, done)
        dout = _grouped(grad, kv)
        queries = _grouped(q, kv)
        keys, values = (_stacked(own[side::2], count) for side in (0, 1))
        delta = (dout * out).sum(-1, keepdim=True, dtype=total.dtype)
        dscores = (weights * ((dout @ values.transpose(2, 3)).to(total.dtype) - delta) * scale).to(q.dtype)
        dq = _spread_back(dq, indices) + _ungrouped(dscores @ keys)
        dkeys = dscores.transpose(2, 3) @ queries  # [R, kv, J, D]
        dvalues = weights.to(v.dtype).transpose(2, 3) @ dout
        down = [
            torch.nn.functional.pad(part[:, :, i // 2].transpose(0, 1).unsqueeze(0), (0, 0, 0, size - count))
            for i, size in enumerate(ctx.sizes)
            for part in ((dkeys, dvalues)[i % 2],)
        ]
        return None, None, dq, dk, dv, *down


def _cast(*tensors: Tensor) -> list[Tensor]:
    """Cast to the autocast dtype, if any: rotated queries and keys have the dtype of the rotation."""
    kind = tensors[0].device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensors[0].dtype
    return [x.to(dtype) for x in tensors]


def _spread(rows: Tensor, indices: Tensor, like: Tensor) -> Tensor:
    """Scatter [1, heads, R, D] to [B, heads, S, D] with `like`'s B and S; zeros where there is no row.

    Zeros don't affect a kernel's backward pass: where no gradient comes in, none goes out.
    """
    batch, _, width, _ = like.shape
    heads, size = rows.shape[1], rows.shape[3]
    full = rows.new_zeros(batch * width, heads, size)
    full.index_copy_(0, indices, rows[0].transpose(0, 1))
    return torch.unflatten(full, 0, (batch, width)).transpose(1, 2)


def _spread_back(full: Tensor, indices: Tensor) -> Tensor:
    """Gather the rows of [B, heads, S, D] as [1, heads, R, D]."""
    return full.transpose(1, 2).flatten(0, 1).index_select(0, indices).transpose(0, 1).unsqueeze(0)


def _grouped(x: Tensor, kv: int) -> Tensor:
    """[1, heads, R, D] -> [R, kv, G, D]."""
    return torch.unflatten(x[0].transpose(0, 1), 1, (kv, -1))


def _ungrouped(x: Tensor) -> Tensor:
    """[R, kv, G, D] -> [1, heads, R, D]."""
    return x.flatten(1, 2).transpose(0, 1).unsqueeze(0)


def _stacked(own: tuple[Tensor, ...] | list[Tensor], count: int) -> Tensor:
    """The first `count` rows of J tensors [1, kv, >= R, D] -> [R, kv, J, D]."""
    return torch.stack([x[0, :, :count].transpose(0, 1) for x in own], dim=2)
