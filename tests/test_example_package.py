"""The example package, installed as its user installs it: trained, inspected, decoded with, and found by its names."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eyas.cli.app import app

from .packages import build_and_install, on_the_path
from .pairs import save_target, write_rows

EXAMPLE = Path(__file__).parent.parent / "examples" / "two_layer"
PROMPTS = ("def add(a, b):", "Natalia sold 48/2 =")


@pytest.fixture(scope="module", autouse=True)
def _installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with on_the_path(build_and_install(EXAMPLE, tmp_path_factory.mktemp("example") / "site")):
        yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def drafter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's recipe, run for a few steps."""
    folder = tmp_path_factory.mktemp("run")
    rows = [
        {
            "id": str(n),
            "messages": [{"role": "user", "content": PROMPTS[0]}, {"role": "assistant", "content": f"return {n} + b"}],
        }
        for n in range(12)
    ]
    chats = write_rows(folder / "chats.jsonl", rows)
    eyas(
        "train",
        "two_layer",
        f"drafter.target={model}",
        "drafter.source=online",
        f"drafter.chats={chats}",
        "drafter.held_out_share=0.2",
        f"drafter.output={folder / 'run'}",
        "drafter.shape.options.width=24",
        "drafter.max_length=64",
        "drafter.batch_tokens=128",
        "drafter.loop.epochs=null",
        "drafter.loop.steps=4",
        "drafter.loop.log_every=1",
        "drafter.validation={batches: 1, prompts: 1, max_tokens: 8, tree: 'chain:2'}",
        "drafter.device=cpu",
        "drafter.target_dtype=float32",
    )
    return folder / "run" / "drafter"


def eyas(*words: Any) -> str:
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, done.output
    return done.stdout


def decoded(model: Path, *words: Any) -> list[list[int]]:
    prompts = write_rows(model / "prompts.jsonl", [{"prompt": prompt} for prompt in PROMPTS])
    rows = eyas(
        "generate",
        model,
        "--prompt-file",
        prompts,
        "--raw",
        "--max-new-tokens",
        24,
        "--json",
        "--device",
        "cpu",
        *words,
    )
    return [json.loads(row)["token_ids"] for row in rows.splitlines() if row.startswith("{")]


@pytest.mark.every(3)
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("method", [("--tree", "chain:3"), ("--tree", "dynamic:3,4,9"), ("--method", "+last_time")])
def test_its_drafter_changes_no_token(model: Path, drafter: Path, method: tuple[str, ...], temperature: int) -> None:
    sampling = ("--temperature", temperature, "--seed", 5)
    plain = decoded(model, "--method", "none", *sampling)
    assert len(plain) == len(PROMPTS)
    assert decoded(model, "--draft-model", drafter, *method, *sampling) == plain


def test_its_method_changes_no_token(model: Path) -> None:
    plain = decoded(model, "--method", "none")
    assert decoded(model, "--method", "last_time") == plain


def test_its_drafter_is_known_by_its_files(model: Path, drafter: Path) -> None:
    assert "two_layer" in eyas("inspect", drafter, "--model", model)
    config = json.loads((drafter / "config.json").read_text(encoding="utf-8"))
    assert (config["model_type"], config["width"]) == ("eyas_two_layer", 24)
    assert config["eyas"]["loss"]["feature"] == "smooth_l1"  # the kind's own
    refused = CliRunner().invoke(
        app, ["export", str(drafter), "--to", "vllm", "--output", str(drafter.parent / "out"), "--model", str(model)]
    )
    assert refused.exit_code != 0
    assert "it doesn't support drafters of kind two_layer" in refused.stderr


def test_version_lists_it() -> None:
    lines = eyas("--version").splitlines()
    assert {
        "  eyas-two-layer 0.1: drafter kind two_layer", "  eyas-two-layer 0.1: method last_time",
        "  eyas-two-layer 0.1: folder of recipes two_layer",
    } <= {*lines[1:]}  # fmt: skip


def test_it_is_imported_only_when_it_is_asked_for(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "eyas_two_layer", raising=False)
    eyas("--help")
    decoded(model, "--method", "suffix")
    assert "eyas_two_layer" not in sys.modules
