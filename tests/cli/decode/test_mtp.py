"""`--method mtp`: the module in the target's own checkpoint drafts, and says so where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from ...drafters.in_target.checkpoints import module_tensors
from ...pairs import Pair, save_target, tokenizer
from ...tiny import build_model
from ..conftest import Run

PROMPT = ("--prompt", "In May?", "--max-new-tokens", 8)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A target with a tokenizer and a module in MiMo's layout."""
    path = save_target(tmp_path / "model", "qwen2")
    held = module_tensors(build_model("qwen2", vocab_size=len(tokenizer())), "mimo")
    save_file({**load_file(path / "model.safetensors"), **held}, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_it_drafts_with_the_target_s_own_module(run: Run, model: Path) -> None:
    plain = run("generate", model, *PROMPT)
    drafted = run("generate", model, "--method", "mtp", "--tree", "chain:3", *PROMPT)
    assert drafted.exit_code == 0, drafted.stderr
    assert drafted.stdout == plain.stdout
    assert "accept length" in drafted.stdout + drafted.stderr
    told = run("inspect", model)
    assert "model.mtp_layers.0.* (MiMo's layout)" in told.stdout


def test_a_target_without_a_module_says_what_there_is(run: Run, pair: Pair) -> None:
    result = run("generate", pair.model, "--method", "mtp", *PROMPT)
    assert result.exit_code != 0
    assert "has no MTP modules" in result.stderr
    assert "ngram" in result.stderr
    assert run("generate", pair.model, "--method", "mla", *PROMPT).exit_code == 2
