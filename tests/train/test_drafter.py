"""From recipe to a drafter that the engine loads, and that agrees with what training said of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eyas.engine import load
from eyas.errors import ConfigError
from eyas.train.drafter import DrafterTrainConfig, train_drafter
from eyas.types import Request, SamplingParams


def recipe(target: Path, chats: Path, output: Path, **more: Any) -> DrafterTrainConfig:
    drafter = {"draft_vocab_size": 64, "fc_norm": True, "norm_output": True, **more.pop("drafter", {})}
    return DrafterTrainConfig.model_validate(
        {
            "target": str(target), "chats": chats, "output": output, "drafter": drafter, "unroll": 3,
            "batch_tokens": 256, "max_length": 128, "held_out_share": 0.2, "validation_batches": 1,
            "loop": {"steps": 6, "optimizer": {"lr": 0.01}}, **more,
        }
    )  # fmt: skip


def test_trained_drafter_serves(target: Path, chats: Path, tmp_path: Path) -> None:
    place = train_drafter(recipe(target, chats, tmp_path))
    provenance = json.loads((place / "config.json").read_text())["eyas"]
    assert provenance["steps"] == 6
    assert provenance["covered"] > 0.9
    assert {"target_fingerprint", "chats_hash", "validation", "versions"} <= provenance.keys()

    request = Request((3, 20, 21, 22, 1, 4), SamplingParams(max_tokens=40, ignore_eos=True))
    plain = load(target).generate([request])[0]
    drafted = load(target, place, tree="chain:3").generate([request])[0]
    assert drafted.token_ids == plain.token_ids
    assert len(set(plain.token_ids)) > 3


def test_training_lowers_the_loss_and_resumes(target: Path, chats: Path, tmp_path: Path) -> None:
    def losses(folder: Path) -> dict[int, float]:
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        return {line["step"]: line["loss"] for line in lines if "loss" in line}

    def run(steps: int, folder: Path) -> None:
        loop = {
            "steps": steps, "log_every": 1, "validate_every": 1000, "bf16": False,
            "optimizer": {"lr": 0.01}, "schedule": {"kind": "constant", "warmup": 0.0},
        }  # fmt: skip
        train_drafter(recipe(target, chats, folder, loop=loop))

    run(12, tmp_path / "whole")
    run(5, tmp_path / "halves")
    run(12, tmp_path / "halves")
    whole = losses(tmp_path / "whole")
    assert whole == losses(tmp_path / "halves")
    assert whole[12] < whole[1]
    weights = [(tmp_path / name / "drafter" / "model.safetensors").read_bytes() for name in ("whole", "halves")]
    assert weights[0] == weights[1]


def test_a_narrow_drafter_needs_its_own_embedding(target: Path, chats: Path, tmp_path: Path) -> None:
    narrow = {"hidden_size": 16, "head_dim": 8}
    with pytest.raises(ConfigError, match="train_embedding"):
        train_drafter(recipe(target, chats, tmp_path / "a", drafter=narrow))
    place = train_drafter(recipe(target, chats, tmp_path / "b", drafter={**narrow, "train_embedding": True}))
    assert load(target, place).generate([Request((3, 20), SamplingParams(max_tokens=5))])
