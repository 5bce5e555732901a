"""A target that is sharded over two processes computes what the whole one does, and drafters are trained alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eyas.errors import ConfigError
from eyas.hub import find_target
from eyas.targets import load_target
from eyas.targets.fingerprint import fingerprint
from eyas.train.drafter.config import DrafterTrainConfig
from eyas.train.drafter.target import load_run_target
from eyas.train.drafter.train import train_drafter
from eyas.train.loop.distributed import ProcessGroup

from ..loop.test_processes import losses, metrics, recipe, together, write
from .shards import BATCHES, CHUNK, TAPS, rows
from .test_data import capture_store

SCRIPT = Path(__file__).parent / "shards.py"


def test_states_are_those_of_the_whole_target(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together(2, str(target), str(tmp_path), script=SCRIPT)
    monkeypatch.setattr("eyas.targets.target.MAX_UNCHUNKED", CHUNK)
    monkeypatch.setattr("eyas.targets.target.CHUNK", CHUNK)
    whole = load_target(target, dtype="float32", device="cpu", prepacked=False)
    layers = sum(p.numel() for layer in whole.layers for p in layer.parameters())
    rest = sum(p.numel() for p in whole.model.parameters()) - layers
    for rank, shapes in BATCHES.items():
        facts = json.loads((tmp_path / f"{rank}.json").read_text())
        assert facts == {
            "held": layers // 2, "layers": layers, "whole": rest, "fingerprint": fingerprint(whole.model),
            "trains": False,
        }  # fmt: skip
        found = load_file(tmp_path / f"{rank}.safetensors")
        for shape in shapes:
            expected = whole.trace(*rows(shape), TAPS)
            for turn in range(2):
                assert torch.equal(found[f"{turn}-{shape[1]}-taps"], expected.taps)
                assert torch.equal(found[f"{turn}-{shape[1]}-final"], expected.final)
        first = whole.trace(*rows(shapes[0]), TAPS).final
        assert torch.equal(found["logits"], whole.head(first))


@pytest.mark.slow
def test_drafters_are_trained_alike(sure_target: Path, chats: Path, tmp_path: Path) -> None:
    """Also where a process has more passes than the other: a segment is one, and so is what a store lacks of a batch.

    Three prompts are decoded, two by one process.
    """
    part = capture_store(sure_target, chats, tmp_path / "part", (1, 3, 4), slice(0, 20))
    sources: dict[str, dict[str, Any]] = {
        "segments": {"source": "online", "segments": {"length": 16, "context": 4}},
        "hybrid": {"source": "hybrid", "store": str(part)},
    }

    def made(name: str, parallel: str) -> dict[str, Any]:
        loop = {"steps": 6, "accumulate": 2, "validate_every": 3, "parallel": parallel}
        values = recipe(sure_target, chats, tmp_path / f"{name}-{parallel}", **loop)
        validation = {**values["validation"], "prompts": 3}
        return {**values, "batch_tokens": 128, "validation": validation, **sources[name]}

    together(2, *(write(made(name, "fsdp")) for name in sources))
    for name in sources:
        train_drafter(DrafterTrainConfig.model_validate(made(name, "none")))
        one, two = tmp_path / f"{name}-none", tmp_path / f"{name}-fsdp"
        whole = losses(one)
        assert whole[-1] < whole[0] - 0.1
        assert losses(two) == pytest.approx(whole, abs=1e-4)
        for ours, theirs in zip(metrics(two), metrics(one), strict=True):
            assert ours.keys() == theirs.keys()
            if "decoded_accept_length" in ours:
                assert ours["decoded_accept_length"] == pytest.approx(theirs["decoded_accept_length"], abs=0.3)
                assert ours["validation_loss"] == pytest.approx(theirs["validation_loss"], abs=1e-4)
        weights, expected = (load_file(folder / "drafter" / "model.safetensors") for folder in (two, one))
        assert weights.keys() == expected.keys()
        for key, weight in expected.items():
            torch.testing.assert_close(weights[key], weight, atol=2e-3, rtol=0, msg=f"{name} {key}")


def test_quantized_weights_are_not_sharded(sure_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.train.drafter.target.quantized_by", lambda _: "awq")
    processes = ProcessGroup(0, 2, torch.device("cpu"), "fsdp")
    with pytest.raises(ConfigError, match=r"quantized by awq.*set loop.parallel to ddp"):
        load_run_target(find_target(sure_target), "float32", processes, whole=True)
