"""Eight faults that cost acceptance without an error, and drafters without a fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from eyas.doctor.diagnosis import Examination, examine
from eyas.doctor.measure import Reading, Transcript
from eyas.drafters.checkpoint import open_checkpoint
from eyas.targets import Target

from .. import tiny
from . import faults
from .conftest import LENGTH

EIGHT = {
    "layer outputs taken for boundaries": (faults.taps(1, 15, 28), {"taps": "[2, 16, 29]"}),
    "fc inputs reversed": (faults.fc_reversed, {"tap order": "fc reads [29, 16, 2]"}),
    "target ids taken for offsets": (faults.ids_for_offsets, {"d2t": "target ids"}),
    "RoPE scaled": (faults.scaled_rope, {"rope": "theta 10000, unscaled"}),
    "a norm flag flipped": (faults.setting(norm_before_residual=True), {"norm_before_residual": "false"}),
    "the embedding lost": (faults.embedding_lost, {"embedding": "the target's own"}),
    "random weights": (faults.random_weights, "random"),
    "another target's drafter": (faults.other_basis, "mismatched"),
}


def examined(path: Path, target: Target, transcript: Transcript) -> Examination:
    reading = Reading.of(open_checkpoint(path, layers=target.num_layers), target).on(target)
    return examine(reading, target, transcript, LENGTH)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", tiny.sample([*EIGHT]))
def test_each_planted_fault_is_found_and_no_other(
    name: str, tmp_path: Path, demo_target: Target, demo_transcript: Transcript
) -> None:
    fault, expected = EIGHT[name]
    found = examined(faults.write(tmp_path / "drafter", fault), demo_target, demo_transcript)
    if isinstance(expected, str):
        assert found.verdict == expected
        return
    assert found.verdict == "misread"
    named = {each.trial.change.aspect: each.trial.change.name for each in found.found.adopted}
    assert named.keys() == expected.keys()
    assert all(named[aspect].startswith(start) for aspect, start in expected.items())


def test_the_sound_drafter_is_cleared(tmp_path: Path, demo_target: Target, demo_transcript: Transcript) -> None:
    found = examined(faults.write(tmp_path / "drafter"), demo_target, demo_transcript)
    assert found.verdict == "sound"


@pytest.mark.slow
def test_a_weak_drafter_is_cleared(tmp_path: Path, demo_target: Target, demo_transcript: Transcript) -> None:
    found = examined(faults.write(tmp_path / "drafter", faults.noise(1.0)), demo_target, demo_transcript)
    assert found.found.as_is.accept_length < 2
    assert found.verdict == "sound"
