"""The CLI takes every kind of drafter that is trained, and says when one was trained for another target."""

from __future__ import annotations

from pathlib import Path

import pytest

from eyas.drafters.checkpoint import save_network

from ... import tiny
from ...pairs import Pair, tokenizer
from ..conftest import Run


def made(path: Path, kind: str) -> Path:
    save_network(tiny.network(kind, vocab_size=len(tokenizer())), path, {"target_fingerprint": "made up"})
    return path


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", tiny.TRAINED)
def test_the_files_say_what_it_is(kind: str, run: Run, pair: Pair, tmp_path: Path) -> None:
    options = ("generate", "--model", pair.model, "--prompt", "In May?", "--max-new-tokens", 8)
    plain = run(*options, "--method", "none")
    for method in ((), ("--method", kind)):
        drafted = run(*options, "--draft-model", made(tmp_path, kind), *method)
        assert drafted.stdout == plain.stdout  # the warning is not output
        assert drafted.stderr.count("warning: ") == 1
        assert "trained for other weights" in drafted.stderr
    other = "mlp" if kind != "mlp" else "eagle3"
    refused = run(*options, "--draft-model", tmp_path, "--method", other)
    assert refused.exit_code == 2
    assert f"is of the kind {kind}, not {other}" in refused.stderr


def test_inspect_compares_fingerprints(run: Run, pair: Pair, tmp_path: Path) -> None:
    result = run("inspect", made(tmp_path, "eagle1"), "--model", pair.model)
    assert result.exit_code == 0
    assert "trained for other weights than this target's: its fingerprint is made up" in result.stdout
    assert "trained for other weights" not in run("inspect", tmp_path).stdout
