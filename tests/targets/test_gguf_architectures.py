"""GGUF files of every architecture that eyas takes, with the keys that llama.cpp reads: computed with, or refused."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import eyas
from eyas.errors import ModelError
from eyas.gguf import Gguf
from eyas.gguf_config import Model
from eyas.gguf_target import WEIGHTS
from eyas.hub import find_target
from eyas.targets.gguf_check import check_model
from eyas.targets.gguf_weights import check_names
from eyas.targets.loading import read_config, read_model
from eyas.targets.native.library import kernels
from tests import gguf_architectures as tiny


def _read(path: Path) -> Any:
    """The model in a file; converted without its tokenizer, which takes longer than all else."""
    folder = path.with_suffix("")
    Model.read(Gguf(path)).config().save_pretrained(folder)
    (folder / WEIGHTS).write_text(str(path))
    files = find_target(folder)
    return read_model(files, read_config(files), torch.float32)


_SLOW = [case for case in tiny.CASES if case.name in ("old-linear", "none", "27b") or case.architecture == "mamba"]


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow if case in _SLOW else (), id=str(case)) for case in tiny.CASES],
)
def test_a_file_is_the_model_that_its_keys_describe(case: tiny.Case, tmp_path: Path) -> None:
    model = tiny.build(case)
    path = tmp_path / "tiny.gguf"
    tiny.write(path, case, model)
    read = _read(path)
    assert type(read) is type(model)
    check_names(path, type(model), read.config)
    ids = torch.arange(60).unsqueeze(0) * 7 % tiny.VOCAB
    with torch.inference_mode():
        expected = model(ids).logits
        found = read(ids).logits
    assert expected.std() > 0.05
    assert torch.allclose(found, expected, atol=1e-4), (found - expected).abs().max()


REFUSED = {
    "attention.scale": ("llama", {"attention.scale": 0.5}),
    "logit_scale": ("llama", {"logit_scale": 0.25}),
    "a_new_key": ("qwen2", {"a_new_key": [1, 2]}),
    "rope.scaling.yarn_beta_fast": ("qwen2", {"rope.scaling.yarn_beta_fast": 16.0}),
    "rope.scaling.yarn_log_multiplier": ("llama", {"rope.scaling.yarn_log_multiplier": 0.1}),
    "rope.scaling.yarn_attn_factor": ("qwen3", {"rope.scaling.yarn_attn_factor": 2.0}),
    "rope.scaling.type": ("llama", {"rope.scaling.type": "dynamic"}),
    "rope.scaling.factor": ("llama", {"rope.scaling.factor": -2.0}),
    "gemma2.rope.scaling.factor": ("gemma2", {"rope.scaling.type": "none", "rope.scaling.factor": 8.0}),
    "rope.dimension_count": ("llama", {"rope.dimension_count": 8}),
    "rope.freq_base_swa": ("gemma2", {"rope.freq_base_swa": 500.0}),
    "rope.freq_base": ("llama", {"rope.freq_base": "high"}),
    "expert_count": ("llama", {"expert_count": 8}),
    "expert_gating_func": ("qwen3moe", {"expert_gating_func": 2}),
    "expert_weights_scale": ("qwen3moe", {"expert_weights_scale": 2.5}),
    "expert_weights_norm": ("qwen2moe", {"expert_weights_norm": True}),
    "expert_group_count": ("qwen3moe", {"expert_group_count": 2}),
    "attention.sliding_window": ("qwen2", {"attention.sliding_window": 16}),
    "attention.sliding_window_pattern": ("gemma3", {"attention.sliding_window_pattern": [True, False]}),
    "attention.causal": ("qwen3", {"attention.causal": False}),
    "attention.value_length": ("llama", {"attention.value_length": 8}),
    "attention.key_length": ("qwen2", {"attention.key_length": 32, "attention.value_length": 32}),
    "attention.head_count": ("llama", {"attention.head_count": [4, 4, 2, 4]}),
    "attention.head_count_kv": ("falcon", {"attention.head_count_kv": 2}),
    "llama.attention.head_count_kv": ("llama", {"attention.head_count_kv": 3}),
    "qwen2.attention.head_count_kv": ("qwen2", {"attention.head_count_kv": 0}),
    "attn_logit_softcapping": ("gemma3", {"attn_logit_softcapping": 50.0}),
    "gemma2.attn_logit_softcapping": ("gemma2", {"attn_logit_softcapping": 0.0}),
    "final_logit_softcapping": ("gemma2", {"final_logit_softcapping": 0.0}),
    "gemma2.attention.sliding_window": ("gemma2", {"attention.sliding_window": 0}),
    "ssm.dt_b_c_rms": ("mamba", {"ssm.dt_b_c_rms": True}),
    "nextn_predict_layers": ("qwen3", {"nextn_predict_layers": 1}),
    "vocab_size": ("llama", {"vocab_size": 90}),
    "block_count": ("llama", {"block_count": None}),
    "attention.layer_norm_rms_epsilon": ("llama", {"attention.layer_norm_rms_epsilon": None}),
    "general.type": ("llama", {"general.type": "adapter"}),
    "split.count": ("llama", {"split.count": 2}),
}  # fmt: skip
"""The key that a message names, and keys of a file that eyas doesn't compute with."""


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {}


