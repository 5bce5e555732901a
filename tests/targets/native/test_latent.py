"""Multi-head latent attention of the kernels: what is recognized, what is refused, and that no pass changes a sum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eyas.errors import UnsupportedModelError
from eyas.targets import Target, load_target
from eyas.targets.native.latent import LatentHeads, latent_heads
from eyas.targets.native.library import kernels
from eyas.targets.native.linears import NativeLinear

from ... import tiny

pytestmark = pytest.mark.skipif(kernels() is None, reason="no compiler, or neither AVX2 nor AVX-512")
FAMILIES = ("deepseek2", "deepseek3")
TYPES = (torch.float32, torch.bfloat16)


def built(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random model whose sizes fit the kernels."""
    return tiny.build_model(name, **{**tiny.fitting(name), **changes}).to(dtype)


def found_in(model: Any) -> LatentHeads:
    """What is found of a model's attention."""
    return latent_heads(model.model.layers[0].self_attn, model.model.rotary_emb, model.dtype)[0]


def loaded(model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Target:
    """A model as users load it, with native weights."""
    monkeypatch.setattr("eyas.targets.loading.best_layout", lambda *_: NativeLinear)
    model.save_pretrained(folder)
    return load_target(folder, device="cpu", dtype=model.dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_what_rope_does_is_found_by_trying_it(dtype: torch.dtype) -> None:
    of_two, of_three = (found_in(built(name, dtype)) for name in FAMILIES)
    assert (of_two.pairs, of_two.exact_rope, of_three.pairs, of_three.exact_rope) == (True, True, True, False)
    assert (of_two.rank, of_two.query_rank, of_two.value_size, of_two.rotated) == (32, 0, 16, 16)
    assert (of_three.rank, of_three.query_rank, of_three.value_size, of_three.rotated) == (16, 16, 48, 16)
    halves = found_in(built("deepseek3", dtype, rope_interleave=False))
    assert (halves.pairs, halves.exact_rope) == (False, False)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("deepseek3", {"rope_interleave": False, "q_lora_rank": None}),
        ("deepseek3", {"attention_bias": True, "num_attention_heads": 6, "num_key_value_heads": 6}),
        ("deepseek2", {"q_lora_rank": 48, "topk_method": "greedy"}),
        ("deepseek2", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "mlp_bias": True}),
    ],
)
@pytest.mark.parametrize("dtype", TYPES)
def test_variants_are_native(
    name: str, changes: dict[str, Any], dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built(name, dtype, **changes)
    target = loaded(model, tmp_path, monkeypatch)
    assert target.native is not None
    if dtype == torch.float32:
        prompt = tiny.prompts(30)[0]
        cache = target.allocate(1)
        logits = target.prefill_to_end(cache, range(1), [prompt], ())[0].rows[0]
        wanted = tiny.full_forward(model, prompt).logits[0, -1]
        torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", TYPES)
def test_a_long_prompt_is_read_alike_in_passes_of_any_size(
    name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than a tile of keys, with heads that don't fill the last of their units."""
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 6, "max_position_embeddings": 2048}
    target = loaded(built(name, dtype, **sizes), tmp_path, monkeypatch)
    assert target.native is not None
    found = []
    tokens = tiny.prompts(650)[0]
    for chunk in (649, 512, 37, 4):
        cache = target.allocate(1)
        found.append(torch.cat([piece.final for piece in target.prefill(cache, range(1), [tokens], (), chunk)], dim=1))
    for other in found[1:]:
        assert torch.equal(found[0], other)


@pytest.mark.parametrize("name", FAMILIES)
def test_cached_keys_are_rounded_as_the_modules_round(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each step of RoPE, or only where it is done; those that neighbors make lie as halves."""
    native = loaded(built(name, torch.bfloat16), tmp_path, monkeypatch)
    plain = load_target(tmp_path, device="cpu", dtype=torch.bfloat16, prepacked=False)
    cached = []
    for target in (native, plain):
        cache = target.allocate(1)
        target.prefill_to_end(cache, range(1), tiny.prompts(60), ())
        cached.append(cache.copy_out(0, 0, 60)[1 if name == "deepseek2" else 0])  # by shape
    found, expected = (layers[0 if name == "deepseek2" else 1, 0] for layers in cached)  # [60, P] of the first layer
    if name == "deepseek2":
        expected = torch.cat((expected[:, ::2], expected[:, 1::2]), dim=1)
    assert (found == expected).float().mean() > 0.95


def test_attention_that_caches_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("deepseek3")
    attention, rotary = model.model.layers[0].self_attn, model.model.rotary_emb
    turn = "transformers.models.deepseek_v3.modeling_deepseek_v3.apply_rotary_pos_emb_interleave"
    with monkeypatch.context() as changed:
        changed.setattr(turn, lambda q, k, cos, sin: (q, k + cos.unsqueeze(1) - sin.unsqueeze(1)))
        with pytest.raises(UnsupportedModelError, match="in another way than RoPE"):
            latent_heads(attention, rotary, torch.float32)
    forward = attention.forward

    class Doubling:
        """A cache that gets twice the latents."""

        def __init__(self, cache: Any) -> None:
            self.cache = cache

        def update(self, latents: Tensor, keys: Tensor, layer: int, **more: Any) -> Any:
            return self.cache.update(2 * latents, keys, layer, **more)

    def doubled(hidden_states: Tensor, position_embeddings: Any, attention_mask: Any, **given: Any) -> Any:
        [cache] = given.values()  # whatever this release of transformers calls it
        return forward(hidden_states, position_embeddings, attention_mask, Doubling(cache))

    attention.forward = doubled
    with pytest.raises(UnsupportedModelError, match="something other than latents and keys"):
        latent_heads(attention, rotary, torch.float32)


@pytest.mark.parametrize("changes", [{"qk_rope_head_dim": 12}, {"v_head_dim": 24}, {"kv_lora_rank": 24}])
def test_sizes_that_do_not_fit_are_left_to_the_modules(
    changes: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert loaded(built("deepseek3", **changes), tmp_path, monkeypatch).native is None
