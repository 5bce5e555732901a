"""The CPU attention is transformers' own up to rounding; what a model would have run is wrapped when it is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from eyas.targets import Target, load_target
from eyas.targets.attention import cap_scores, cpu_sdpa, grouped_attention

from .. import tiny


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("queries", [1, 5, 16])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_same_numbers_as_transformers(dtype: torch.dtype, queries: int, kv_heads: int) -> None:
    torch.manual_seed(0)
    module = nn.Module()
    module.num_key_value_groups = 4 // kv_heads
    query = torch.randn(2, 4, queries, 16).to(dtype)
    key, value = torch.randn(2, 2, kv_heads, 40, 16).to(dtype)
    mask = torch.zeros(2, 1, queries, 40, dtype=dtype).masked_fill_(torch.rand(2, 1, queries, 40) < 0.3, -1e30)
    ours, _ = cpu_sdpa(module, query, key, value, mask, scaling=0.25)
    theirs, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.25)
    # theirs rounds the weights of the keys to bfloat16 as well
    loose = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 3e-3}
    torch.testing.assert_close(ours, theirs, **loose)


def test_loading_takes_over_what_the_model_would_have_run(tmp_path: Path) -> None:
    tiny.build_model("llama").save_pretrained(tmp_path)
    assert load_target(tmp_path, device="cpu", attention="sdpa").model.config._attn_implementation == "eyas_cpu_sdpa"
    assert load_target(tmp_path, device="cpu", attention="eager").model.config._attn_implementation == "eyas_eager"
    assert Target(tiny.build_model("llama"), ragged=False).model.config._attn_implementation == "sdpa"


@pytest.mark.every(3)
@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_every_architecture_computes_the_same_with_it(name: str, tmp_path: Path) -> None:
    model = tiny.build_model(name)
    model.save_pretrained(tmp_path)
    cap_scores(model)
    loaded = load_target(tmp_path, device="cpu").model
    tokens = tiny.prompts(19)[0]
    expected = tiny.full_forward(model, tokens).logits
    found = tiny.full_forward(loaded, tokens).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "value_size"), [(4, 2, 8), (4, 4, 8), (4, 1, 8), (4, 1, 6)])
@pytest.mark.parametrize("queries", [1, 2, 15, 17])
@pytest.mark.parametrize("kind", ["bool", "added", "none", "one for all rows"])
def test_few_queries_by_the_textbook(
    dtype: torch.dtype, heads: int, kv_heads: int, value_size: int, queries: int, kind: str
) -> None:
    torch.manual_seed(1)
    query = torch.randn(3, heads, queries, 8).to(dtype)
    key = torch.randn(3, kv_heads, 20, 8).to(dtype)
    value = torch.randn(3, kv_heads, 20, value_size).to(dtype)
    seen = torch.rand(3, 1, queries, 20) < 0.6
    seen[..., 0] = True
    seen = torch.ones_like(seen) if kind == "none" else seen[0, 0] if kind == "one for all rows" else seen
    added = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)
    mask = {"none": None, "added": added}.get(kind, seen)
    found = grouped_attention(query, key, value, mask, 0.3)
    keys, values = (t.repeat_interleave(heads // kv_heads, dim=1).float() for t in (key, value))
    scores = (query.float() @ keys.transpose(2, 3) * 0.3).masked_fill(~seen, -torch.inf)
    assert found.shape == (3, heads, queries, value_size)
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(found.float(), scores.softmax(-1) @ values, rtol=tolerance, atol=tolerance)
