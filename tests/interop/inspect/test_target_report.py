"""What is told of a target directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eyas.drafters.files import read_headers
from eyas.errors import ModelError
from eyas.interop.inspect.target_report import TargetReport, report_target

from ... import tiny
from ...pairs import save_target


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
    assert any("no chat template" in warning for warning in report.warnings)
    assert report.profile.hidden_size == tiny.HIDDEN


def test_weights_elsewhere_or_pickled(tmp_path: Path) -> None:
    path = save_target(tmp_path)
    away = report_target(path, None)
    assert (away.parameters, away.dtypes, away.problems, away.warnings) == (None, [], [], [])
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    assert examine(path).problems == ["only pickles (pytorch_model.bin): targets are loaded from safetensors only"]


def test_what_transformers_does_not_decode_with(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit", "num_hidden_layers": 2}), encoding="utf-8")
    with pytest.raises(ModelError, match="no causal language model of type vit"):
        report_target(tmp_path, None)
