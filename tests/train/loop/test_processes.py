"""Runs in processes of their own: two do what one does, and a killed one ends where it would have ended."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from eyas.errors import ConfigError
from eyas.files import TEMPORARY
from eyas.train.drafter.config import DrafterTrainConfig
from eyas.train.drafter.train import train_drafter

from ...forks import Fork

PLATEAU = {"kind": "constant", "warmup": 0}  # the same learning rate however long the run
SCRIPT = Path(__file__).parent / "process.py"


ONE_PASS: dict[str, dict[str, Any]] = {
    "dflash": {"shape": {"taps": [1, 2], "block_size": 5}, "loss": {"unroll": 4, "anchors": 3}},
    "dspark": {"shape": {"taps": [1, 2], "block_size": 4, "markov_rank": 4}, "loss": {"unroll": 4, "anchors": 3}},
    "peagle": {"shape": {"layers": 2, "num_depths": 4}, "loss": {"down_sample_ratio": 0.6}},
}
"""Kinds that draw what they are trained on: the anchors of a batch, or the chains of each step."""


def recipe(target: Path, chats: Path, output: Path, kind: str = "eagle3.1", **loop: Any) -> dict[str, Any]:
    """A tiny drafter; every step is logged."""
    own = ONE_PASS.get(kind, {"shape": {}, "loss": {"unroll": 3}})
    return {
        "target": str(target), "chats": str(chats), "held_out_share": 0.2, "output": str(output), "device": "cpu",
        "target_dtype": "float32", "shape": {"kind": kind, "draft_vocab_size": 64, **own["shape"]}, "loss": own["loss"],
        "batch_tokens": 256, "max_length": 128,
        "validation": {"batches": 3, "prompts": 2, "max_tokens": 8, "tree": "chain:2"},
        "loop": {"log_every": 1, "bf16": False, "optimizer": {"lr": 0.01}, "schedule": PLATEAU, **loop},
    }  # fmt: skip


def write(values: dict[str, Any]) -> str:
    path = Path(f"{values['output']}.yaml")
    path.write_text(yaml.safe_dump({"drafter": values}))
    return str(path)


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in metrics(folder) if "loss" in line]


def without_time(folder: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in line.items() if k not in ("seconds", "per_second")} for line in metrics(folder)]


def together(world_size: int, *arguments: str, script: Path = SCRIPT) -> None:
    """Run a script, or else recipes, on `world_size` processes, as torchrun starts them."""
    shared = {**os.environ, "WORLD_SIZE": str(world_size), "MEETING": f"{arguments[-1]}.meeting"}
    errors = [Path(f"{arguments[-1]}.errors-{rank}") for rank in range(world_size)]
    started = [
        Fork([script, *arguments], env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=errors[rank])
        for rank in range(world_size)
    ]
    assert [process.wait(100) for process in started] == [0] * world_size, "\n".join(
        path.read_text() for path in errors
    )


@pytest.mark.slow  # three processes, each of which imports PyTorch
def test_two_processes_are_one(sure_target: Path, chats: Path, tmp_path: Path) -> None:
    def made(name: str, parallel: str, steps: int = 20) -> dict[str, Any]:
        return recipe(
            sure_target, chats, tmp_path / name, steps=steps, accumulate=2, validate_every=10, parallel=parallel
        )

    # the last recipe goes on alone from where two processes stopped
    together(2, *(write(made(name, name)) for name in ("ddp", "fsdp")), write(made("halves", "fsdp", 10)))
    for name in ("one", "halves"):
        train_drafter(DrafterTrainConfig.model_validate(made(name, "none")))
    whole = losses(tmp_path / "one")
    assert len(whole) == 20
    assert whole[-1] < whole[0] - 0.1
    for name in ("ddp", "fsdp", "halves"):
        assert losses(tmp_path / name) == pytest.approx(whole, abs=1e-4)
        judged = [line for line in metrics(tmp_path / name) if "validation_loss" in line]
        expected = [line for line in metrics(tmp_path / "one") if "validation_loss" in line]
        for ours, theirs in zip(judged, expected, strict=True):
            assert ours["validation_loss"] == pytest.approx(theirs["validation_loss"], abs=1e-4)
            assert ours["decoded_accept_length"] == pytest.approx(theirs["decoded_accept_length"], abs=0.3)
        assert len(list((tmp_path / name / "checkpoints").iterdir())) == 2


@pytest.mark.slow
def test_drafters_of_one_pass_train_alike_on_two_processes(sure_target: Path, chats: Path, tmp_path: Path) -> None:
    """Each process draws the anchors and chains of its own micro-batches, which are those that one process draws."""

    def made(kind: str, parallel: str) -> dict[str, Any]:
        output = tmp_path / f"{kind}-{parallel}"
        loop = {"steps": 6, "accumulate": 2, "validate_every": 3, "parallel": parallel}
        values = recipe(sure_target, chats, output, kind, **loop)
        return {**values, "validation": {"batches": 3, "decode": False}}

    together(2, *(write(made(kind, parallel)) for kind in ONE_PASS for parallel in ("ddp", "fsdp")))
    for kind in ONE_PASS:
        train_drafter(DrafterTrainConfig.model_validate(made(kind, "none")))
        one = tmp_path / f"{kind}-none"
        whole = losses(one)
        assert whole[-1] < whole[0] - 0.1, kind
        weights = load_file(one / "drafter" / "model.safetensors")
        for parallel in ("ddp", "fsdp"):
            two = tmp_path / f"{kind}-{parallel}"
            assert losses(two) == pytest.approx(whole, abs=1e-4), two.name
            judged, expected = (
                [line["validation_loss"] for line in metrics(folder) if "validation_loss" in line]
                for folder in (two, one)
            )
            assert judged == pytest.approx(expected, abs=1e-4), two.name
            found = load_file(two / "drafter" / "model.safetensors")
            assert found.keys() == weights.keys()
            for name, weight in weights.items():
                torch.testing.assert_close(found[name], weight, atol=2e-3, rtol=0, msg=f"{two.name} {name}")


def test_micro_batches_must_share_out(
    sure_target: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = recipe(sure_target, chats, tmp_path / "odd", steps=1, parallel="ddp")
    with pytest.raises(ConfigError, match="torchrun"):
        train_drafter(DrafterTrainConfig.model_validate(odd))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="started 2 processes"):
        train_drafter(DrafterTrainConfig.model_validate({**odd, "loop": {**odd["loop"], "parallel": "none"}}))


def killed_run_equals_whole(sure_target: Path, chats: Path, tmp_path: Path, steps: int, kills: list[float]) -> None:
    def made(name: str) -> dict[str, Any]:
        loop = {"steps": steps, "validate_every": 6, "save_seconds": 0.05, "accumulate": 2}
        return {**recipe(sure_target, chats, tmp_path / name, **loop), "keep_checkpoints": 3}

    train_drafter(DrafterTrainConfig.model_validate(made("whole")))
    said, errors = tmp_path / "said", tmp_path / "errors"
    done = Fork([SCRIPT, write(made("killed")), "--kill", *kills], stdout=said, stderr=errors)
    assert done.wait(200) == 0, errors.read_text()
    assert f"killed {len(kills)} times" in said.read_text()  # none came too late
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert without_time(killed) == without_time(whole)
    names = sorted(path.relative_to(whole) for path in whole.rglob("model.safetensors"))
    assert names == sorted(path.relative_to(killed) for path in killed.rglob("model.safetensors"))
    assert len(names) >= 5
    for name in names:
        assert (killed / name).read_bytes() == (whole / name).read_bytes(), name
    assert not [path for path in killed.rglob("*") if path.name.endswith(TEMPORARY)]


@pytest.mark.slow
def test_killed_runs_end_as_they_would_have(sure_target: Path, chats: Path, tmp_path: Path) -> None:
    killed_run_equals_whole(sure_target, chats, tmp_path, 40, [0.0, 0.11, 0.3])


@pytest.mark.slow
def test_ten_random_kills(sure_target: Path, chats: Path, tmp_path: Path) -> None:
    draw = random.Random(11)
    killed_run_equals_whole(sure_target, chats, tmp_path, 150, [draw.uniform(0, 0.4) for _ in range(10)])


def test_a_run_that_paused_goes_on_to_the_same_weights(sure_target: Path, chats: Path, tmp_path: Path) -> None:
    """`until` is a pause in the schedule of all steps."""

    def made(name: str, **loop: Any) -> DrafterTrainConfig:
        falling = {"kind": "cosine", "warmup": 1}
        values = recipe(sure_target, chats, tmp_path / name, steps=6, validate_every=6, schedule=falling, **loop)
        return DrafterTrainConfig.model_validate(values)

    train_drafter(made("whole"))
    train_drafter(made("paused", until=2))
    assert len(losses(tmp_path / "paused")) == 2
    train_drafter(made("paused"))
    assert losses(tmp_path / "paused") == losses(tmp_path / "whole")
    weights = [(tmp_path / name / "drafter" / "model.safetensors").read_bytes() for name in ("whole", "paused")]
    assert weights[0] == weights[1]
