"""Corrected copies: the same network as the winning reading, read back from files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eyas.doctor.diagnosis import apply_changes, write_repaired
from eyas.doctor.measure import Reading
from eyas.doctor.search import other_readings
from eyas.drafters.checkpoint import open_checkpoint
from eyas.errors import ExportError, UsageError
from eyas.targets import Target

from .. import tiny
from .test_readings import reading


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny.target()


def fused(read: Reading, target: Target) -> torch.Tensor:
    """What the network makes of the states of boundaries 0 .. n + 1, those it reads picked out."""
    states = torch.randn(1, 5, target.final_boundary + 1, tiny.HIDDEN, generator=torch.Generator().manual_seed(0))
    return read.network(target).fuse(states[:, :, list(read.taps)])


@pytest.mark.parametrize("settings", [{}, {"fc_norm": True}, {"norm_before_fc": True}])
def test_taps_rise_again_and_nothing_else_changes(settings: dict[str, bool], target: Target, tmp_path: Path) -> None:
    read = reading("eagle3", taps=[1, 2, 4], **settings)
    change = next(c for c in other_readings(read, target) if c.name == "fc reads [4, 1, 2]")
    made = apply_changes(read, [change])
    assert made.taps == (1, 2, 4)
    wanted = fused(change.apply(read), target)
    assert torch.allclose(fused(made, target), wanted, atol=1e-5)
    assert not torch.allclose(fused(read, target), wanted, atol=1e-2)
    seen: list[Reading] = []
    write_repaired(made, {"steps": 3}, tmp_path / "copy", target, seen.append)
    again = open_checkpoint(tmp_path / "copy", layers=target.num_layers)
    assert again.provenance == {"steps": 3}
    assert Reading.of(again, target).taps == seen[0].taps == (1, 2, 4)
    assert torch.allclose(fused(seen[0], target), wanted, atol=1e-5)


def test_every_written_change_survives_the_files(target: Target, tmp_path: Path) -> None:
    read = reading("eagle3", taps=[1, 2, 4])
    for number, change in enumerate(other_readings(read, target)):
        made = apply_changes(read, [change])
        seen: list[Reading] = []
        write_repaired(made, {}, tmp_path / str(number), target, seen.append)
        (back,) = seen
        assert back.taps == made.taps
        assert back.config.model_copy(update={"taps": None}) == made.config.model_copy(update={"taps": None}), change
        assert back.tensors.keys() == made.tensors.keys()
        assert all(torch.equal(back.tensors[name], made.tensors[name]) for name in made.tensors), change


def test_a_copy_that_checks_badly_is_not_left_behind(target: Target, tmp_path: Path) -> None:
    def refuse(_copy: Reading) -> None:
        raise ExportError("no")

    with pytest.raises(ExportError):
        write_repaired(reading("eagle3", taps=[1, 2, 4]), {}, tmp_path / "copy", target, refuse)
    assert list(tmp_path.iterdir()) == []


def test_refused(target: Target, tmp_path: Path) -> None:
    read = reading("eagle1")
    (change,) = [c for c in other_readings(read, target) if c.aspect == "taps"]
    with pytest.raises(ExportError, match="before the final norm"):
        apply_changes(read, [change])
    (tmp_path / "kept").write_text("here", encoding="utf-8")
    with pytest.raises(UsageError, match="isn't empty"):
        write_repaired(reading("eagle3"), {}, tmp_path, target, lambda _: None)
