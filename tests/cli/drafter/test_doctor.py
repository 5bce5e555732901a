"""`eyas doctor`: verdicts, exit codes, corrected copies."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eyas.cli.common.verb import FAILURE

from ...doctor import faults
from ...pairs import Pair
from ...toy.pair import TOY_DRAFTER, TOY_TARGET
from ..conftest import Run


@pytest.mark.slow
def test_random_weights_are_called_that(run: Run, pair: Pair, tmp_path: Path) -> None:
    asked = ("doctor", "--model", pair.model, "--draft-model", pair.drafter, "--max-new-tokens", 16, "-n", 2)
    shown = run(*asked, "--fix", tmp_path / "copy")
    assert shown.exit_code == FAILURE
    assert "RANDOM WEIGHTS" in shown.stdout
    assert "nothing is written" in shown.stderr
    assert not (tmp_path / "copy").exists()
    told = json.loads(run(*asked, "--json").stdout)
    assert (told["verdict"], told["findings"], told["fixed"]) == ("random", [], None)
    assert len(told["as_is"]["decoded"]["accepted_by_position"]) == 2
    assert {"aspect", "reading", "gain", "error", "z", "wins"} <= told["readings"][0].keys()


def test_a_used_folder_is_refused_before_anything_is_loaded(run: Run, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("here", encoding="utf-8")
    result = run("doctor", "--model", "nowhere", "--draft-model", "nowhere", "--fix", tmp_path)
    assert result.exit_code == 2
    assert "isn't empty" in result.stderr


def test_a_language_model_has_no_readings(run: Run, pair: Pair) -> None:
    result = run("doctor", "--model", pair.model, "--draft-model", pair.model)
    assert result.exit_code == 2
    assert "is a language model" in result.stderr


@pytest.mark.slow
def test_two_faults_are_found_put_right_and_gone(run: Run, tmp_path: Path) -> None:
    drafter = faults.write(tmp_path / "drafter", faults.taps(1, 15, 28), faults.setting(norm_before_residual=True))
    asked = ("doctor", "--model", TOY_TARGET, "--max-new-tokens", 96, "--json")
    found = run(*asked, "--draft-model", drafter, "--fix", tmp_path / "copy")
    told = json.loads(found.stdout)
    assert found.exit_code == FAILURE
    assert {finding["aspect"] for finding in told["findings"]} == {"taps", "norm_before_residual"}
    assert told["best"]["decoded"]["accept_length"] > 1.5 * told["as_is"]["decoded"]["accept_length"]
    cured = run(*asked, "--draft-model", tmp_path / "copy")
    again = json.loads(cured.stdout)
    assert (cured.exit_code, again["verdict"], again["doubts"]) == (0, "sound", [])
    assert again["as_is"]["decoded"] == told["best"]["decoded"]


@pytest.mark.slow
def test_the_demo_drafter_is_sound_and_another_targets_is_not(run: Run, tmp_path: Path) -> None:
    asked = ("doctor", "--model", TOY_TARGET, "--max-new-tokens", 64)
    assert run(*asked, "--draft-model", TOY_DRAFTER).exit_code == 0
    drafter = faults.write(tmp_path / "drafter", faults.other_tokens)
    assert "MISMATCHED" in run(*asked, "--draft-model", drafter).stdout
