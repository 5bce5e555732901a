"""Every attention kernel against attention written out: values, log-sum-exp, and gradients of a larger softmax."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from eyas.drafters.window.window import Window
from eyas.train.loss import chain_attention as causal_kernels
from eyas.train.loss.chain_attention import (
    AttentionOutput,
    Blocked,
    CausalKernel,
    CpuFlash,
    CudaEfficient,
    CudaFlash,
    Windowed,
    choose_kernel,
)

CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def eager(q: Tensor, k: Tensor, v: Tensor, more: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Causal attention and its log-sum-exp; `more` [B, heads, S] is a score of one more key whose value is zero."""
    wide_k, wide_v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ wide_k.transpose(2, 3) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), float("-inf"))
    joint = scores if more is None else torch.cat((scores, more.unsqueeze(-1)), dim=-1)
    weights = joint.softmax(-1)[..., : q.shape[2]]
    return weights @ wide_v, joint.logsumexp(-1)


def inputs(
    batch: int, heads: int, kv: int, width: int, size: int, value_size: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(width)
    shapes = ((heads, size), (kv, size), (kv, value_size))
    q, k, v = (torch.randn(batch, width, n, d, dtype=dtype).transpose(1, 2).requires_grad_() for n, d in shapes)
    return q, k, v


def check(kernel: CausalKernel, q: Tensor, k: Tensor, v: Tensor, tolerance: float) -> None:
    done = kernel.forward(q.detach(), k.detach(), v.detach())
    out, lse = eager(q, k, v)
    torch.testing.assert_close(done.out, out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(done.lse, lse.to(done.lse.dtype), rtol=tolerance, atol=tolerance)
    more = torch.randn(q.shape[:3], dtype=q.dtype, device=q.device)
    out, lse = eager(q, k, v, more)
    grad = torch.randn_like(out)
    expected = torch.autograd.grad(out, (q, k, v), grad)
    merged = AttentionOutput(out.detach(), lse.detach().to(done.lse.dtype), done.extra)
    for ours, theirs in zip(kernel.backward(grad, q, k, v, merged), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_a_windowed_kernel_s_gradients_are_those_of_attention_written_out() -> None:
    """With a rotation of its own: two channels turn by an angle a position."""

    def turn(keys: Tensor, by: int) -> Tensor:
        angle = torch.tensor(0.3 * by, dtype=keys.dtype)
        left, right = keys[..., :1], keys[..., 1:2]
        turned = left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()
        return torch.cat((*turned, keys[..., 2:]), dim=-1)

    window = Window(20)
    kernel = Windowed(Window(20), turn)
    q, k, v = inputs(2, 4, 2, 150, 6, 5)
    outs, sums = [], []
    for row in range(150):
        dropped = window.dropped(row + 1)
        of_row = torch.cat((turn(k[:, :, : window.sinks], dropped), k[:, :, window.sinks + dropped : row + 1]), dim=2)
        keys = of_row if dropped else k[:, :, : row + 1]
        values = torch.cat((v[:, :, : window.sinks], v[:, :, window.sinks + dropped : row + 1]), dim=2)
        values = values if dropped else v[:, :, : row + 1]
        wide_k, wide_v = (x.repeat_interleave(2, dim=1) for x in (keys, values))
        scores = q[:, :, row : row + 1] @ wide_k.transpose(2, 3) * q.shape[-1] ** -0.5
        outs.append(scores.softmax(-1) @ wide_v)
        sums.append(scores.logsumexp(-1))
    out = torch.cat(outs, dim=2)
    lse = torch.cat(sums, dim=2)
    done = kernel.forward(q.detach(), k.detach(), v.detach())
    torch.testing.assert_close(done.out, out)
    torch.testing.assert_close(done.lse, lse)
    grad = torch.randn_like(out)
    expected = torch.autograd.grad(out, (q, k, v), grad)
    for ours, theirs in zip(kernel.backward(grad, q, k, v, done), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("width", [1, 5, 64, 150])
@pytest.mark.parametrize(("heads", "kv"), [(4, 4), (6, 2)])
def test_cpu_kernels_match_attention_written_out(width: int, heads: int, kv: int) -> None:
    check(CpuFlash(), *inputs(2, heads, kv, width, 8, 8), tolerance=1e-9)
    check(Blocked(), *inputs(2, heads, kv, width, 8, 8), tolerance=1e-9)
    check(Blocked(), *inputs(2, heads, kv, width, 12, 6), tolerance=1e-9)


@given(st.integers(1, 9), st.integers(1, 12))
def test_blocks_of_any_size_are_the_same_attention(block: int, width: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(causal_kernels, "BLOCK", block)
        check(Blocked(), *inputs(1, 2, 1, width, 4, 3), tolerance=1e-9)


@pytest.mark.parametrize("kernel", [CpuFlash(), Blocked()])
def test_bfloat16_keeps_sums_in_float32(kernel: CausalKernel) -> None:
    q, k, v = (x.detach().bfloat16() for x in inputs(1, 4, 2, 100, 16, 16, torch.float32))
    done = kernel.forward(q, k, v)
    out, lse = eager(q.float(), k.float(), v.float())
    assert done.out.dtype == torch.bfloat16
    assert done.lse.dtype == torch.float32
    torch.testing.assert_close(done.out.float(), out, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(done.lse, lse, rtol=1e-2, atol=1e-2)


def test_the_choice_follows_sizes_and_types() -> None:
    q, _, v = inputs(1, 2, 2, 2000, 8, 8)
    assert isinstance(choose_kernel(q, v), CpuFlash)
    assert isinstance(choose_kernel(q, v[..., :6]), Blocked)
    assert isinstance(choose_kernel(q[:, :, :500], v[:, :, :500]), Blocked)


def test_cuda_kernels_are_called_with_the_shapes_they_take() -> None:
    """Without a GPU: torch's own shape rules of the two operators, forward and backward."""
    with FakeTensorMode():
        sizes: list[tuple[CausalKernel, torch.dtype, int, int]] = [
            (CudaFlash(), torch.bfloat16, 2, 64),
            (CudaEfficient(), torch.float32, 2, 48),
        ]
        for kernel, dtype, kv, value_size in sizes:
            q = torch.empty(2, 6, 50, 64, dtype=dtype, device="cuda")
            k = torch.empty(2, kv, 50, 64, dtype=dtype, device="cuda")
            v = torch.empty(2, kv, 50, value_size, dtype=dtype, device="cuda")
            done = kernel.forward(q, k, v)
            assert done.out.shape == (2, 6, 50, value_size)
            assert done.lse.shape == (2, 6, 50)
            grads = kernel.backward(done.out, q, k, v, done)
            assert [g.shape for g in grads] == [q.shape, k.shape, v.shape]


@CUDA
@pytest.mark.parametrize(("size", "value_size"), [(64, 64), (64, 32)])
def test_efficient_attention_on_a_gpu(size: int, value_size: int) -> None:
    tensors = [x.detach().cuda().requires_grad_() for x in inputs(2, 4, 2, 100, size, value_size, torch.float32)]
    check(CudaEfficient(), *tensors, tolerance=2e-3)


@CUDA
def test_flash_attention_on_a_gpu() -> None:
    q, k, v = (x.detach().cuda().bfloat16().requires_grad_() for x in inputs(2, 4, 2, 100, 64, 64, torch.float32))
    check(CudaFlash(), q, k, v, tolerance=3e-2)
