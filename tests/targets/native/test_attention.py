"""Attention of the kernels: what is far less likely than the best key counts as nothing, and takes no longer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eyas.targets import load_target
from eyas.targets.native.library import kernels
from eyas.targets.native.ops import native_attention

from ... import tiny

pytestmark = pytest.mark.skipif(kernels() is None, reason="there are no native kernels here")


def mixed(scores: list[float], values: list[float], dtype: torch.dtype = torch.float32) -> float:
    """The output of one query whose keys have these scores, of one feature of the values."""
    size = 16
    query, key, value = (torch.zeros(1, 1, n, size, dtype=dtype) for n in (1, len(scores), len(scores)))
    query[..., 0] = 1.0
    key[0, 0, :, 0] = torch.tensor(scores)
    value[0, 0, :, 3] = torch.tensor(values)
    out = native_attention(query, key, value, torch.ones(1, 1, 1, len(scores), dtype=torch.bool), 1.0)
    assert out is not None
    return float(out[0, 0, 0, 3])


@pytest.mark.parametrize("first", [True, False])
def test_weights_that_would_be_subnormal_are_zero(first: bool) -> None:
    """Products with subnormal numbers made prompts of 4,096 tokens take six times as long."""
    for apart in (61.0, 87.0, 88.0, 100.0, 1e4):
        scores, values = [0.0, -apart], [0.0, 1.0]
        assert mixed(scores if first else scores[::-1], values if first else values[::-1]) == 0.0


@pytest.mark.parametrize("apart", [0.0, 1.0, 20.0, 59.0])
def test_weights_of_likelier_keys_are_not(apart: float) -> None:
    expected = torch.tensor([0.0, -apart], dtype=torch.float64).softmax(0)[1]
    assert mixed([0.0, -apart], [0.0, 1.0]) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("size", [48, 64, 256, 288])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_over_many_keys_are_those_of_the_softmax(dtype: torch.dtype, size: int) -> None:
    """More than one tile of keys, some of which one query doesn't see; in bf16 heads of 64 and 256 go in pairs."""
    heads, keys = 6, 1100
    query, key, value = (torch.randn(1, n, s, size).to(dtype) for n, s in ((heads, 2), (2, keys), (2, keys)))
    seen = torch.ones(1, 1, 2, keys, dtype=torch.bool)
    seen[..., 1, 5::7] = False
    out = native_attention(query, key, value, seen, None)
    assert out is not None
    shared = (part.double().repeat_interleave(heads // 2, 1) for part in (key, value))
    expected = torch.nn.functional.scaled_dot_product_attention(query.double(), *shared, attn_mask=seen)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out.double(), expected.transpose(1, 2), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 16), (torch.bfloat16, 64)])
@pytest.mark.parametrize("heads", [1, 8])
def test_a_long_prompt_is_read_alike_in_passes_of_any_size(
    heads: int, dtype: torch.dtype, size: int, tmp_path: Path
) -> None:
    """Blocks of tokens and tiles of keys change no sum: 8 heads of a group are more than 32 queries in a block."""
    sizes = {"num_attention_heads": heads, "num_key_value_heads": 1, "head_dim": size, "max_position_embeddings": 2048}
    tiny.build_model("llama", **sizes).save_pretrained(tmp_path)
    target = load_target(tmp_path, dtype=dtype, device="cpu")
    tokens = tiny.prompts(1090)[0]
    assert target.native is not None
    found = []
    for chunk in (1089, 512, 37, 4):
        cache = target.allocate(1)
        found.append(torch.cat([piece.final for piece in target.prefill(cache, range(1), [tokens], (), chunk)], dim=1))
    for other in found[1:]:
        assert torch.equal(found[0], other)


@pytest.mark.every(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "groups"), [(9, 3), (10, 5), (3, 1)])
@pytest.mark.parametrize("lengths", [(80,), (80, 71)])
def test_heads_are_split_among_threads_without_a_trace(
    lengths: tuple[int, ...],
    heads: int,
    groups: int,
    dtype: torch.dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Threads that can't share the heads equally begin and end between the queries of one."""
    sizes = {"num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": 64, "hidden_size": 16 * heads}
    tiny.build_model("llama", **sizes).save_pretrained(tmp_path)
    target = load_target(tmp_path, dtype=dtype, device="cpu")
    prompts = tiny.prompts(*lengths)
    assert target.native is not None
    found = []
    for threads, chunk in ((1, 80), (2, 1), (2, 5), (2, 8), (2, 13), (2, 33), (4, 3), (4, 16), (4, 47), (7, 23)):
        monkeypatch.setattr("eyas.targets.native.decoder.threads_for", lambda _, threads=threads: threads)
        cache = target.allocate(len(lengths))
        rows = range(len(lengths))
        pieces = [piece.final[-1] for piece in target.prefill(cache, rows, prompts, (), chunk)]
        found.append(torch.cat(pieces)[: lengths[-1] - 1])
    for other in found[1:]:
        assert torch.equal(found[0], other)


@pytest.mark.parametrize("native", [True, False])
def test_beside_the_kernels_a_trace_keeps_torch_to_one_thread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, native: bool
) -> None:
    tiny.build_model("llama", head_dim=16).save_pretrained(tmp_path)
    target = load_target(tmp_path, dtype=torch.float32, device="cpu")
    assert target.native is not None
    target.decoder = target.decoder if native else None
    part = "read" if native else "masks"
    seen = []
    run = getattr(target, part)
    before = torch.get_num_threads()
    monkeypatch.setattr(target, part, lambda *args: seen.append(torch.get_num_threads()) or run(*args))
    torch.set_num_threads(2)
    try:
        target.trace(torch.tensor(tiny.prompts(5)), torch.tensor([5]), (1,))
        assert seen == [1 if native else 2]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
