"""Training state: whole or the one before, whatever happens while it is written."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from eyas.errors import CheckpointError
from eyas.train.loop import checkpoint
from eyas.train.loop.checkpoint import META, TrainingProgress, load_state, save_state
from eyas.train.loop.distributed import ProcessGroup
from eyas.train.loop.optimizer import ResolvedOptimizer, build_optimizers

ALONE = ProcessGroup(0, 1, torch.device("cpu"), "none")


def model(seed: int, kind: str = "muon") -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """A network that has made a step."""
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    optimizers = build_optimizers(made, ResolvedOptimizer(kind=kind))  # type: ignore[arg-type]
    made(torch.randn(2, 3)).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    return made, optimizers


def tensors(made: nn.Module, optimizers: list[torch.optim.Optimizer]) -> list[torch.Tensor]:
    found = list(made.parameters())
    for optimizer in optimizers:
        for values in optimizer.state_dict()["state"].values():
            found += [values[key] for key in sorted(values)]
    return found


def test_a_state_comes_back_whole(tmp_path: Path) -> None:
    save_state(tmp_path, *model(1), TrainingProgress(7, 1.5), {"run": 1}, ALONE)
    other = model(2)
    assert load_state(tmp_path, *other, {"run": 1}) == TrainingProgress(7, 1.5)
    for a, b in zip(tensors(*model(1)), tensors(*other), strict=True):
        assert torch.equal(a, b)


def test_without_a_state_a_run_begins() -> None:
    assert load_state(Path("nowhere"), *model(1), {}) == TrainingProgress(0, 0.0)


def test_only_the_newest_state_stays(tmp_path: Path) -> None:
    for step in (3, 8):
        save_state(tmp_path, *model(step), TrainingProgress(step), {}, ALONE)
    assert {path.name for path in tmp_path.iterdir()} == {
        META, "weights-000008.safetensors", "optimizer-000008.safetensors",
    }  # fmt: skip


@pytest.mark.parametrize("writes", [0, 1, 2])
def test_a_full_disk_leaves_the_state_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int) -> None:
    save_state(tmp_path, *model(1), TrainingProgress(3), {}, ALONE)
    left = [writes]

    def counted(function: Any) -> Any:
        def write(path: Path, content: Any) -> None:
            if not left[0]:
                path.write_bytes(b"half")
                raise OSError(errno.ENOSPC, "No space left on device")
            left[0] -= 1
            function(path, content)

        return write

    monkeypatch.setattr(checkpoint, "write_tensors", counted(checkpoint.write_tensors))
    monkeypatch.setattr(checkpoint, "write_json", counted(checkpoint.write_json) if writes < 2 else _full)
    with pytest.raises(OSError, match="No space"):
        save_state(tmp_path, *model(2), TrainingProgress(9), {}, ALONE)
    other = model(4)
    assert load_state(tmp_path, *other, {}).step == 3
    assert torch.equal(next(other[0].parameters()), next(model(1)[0].parameters()))
    assert len(list(tmp_path.iterdir())) == 3


def _full(path: Path, content: Any) -> None:  # noqa: ARG001
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_state_of_another_run_is_refused_by_what_differs(tmp_path: Path) -> None:
    save_state(tmp_path, *model(1), TrainingProgress(3), {"data": 1, "loss": "ce"}, ALONE)
    with pytest.raises(CheckpointError, match=r"data was 1, is 2\. Restore them to resume; to start over, .*remove"):
        load_state(tmp_path, *model(1), {"data": 2, "loss": "ce"})


def test_damage_is_named(tmp_path: Path) -> None:
    save_state(tmp_path, *model(1), TrainingProgress(3), {}, ALONE)
    (tmp_path / "weights-000003.safetensors").write_bytes(b"xx")
    with pytest.raises(CheckpointError, match="weights-000003"):
        load_state(tmp_path, *model(1), {})
    (tmp_path / META).write_text(json.dumps({"step": 3}))
    with pytest.raises(CheckpointError, match="is not a training state"):
        load_state(tmp_path, *model(1), {})