@pytest.mark.parametrize("named", REFUSED)
def test_a_key_that_is_not_computed_with_refuses_the_file_by_name(
    named: str, models: dict[str, Any], tmp_path: Path
) -> None:
    architecture, keys = REFUSED[named]
    case = tiny.Case(architecture, "plain", keys=keys)
    path = tmp_path / "tiny.gguf"
    model = models.setdefault(architecture, tiny.build(case))
    tiny.write(path, case, model)
    with pytest.raises(ModelError, match=rf"tiny\.gguf.*{re.escape(named)}"):
        Model.read(Gguf(path))


@pytest.mark.parametrize(
    ("architecture", "keys", "tensor", "size"),
    [
        ("qwen2", {}, "rope_freqs.weight", 8),
        ("llama", {}, "rope_factors_long.weight", 8),
        ("llama", {}, "rope_freqs.weight", 7),
        ("llama", {"rope.scaling.type": "longrope"}, "rope_freqs.weight", 8),
        ("llama", {}, "blk.1.attn_sinks.weight", 4),
        ("gemma2", {}, "output.weight", 96),
        ("llama", {}, "blk.1.attn_q.bias", 64),
    ],
)
def test_a_tensor_that_is_not_computed_with_refuses_the_file_by_name(
    architecture: str, keys: dict[str, Any], tensor: str, size: int, models: dict[str, Any], tmp_path: Path
) -> None:
    shape = (size, tiny.HIDDEN) if tensor == "output.weight" else (size,)
    case = tiny.Case(architecture, "plain", keys=keys, tensors={tensor: np.full(shape, 2.0)})
    tiny.write(tmp_path / "tiny.gguf", case, models.setdefault(architecture, tiny.build(case)))
    part = "self_attn" if "bias" in tensor else tensor
    with pytest.raises(ModelError, match=rf"tiny.*{re.escape(part)}"):
        _read(tmp_path / "tiny.gguf")


def test_notes_of_whoever_made_the_file_change_nothing(models: dict[str, Any], tmp_path: Path) -> None:
    case = tiny.Case("llama", "plain")
    path = tmp_path / "tiny.gguf"
    notes = {
        "general.quantized_by": "somebody",
        "general.sampling.temp": 0.7,
        "split.count": 1,
        "general.type": "model",
    }
    tiny.write(path, tiny.Case("llama", "plain", keys=notes), models.setdefault("llama", tiny.build(case)))
    assert _read(path).config.rms_norm_eps == pytest.approx(1e-3)


