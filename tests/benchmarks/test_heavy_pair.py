"""Pairs that are made heavier compute what they computed before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks.heavy_pair import logit_gap, widened_drafter, widened_target
from eyas.drafters.kinds.medusa import MedusaNetwork
from eyas.drafters.kinds.peagle import PEagleNetwork

from .. import tiny
from ..drafters.cacheless import causal

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


@torch.inference_mode()
def test_a_wide_p_eagle_drafter_has_the_masked_pair_of_the_narrow_one() -> None:
    light = tiny.network("peagle", head_dim=8, taps=(1, 2, 4)).double()
    wide = widened_drafter(light, SIZES, 1).double()
    assert isinstance(light, PEagleNetwork)
    assert isinstance(wide, PEagleNetwork)
    narrow = light.masked_pair().state
    padded = wide.masked_pair().state
    torch.testing.assert_close(padded[..., : tiny.HIDDEN], narrow, rtol=1e-9, atol=1e-9)
    assert not padded[..., tiny.HIDDEN :].any()


@torch.inference_mode()
@pytest.mark.parametrize("kind", ["medusa", "mtp"])
def test_wide_drafters_of_the_final_state_guess_what_narrow_ones_did(kind: str) -> None:
    settings = {"head_dim": 8} if kind == "mtp" else {}
    light = tiny.network(kind, head="own", **settings).double()
    wide = widened_drafter(light, SIZES, 1).double()
    tokens = torch.tensor([tiny.prompts(5)[0]])
    states = torch.randn(1, 5, tiny.HIDDEN, dtype=torch.float64)
    more = (0, SIZES["hidden_size"] - tiny.HIDDEN)
    positions = torch.arange(5)[None]
    _, narrow = light.step(tokens, states, positions, causal)
    _, padded = wide.step(tokens, torch.nn.functional.pad(states, more), positions, causal)
    if isinstance(light, MedusaNetwork) and isinstance(wide, MedusaNetwork):
        narrow = light.guess(narrow, 2)
        padded = wide.guess(padded, 2)
    expected, found = (net.logits(state) for net, state in ((light, narrow), (wide, padded)))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@torch.inference_mode()
def test_the_gap_is_that_of_the_written_target_in_float64(tmp_path: Path) -> None:
    light = tiny.build_model("llama", head_dim=8).to(torch.bfloat16)
    light.save_pretrained(tmp_path / "light")
    light = LlamaForCausalLM.from_pretrained(tmp_path / "light", dtype=torch.float64)
    sizes = {**SIZES, "hidden_size": 4 * tiny.HIDDEN}  # norm weights are halved, exactly
    heavy = widened_target(light, sizes).to(torch.bfloat16)
    heavy.save_pretrained(tmp_path / "heavy")
    assert logit_gap(light, tmp_path / "heavy") < 1e-9
    ids = torch.arange(64)[None]
    assert (light(ids).logits - heavy.double()(ids).logits).abs().max() > 1e-4  # RoPE's frequencies were cast, too
