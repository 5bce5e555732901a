"""Pairs that are made heavier compute what they computed before."""

from __future__ import annotations

import torch

from benchmarks.heavy_pair import widened_drafter, widened_target

from .. import tiny

SIZES = {"hidden_size": 128, "intermediate_size": 96, "num_attention_heads": 16, "num_key_value_heads": 8}


@torch.inference_mode()
def test_a_wide_target_gives_the_same_logits() -> None:
    light = tiny.build_model("llama", head_dim=8).double()
    wide = widened_target(light, SIZES)
    assert wide.config.hidden_size == 128
    ids = torch.tensor(tiny.prompts(19))
    torch.testing.assert_close(wide(ids).logits, light(ids).logits, rtol=1e-6, atol=1e-6)


@torch.inference_mode()
def test_a_wide_drafter_drafts_from_wide_states_what_it_did_from_narrow_ones() -> None:
    light = tiny.eagle3_module(head_dim=8)
    light.config = light.config.model_copy(update={"taps": (1, 2, 4)})
    wide = widened_drafter(light, SIZES, 2).double()
    assert wide.config.taps == (2, 4, 8)
    states = torch.randn(1, 5, 3, tiny.HIDDEN, dtype=torch.float64)
    padded = torch.nn.functional.pad(states, (0, SIZES["hidden_size"] - tiny.HIDDEN))
    found = wide.fuse(padded)
    expected = light.double().fuse(states)
    torch.testing.assert_close(found[..., : tiny.HIDDEN], expected, rtol=1e-9, atol=1e-9)
    assert not found[..., tiny.HIDDEN :].any()
