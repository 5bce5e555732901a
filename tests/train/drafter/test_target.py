"""A target that is sharded over two processes computes what the whole one does, and drafters are trained alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eyas.targets import load_target, trace
from eyas.targets.fingerprint import fingerprint

from ..loop.test_processes import together
from .shards import BATCHES, CHUNK, TAPS, rows

SCRIPT = Path(__file__).parent / "shards.py"


def test_states_are_those_of_the_whole_target(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together(2, str(target), str(tmp_path), script=SCRIPT)
    monkeypatch.setattr(trace, "AT_ONCE", CHUNK)
    monkeypatch.setattr(trace, "CHUNK", CHUNK)
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
