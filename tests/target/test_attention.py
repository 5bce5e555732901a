"""The CPU attention is transformers' own, to the bit; a loaded target uses it, an eager one doesn't."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from eyas.target import Target, load_target
from eyas.target.attention import shared_heads_attention

from .. import tiny


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("queries", [1, 5, 16])
def test_same_numbers_as_transformers(dtype: torch.dtype, queries: int) -> None:
    torch.manual_seed(0)
    module = nn.Module()
    module.num_key_value_groups = 2
    query = torch.randn(2, 4, queries, 16).to(dtype)
    key, value = torch.randn(2, 2, 2, 40, 16).to(dtype)
    mask = torch.zeros(2, 1, queries, 40, dtype=dtype).masked_fill_(torch.rand(2, 1, queries, 40) < 0.3, -1e30)
    ours, _ = shared_heads_attention(module, query, key, value, mask, scaling=0.25)
    theirs, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.25)
    torch.testing.assert_close(ours, theirs, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6)


def test_loading_takes_over_what_the_model_would_have_run(tmp_path: Path) -> None:
    tiny.build_model("llama").save_pretrained(tmp_path)
    assert load_target(tmp_path, device="cpu").model.config._attn_implementation == "eyas_cpu_sdpa"
    assert load_target(tmp_path, device="cpu", attention="eager").model.config._attn_implementation == "eyas_eager"
    assert Target(tiny.build_model("llama"), packs=False).model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_every_architecture_computes_the_same_with_it(name: str, tmp_path: Path) -> None:
    model = tiny.build_model(name)
    model.save_pretrained(tmp_path)
    loaded = load_target(tmp_path, device="cpu").model
    tokens = tiny.prompts(19)[0]
    expected, found = tiny.full_forward(model, tokens).logits, tiny.full_forward(loaded, tokens).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
