"""Merged chain attention against one softmax over all keys, values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eyas.train.loss.chain_attention import Blocked, CausalKernel, ChainAttention, CpuFlash

B = 2
S = 9
HEADS = 4
COUNTS = (7, 7, 4, 1)  # rows of steps 1..4: fewer and fewer, and a step without change
INDICES = torch.tensor([12, 3, 17, 1, 0, 8, 9])


def tensors(kv: int, size: int, value_size: int) -> list[list[Tensor]]:
    """Queries, keys, values of each step."""
    torch.manual_seed(0)

    def make(batch: int, heads: int, width: int, last: int) -> Tensor:
        return torch.randn(batch, width, heads, last, dtype=torch.float64).transpose(1, 2).requires_grad_()

    shapes = [(B, S), *((1, count) for count in COUNTS)]
    sizes = ((HEADS, size), (kv, size), (kv, value_size))
    return [[make(batch, heads, width, last) for heads, last in sizes] for batch, width in shapes]


def written_out(steps: list[list[Tensor]]) -> list[Tensor]:
    """Each row on its own: the true keys up to its position and its own keys so far."""
    (q0, k0, v0), *later = steps
    group = HEADS // k0.shape[1]
    k0, v0 = (x.repeat_interleave(group, dim=1) for x in (k0, v0))
    first = torch.stack([_mix(q0[:, :, i], k0[:, :, : i + 1], v0[:, :, : i + 1]) for i in range(S)], dim=2)
    outs = [first]
    for step, (q, _, _) in enumerate(later):
        rows = []
        for row in range(q.shape[2]):
            chat, at = divmod(int(INDICES[row]), S)
            own = later[: step + 1]
            k, v = (
                torch.cat(
                    [true[chat, :, : at + 1]]
                    + [pair[side][0, :, row : row + 1].repeat_interleave(group, dim=0) for pair in own],
                    dim=1,
                )
                for side, true in ((1, k0), (2, v0))
            )
            rows.append(_mix(q[:, :, row], k[None], v[None]))
        outs.append(torch.stack(rows, dim=2))
    return outs


def _mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [B, heads, D] over k, v [B, heads, K, .]."""
    scores = torch.einsum("bhd,bhkd->bhk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhk,bhkd->bhd", scores.softmax(-1), v)


@pytest.mark.parametrize("kernel", [CpuFlash(), Blocked(), None])
@pytest.mark.parametrize(("kv", "size", "value_size"), [(4, 8, 8), (2, 8, 8), (4, 6, 3), (1, 5, 2)])
def test_it_is_one_softmax_over_true_and_own_keys(
    kernel: CausalKernel | None, kv: int, size: int, value_size: int
) -> None:
    if isinstance(kernel, CpuFlash) and size != value_size:
        pytest.skip("that kernel takes one size")
    steps = tensors(kv, size, value_size)
    attention = ChainAttention(INDICES, kernel)
    ours = [attention(0, *step) for step in steps]
    theirs = written_out(steps)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)
    weights = [torch.randn_like(x) for x in theirs]
    leaves = [x for step in steps for x in step]
    grads = [
        torch.autograd.grad(sum(((o * w).sum() for o, w in zip(outs, weights, strict=True)), torch.zeros(())), leaves)
        for outs in (ours, theirs)
    ]
    for mine, other in zip(*grads, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9)


def test_layers_keep_apart() -> None:
    steps = tensors(2, 8, 8)
    other = [[x.detach() * 2 for x in step] for step in steps]
    attention = ChainAttention(INDICES)
    for step, twin in zip(steps, other, strict=True):
        attention(1, *twin)
        mixed = attention(0, *step)
    torch.testing.assert_close(mixed, written_out(steps)[-1])


def test_autocast_brings_all_inputs_to_its_type() -> None:
    """Rotated queries and keys come in float32 beside bfloat16 values."""
    steps = [[x.detach().float() for x in step] for step in tensors(2, 8, 8)]
    attention = ChainAttention(INDICES)
    with torch.autocast("cpu", torch.bfloat16):
        found = [attention(0, q, k, v.bfloat16()) for q, k, v in steps]
    assert {x.dtype for x in found} == {torch.bfloat16}
    for mine, other in zip(found, written_out(steps), strict=True):
        torch.testing.assert_close(mine.float(), other, rtol=3e-2, atol=3e-2)
