"""AWQ, GPTQ and compressed-tensors in 4 and 8 bits: the file's numbers, kept packed, and speculation without loss."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.errors import ModelError, UnsupportedModelError, UsageError
from eyas.targets import load_target
from eyas.targets.fingerprint import embedding_head_fingerprint, fingerprint
from eyas.targets.loading import load_embedding_and_head
from eyas.targets.native.layer_trials import inputs_as_floats
from eyas.targets.native.library import kernels
from eyas.targets.native.packed_linears import PackedLinear
from eyas.targets.parameters import weight_formats
from eyas.targets.tokenizers import eos_token_ids

from .. import quantized, tiny
from .test_quantized import decoded_losslessly

PACKED = [name for name in quantized.INTEGERS if name != "gptq-act-order"]
ALWAYS = ("awq", "gptq-v2", "gptq-8", "compressed-int4-zeros", "compressed-w8a8")
needs_kernels = pytest.mark.skipif(kernels() is None, reason="no compiler, or neither AVX2 nor AVX-512")
FAMILIES: dict[str, dict[str, int]] = {
    "llama": {},
    "qwen3moe": {"moe_intermediate_size": 64},
    "deepseek3": {"moe_intermediate_size": 64, "kv_lora_rank": 32, "q_lora_rank": 32},
}


def packed_in(model: torch.nn.Module) -> dict[str, PackedLinear]:
    return {name: part for name, part in model.named_modules() if isinstance(part, PackedLinear)}


@pytest.mark.every(2)
@needs_kernels
@pytest.mark.parametrize(
    "name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in PACKED]
)
def test_weights_stay_as_the_file_has_them(tmp_path: Path, name: str) -> None:
    meant = quantized.write(tmp_path, name, head_dim=16)
    target = load_target(tmp_path, device="cpu", dtype="auto")
    assert target.native is not None
    assert weight_formats(target.model) == f"{name.partition('-')[0].replace('compressed', 'compressed-tensors')} " + (
        "int8" if "8" in name else "int4"
    )
    packed = packed_in(target.model)
    assert len(packed) == 7 * tiny.LAYERS
    for path, part in packed.items():
        assert torch.equal(part.exact(), meant.get_parameter(f"{path}.weight"))
    if name in ("awq", "compressed-w8a8"):  # of each kind of blocks: the others have the same
        decoded_losslessly(target)

    plain = load_target(tmp_path, device="cpu")
    short = load_embedding_and_head(tmp_path, device="cpu", dtype="float32")
    assert weight_formats(plain.model) is None
    assert all(
        torch.equal(plain.model.get_submodule(path).weight, meant.get_parameter(f"{path}.weight")) for path in packed
    )
    assert len({fingerprint(one.model) for one in (target, plain)}) == 1
    assert len({embedding_head_fingerprint(one.model, one.layers) for one in (target, plain, short)}) == 1


@pytest.mark.every(2)
@needs_kernels
@pytest.mark.parametrize(("family", "name"), tiny.sample(list(FAMILIES), ["awq", "gptq", "compressed-int8"]))
def test_families_with_experts_and_latents(
    tmp_path: Path, family: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32, with inputs as they are, logits are those of the float model; else speculation is lossless."""
    meant = quantized.write(tmp_path, name, family=family, **tiny.fitting(family), **FAMILIES[family])
    monkeypatch.setattr("eyas.targets.loading._half_may_be_native", lambda *_: False)
    monkeypatch.setattr("eyas.targets.loading._dtype_in_use", lambda *_: torch.float32)
    target = load_target(tmp_path, device="cpu", dtype="auto")
    assert target.native is not None
    stacks = [part for part in packed_in(target.model).values() if part.stacked]
    assert len(stacks) == 2 * sum(type(each.mlp).__name__.endswith(("Moe", "MoE", "Block")) for each in target.layers)
    ids = torch.tensor([[3, 14, 15, 9, 26]])
    with inputs_as_floats(target.model, target.native):
        cache = target.allocate(1)
        found, _ = target.prefill_to_end(cache, range(1), ids.tolist(), ())
    expected = meant(input_ids=ids, use_cache=False).logits[0, -1]
    torch.testing.assert_close(found.rows[0], expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    if family != "llama":
        decoded_losslessly(target)


@needs_kernels
def test_answers_end_where_the_generation_config_says(tmp_path: Path) -> None:
    quantized.write(tmp_path, "awq", head_dim=16)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    assert eos_token_ids(load_target(tmp_path, device="cpu", dtype="auto").model) == (3, 5)


def changed(folder: Path, **changes: Callable[[Tensor], Tensor | None]) -> None:
    """Change the tensors of all output projections whose names end so; None removes them."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for end, change in changes.items():
        for name in [name for name in tensors if name.endswith(f"o_proj.{end}")]:
            made = change(tensors.pop(name))
            if made is not None:
                tensors[name] = made.contiguous()
    save_file(tensors, file, metadata={"format": "pt"})


@needs_kernels
@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("gptq-act-order", {}, "some blocks of 32 inputs don't share a scale"),
        ("compressed-int4", {"weight_scale": lambda x: x.float() * 1.001}, "float16 doesn't hold scales in float32"),
        ("gptq-8", {"qzeros": lambda x: x + 1}, "they have 8 bits and are asymmetric"),
    ],
)
def test_what_the_kernels_cannot_hold_is_dequantized(
    tmp_path: Path, name: str, changes: dict[str, Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    meant = quantized.write(tmp_path, name, head_dim=16)
    changed(tmp_path, **changes)
    target = load_target(tmp_path, device="cpu", dtype="auto")
    assert why in caplog.text
    left = [path for path in dict(meant.named_modules()) if path.endswith("o_proj" if changes else "_proj")]
    assert not set(left) & set(packed_in(target.model))
    assert len(packed_in(target.model)) == (6 * tiny.LAYERS if changes else 0)
    if not changes:
        plain = load_target(tmp_path, device="cpu")
        assert all(
            torch.equal(plain.model.get_submodule(path).weight, meant.get_parameter(f"{path}.weight")) for path in left
        )
        decoded_losslessly(target)


@pytest.mark.parametrize(
    ("name", "changes", "why"),
    [
        ("gptq-zeros", {"qzeros": lambda x: x | 15}, "a zero point of 0, which version 1 of the format can't hold"),
        ("gptq", {"qzeros": lambda _: None}, "a tensor is missing"),
        ("gptq", {"g_idx": lambda x: x * 0}, "64 inputs don't make 2 groups"),
        ("gptq", {"bias": lambda x: x + 1}, "holds a bias of .*o_proj, which has none"),
        ("awq", {"scales": lambda x: x[:1]}, "don't have awq's layout: scales"),
        ("awq", {"qweight": lambda _: None}, "which belongs to no quantized weight"),
        ("compressed-int4", {"weight_shape": lambda x: x * 2}, "for a weight"),
        (
            "compressed-int8",
            {"weight_packed": lambda x: x[:32], "weight_shape": lambda x: x // 2},
            "don't have compressed-tensors's layout",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, name: str, changes: dict[str, Any], why: str) -> None:
    quantized.write(tmp_path, name)
    changed(tmp_path, **changes)
    with pytest.raises(ModelError, match=why):
        load_target(tmp_path, device="cpu")


def test_a_weight_of_another_size_than_the_model_s_is_refused(tmp_path: Path) -> None:
    quantized.write(tmp_path, "awq")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 256}))
    with pytest.raises(ModelError, match=r"mlp.down_proj is \[64, 128\], and \[64, 256\] in the model"):
        load_target(tmp_path, device="cpu")


@needs_kernels
def test_float16_beside_packed_weights_becomes_float32(tmp_path: Path) -> None:
    quantized.write(tmp_path, "awq", head_dim=16)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    target = load_target(tmp_path, device="cpu", dtype="auto")
    assert (target.dtype, weight_formats(target.model)) == (torch.float32, "awq int4")
    with pytest.raises(UsageError, match="is quantized by awq already"):
        load_target(tmp_path, device="cpu", quantize="int4")


@needs_kernels
def test_experts_of_another_form_are_dequantized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meant = quantized.write(tmp_path, "gptq", family="qwen3moe", head_dim=16)
    monkeypatch.setattr("eyas.targets.native.forms.activation_of", Mock(side_effect=UnsupportedModelError("no")))
    target = load_target(tmp_path, device="cpu", dtype="auto")
    assert target.native is None
    for name, weight in meant.state_dict().items():
        if name.endswith("experts.down_proj"):
            assert torch.equal(target.model.get_parameter(name), weight.to(target.dtype))
