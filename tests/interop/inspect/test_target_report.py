"""What is told of a target directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3NextConfig
from typer.testing import CliRunner

from eyas.cli.app import app
from eyas.drafters.files import read_headers
from eyas.errors import ModelError
from eyas.interop.inspect.report import TargetReport, report_target

from ... import quantized, tiny
from ...drafters.in_target import checkpoints
from ...pairs import save_target, tokenizer


def examine(path: Path) -> TargetReport:
    return report_target(path, read_headers(path))


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("llama", {"full_attention": None}),
        ("mistral", {"sliding_attention": tiny.WINDOW}),
        ("olmo3", {"full_attention": None, "sliding_attention": tiny.WINDOW}),
        ("gpt2", {"full_attention": None}),
    ],
)
def test_architectures(name: str, windows: dict[str, Any], tmp_path: Path) -> None:
    model = tiny.build_model(name)
    model.save_pretrained(tmp_path)
    report = examine(tmp_path)
    assert report.problems == []
    assert report.attention == windows
    assert (report.layers, report.hidden_size, report.vocab_size) == (tiny.LAYERS, tiny.HIDDEN, tiny.VOCAB)
    assert (report.max_length, report.default_taps) == (256, [1, 3, 4])
    shared = {p.data_ptr(): p.numel() for p in model.parameters()}  # a tied head is stored once
    assert report.parameters == sum(shared.values())
    assert report.rope_theta == {"gpt2": None, "olmo3": 500000.0}.get(name, 10000.0)
    assert report.warnings == ["no tokenizer files: prompts and answers are token ids, text can't be read or written"]
    assert not report.tokenizer
    assert report.profile.hidden_size == tiny.HIDDEN


@pytest.mark.parametrize(
    ("name", "method"), [("compressed-int4", "compressed-tensors"), ("gptq", "gptq"), ("awq", "awq")]
)
def test_a_quantized_target_has_the_parameters_of_a_plain_one(name: str, method: str, tmp_path: Path) -> None:
    meant = quantized.write(tmp_path, name)
    report = examine(tmp_path)
    assert (report.quantized_by, report.problems) == (method, [])
    assert report.parameters == sum(parameter.numel() for parameter in meant.parameters())


def test_a_quantization_that_cannot_be_run_is_a_problem(tmp_path: Path) -> None:
    path = save_target(tmp_path)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (path / "config.json").write_text(json.dumps(config))
    (problem,) = examine(path).problems
    assert "depends on all tokens of a pass" in problem


def test_stop_ids_are_told_with_their_origin(tmp_path: Path) -> None:
    report = examine(save_target(tmp_path, eos_token_id=[9, 4]))
    end = tokenizer().eos_token_id
    assert report.stop_ids == {
        4: "generation_config.json",
        9: "generation_config.json",
        end: f"the tokenizer's {tokenizer().eos_token}, in chats: the template ends turns with it",
    }
    assert report.as_dict()["stop_ids"] == report.stop_ids
    result = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert "4, 9: generation_config.json" in result.stdout


def test_a_tokenizer_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    path = save_target(tmp_path)
    (path / "tokenizer.json").write_text("{}")
    (problem,) = examine(path).problems
    assert "can't load the tokenizer" in problem


def test_weights_elsewhere_or_pickled(tmp_path: Path) -> None:
    path = save_target(tmp_path)
    away = report_target(path, None)
    assert (away.parameters, away.dtypes, away.problems, away.warnings) == (None, [], [], [])
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    assert examine(path).problems == ["only pickles (pytorch_model.bin): targets are loaded from safetensors only"]


def test_what_transformers_does_not_decode_with(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", "num_hidden_layers": 2}), encoding="utf-8")
    with pytest.raises(ModelError, match="neither a causal language model of type vit nor a multimodal one"):
        report_target(tmp_path, None)


@pytest.mark.parametrize(
    ("architecture", "layout", "told"),
    [
        ("deepseek3", "deepseek", "model.layers.4.* (DeepSeek-V3's layout)"),
        ("qwen3", "qwen", "mtp.layers.0.* (Qwen3-Next's layout)"),
        ("qwen2", "mimo", "model.mtp_layers.0.* (MiMo's layout)"),
    ],
)
def test_mtp_modules_are_named(architecture: str, layout: str, told: str, tmp_path: Path) -> None:
    checkpoints.save(tmp_path, architecture, layout)
    assert examine(tmp_path).mtp_modules == [told]


def test_modules_of_a_target_with_recurrent_layers_are_named_too(tmp_path: Path) -> None:
    sizes = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 8}
    Qwen3NextConfig(**sizes).save_pretrained(tmp_path)
    outer = ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "layers.0.self_attn.q_proj")
    save_file({f"mtp.{name}.weight": torch.ones(1) for name in outer}, tmp_path / "model.safetensors")
    report = examine(tmp_path)
    assert report.mtp_modules == ["mtp.layers.0.* (Qwen3-Next's layout)"]
    assert not any("qwen3_next" in problem for problem in report.problems), report.problems
    assert report.attention == {"full_attention": None}


def test_a_target_without_modules_names_none(tmp_path: Path) -> None:
    tiny.build_model("llama").save_pretrained(tmp_path)
    assert examine(tmp_path).mtp_modules == []