def test_an_architecture_that_is_not_taken_is_named_with_those_that_are(gguf_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(gguf_file.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0grok1", 1))
    with pytest.raises(ModelError, match=r"other\.gguf is of llama\.cpp's architecture grok1.*llama, qwen2, "):
        Model.read(Gguf(path))


SPOILED: dict[str, Callable[[Any], None]] = {
    "RoPE's frequencies": lambda model: model.model.rotary_emb.sliding_attention_inv_freq.mul_(1.01),
    "RoPE's factor": lambda model: setattr(model.model.rotary_emb, "full_attention_attention_scaling", 1.1),
    "windows": lambda model: setattr(model.config, "sliding_window", 7),
    "an epsilon": lambda model: setattr(model.model.layers[2].self_attn.q_norm, "eps", 1e-6),
    "a scale": lambda model: setattr(model.model.layers[3].self_attn, "scaling", 1.0),
    "a cap of scores": lambda model: setattr(model.model.layers[3].self_attn, "attn_logit_softcapping", 50.0),
    "a cap of logits": lambda model: setattr(model.config, "final_logit_softcapping", 30.0),
}


@pytest.mark.parametrize("what", SPOILED)
def test_a_model_that_transformers_built_otherwise_is_refused(what: str, tmp_path: Path) -> None:
    case = tiny.Case("gemma3", "plain")
    path = tmp_path / "tiny.gguf"
    model = tiny.build(case)
    tiny.write(path, case, model)
    check_model(path, model)
    SPOILED[what](model)
    with pytest.raises(ModelError, match=rf"computes with {what}"):
        check_model(path, model)


NATIVE = ("llama-yarn-attn-factor", "llama-llama3", "llama-listed", "phi3-longrope", "gemma2-plain", "gemma3-bases")


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("name", NATIVE)
def test_passes_that_serve_compute_what_the_keys_say(name: str, tmp_path: Path) -> None:
    case = next(case for case in tiny.CASES if str(case) == name)
    model = tiny.build(case)
    path = tmp_path / "tiny.gguf"
    tiny.write(path, case, model)
    engine = eyas.load(path, dtype="float32")
    assert kernels() is None or engine.target.native is not None
    ids = tuple(index * 7 % (tiny.VOCAB - 2) for index in range(90))
    params = eyas.SamplingParams(max_tokens=1, logprobs=20, ignore_eos=True)
    (completion,) = engine.generate([eyas.Request(ids, params)])
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    assert completion.logprobs is not None
    for token, value in completion.logprobs[0].top:
        assert value == pytest.approx(expected[token].item(), abs=1e-4)


def test_phi3_s_window_is_that_of_its_own_code(tmp_path: Path) -> None:
    case = tiny.Case("phi3", "window", {"sliding_window": 6}, {"attention.sliding_window": 6})
    model = tiny.build(case)
    path = tmp_path / "tiny.gguf"
    tiny.write(path, case, model)
    read = _read(path)
    ids = torch.arange(40).unsqueeze(0)
    assert read.config.sliding_window == 6
    with torch.inference_mode():
        assert torch.allclose(read(ids).logits, model(ids).logits, atol=1e-4)


def test_names_are_checked_without_reading_a_weight(models: dict[str, Any], tmp_path: Path) -> None:
    model = models.setdefault("llama", tiny.build(tiny.Case("llama", "plain")))
    path = tmp_path / "tiny.gguf"
    tiny.write(path, tiny.Case("llama", "plain", tensors={"blk.1.attn_sinks.weight": np.full((4,), 2.0)}), model)
    with pytest.raises(ModelError, match=r"has no place for: \['blk\.1\.attn_sinks\.weight'\]"):
        check_names(path, type(model), model.config)
    deeper = copy.deepcopy(model.config)
    deeper.num_hidden_layers += 1
    tiny.write(path, tiny.Case("llama", "plain"), model)
    with pytest.raises(ModelError, match=r"lacks 9 of the target's tensors"):
        check_names(path, type(model), deeper)
