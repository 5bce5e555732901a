"""`--draft-model auto`: each place where a drafter is looked for, in order, and what is told of it."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from eyas.assets import PUBLISHED
from eyas.cli.app import app
from eyas.drafters.automatic import advice, candidates, own_runs, published
from eyas.drafters.base import Drafter
from eyas.drafters.decoding import NetworkDrafter
from eyas.drafters.hybrid import HybridDrafter
from eyas.drafters.loading import make_drafter
from eyas.drafters.options import DrafterOptions
from eyas.drafters.registry import KINDS
from eyas.drafters.weightless.suffix import SuffixDrafter
from eyas.errors import UsageError
from eyas.hub import ModelFiles
from eyas.targets import load_target
from eyas.targets.fingerprint import fingerprint

from .. import gguf_architectures as gguf
from ..pairs import save_drafter, save_target
from .in_target import checkpoints
from .in_target.test_gguf_heads import HEADS


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Any:
    """The lines that were reported."""
    caplog.set_level(logging.INFO, "eyas.loading")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "eyas.loading"]


def found(model: Path, **options: Any) -> Drafter:
    target = load_target(model, dtype="float32")
    return make_drafter(DrafterOptions("auto", quantize="off", **options), target, model=model)


def heads(folder: Path, *, inside: bool, companion: bool) -> Path:
    """A GGUF target with MTP heads inside the file, in a companion, or without any."""
    case = gguf.Case("glm4moe", "plain", keys=HEADS)
    model = gguf.build(case)
    held = gguf.head_tensors("glm4moe", model.config, checkpoints.module_tensors(model, "deepseek"))
    gguf.write(folder / "tiny-Q8_0.gguf", case, model, heads=held if inside else {})
    if companion:
        gguf.write(folder / "mtp-tiny-Q8_0.gguf", case, model, heads=held, companion=True)
    return folder / "tiny-Q8_0.gguf"


def test_a_companion_beside_the_file_comes_first(tmp_path: Path, told: Any) -> None:
    model = heads(tmp_path, inside=True, companion=True)
    assert isinstance(found(model), NetworkDrafter)
    assert told()[-1] == f"drafter: {tmp_path / 'mtp-tiny-Q8_0.gguf'}, next to the model's file"


def test_heads_in_the_file_come_next_also_with_copies(tmp_path: Path, told: Any) -> None:
    model = heads(tmp_path, inside=True, companion=False)
    assert isinstance(found(model, method="+suffix"), HybridDrafter)
    assert told()[-1] == "drafter: MTP heads, in the model's file"
    assert advice(model) == (
        f"{model} comes with a drafter, MTP heads in the model's file: `method=mtp` drafts with it"
    )


def test_a_companion_that_does_not_fit_is_passed_over_with_its_reason(tmp_path: Path, told: Any) -> None:
    model = heads(tmp_path, inside=False, companion=False)
    (tmp_path / "eagle3-tiny.gguf").write_bytes(b"GGUF")
    assert isinstance(found(model), SuffixDrafter)
    (line,) = told()[-1:]
    assert line.startswith(f"drafter: none found, so suffix decoding; skipped: {tmp_path / 'eagle3-tiny.gguf'} (")
    assert advice(model) is None


def test_modules_in_a_folder_of_safetensors_are_found(tmp_path: Path, told: Any) -> None:
    checkpoints.save(tmp_path / "model", "qwen3", "qwen")
    assert isinstance(found(tmp_path / "model"), NetworkDrafter)
    assert "MTP heads, in the checkpoint (Qwen3-Next's layout)" in told()[-1]


def test_a_published_drafter_is_taken_from_a_folder_and_named_otherwise(tmp_path: Path, told: Any) -> None:
    model = save_target(tmp_path / "Qwen3-8B-FP8")
    assert isinstance(found(model), SuffixDrafter)
    assert "published, not downloaded: RedHatAI/Qwen3-8B-speculator.eagle3," in told()[-1]
    assert told()[-1].endswith("(hf download NAME)")
    save_drafter(tmp_path / "Qwen3-8B-speculator.eagle3")
    assert isinstance(found(model), NetworkDrafter)
    assert told()[-1] == "drafter: Qwen3-8B-speculator.eagle3, published for Qwen/Qwen3-8B (eagle3)"


def test_a_drafter_in_the_hub_s_cache_is_taken(tmp_path: Path, told: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save_target(tmp_path / "Qwen3-8B")
    kept = tmp_path / "cache" / "models--RedHatAI--Qwen3-8B-speculator.eagle3"
    save_drafter(kept / "snapshots" / "abc")
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    assert isinstance(found(model), NetworkDrafter)
    assert "published for Qwen/Qwen3-8B (eagle3)" in told()[-1]


def test_own_runs_are_taken_if_they_are_of_these_weights(tmp_path: Path, told: Any) -> None:
    model = save_target(tmp_path / "mine")
    run = save_drafter(tmp_path / "runs" / "first" / "drafter")
    assert isinstance(found(model), SuffixDrafter)
    config = json.loads((run / "config.json").read_text())
    weights = fingerprint(load_target(model, dtype="float32").model)
    for origin, taken in (
        ({"target": "other", "target_fingerprint": "0"}, False),
        ({"target": "other", "target_fingerprint": weights}, True),
        ({"target": "me/Mine", "target_fingerprint": "0"}, True),
    ):
        (run / "config.json").write_text(json.dumps(config | {"eyas": origin}))
        assert isinstance(found(model), NetworkDrafter if taken else SuffixDrafter)
    assert told()[-1] == "drafter: runs/first/drafter, one of your own runs"


def test_the_latest_run_comes_first_and_its_pick_before_its_last_checkpoint(tmp_path: Path) -> None:
    model = save_target(tmp_path / "model")
    for age, folder in enumerate(("a/drafter", "b/run/drafter", "b/run/pick", "c/other")):
        made = save_drafter(tmp_path / "runs" / folder)
        os.utime(made / "config.json", (1e9 + age, 1e9 + age))
    assert own_runs() == [Path("runs/b/run/pick"), Path("runs/a/drafter")]
    assert [one.where for one in candidates(model)] == ["one of your own runs"] * 2


@pytest.mark.parametrize(
    "name",
    ["Qwen/Qwen3-8B", "Qwen3-8B", "models/Qwen3-8B-GGUF", "Qwen3-8B-AWQ", "Qwen3-8B-4bit", "qwen3-8b-w4a16-dynamic"],
)
def test_a_model_is_known_by_its_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.drafters.automatic.find_target", ModelFiles)
    assert "RedHatAI/Qwen3-8B-speculator.eagle3" in [pair.drafter for pair in published(name)]


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B-Base", "Qwen3-80B", "Qwen3.5-8B", "8B"])
def test_another_model_s_name_is_not_taken_for_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.drafters.automatic.find_target", ModelFiles)
    assert published(name) == []


def test_a_gguf_file_is_known_by_what_it_says_it_is(tmp_path: Path) -> None:
    case = gguf.Case("llama", "plain", keys={"general.base_model.0.name": "Llama 3.1 8B Instruct"})
    gguf.write(tmp_path / "any.gguf", case, gguf.build(case))
    assert "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B" in [pair.drafter for pair in published(tmp_path / "any.gguf")]


def test_every_published_pair_has_a_source_and_a_kind_that_eyas_knows() -> None:
    held = json.loads(PUBLISHED.read_text())
    pairs = [(row["target"], row["drafter"]) for row in held["drafters"]]
    assert len(set(pairs)) == len(pairs) > 50
    for row in held["drafters"]:
        assert row["source"] in held["sources"]
        assert row["kind"] in KINDS
        assert row["target"].count("/") == row["drafter"].count("/") == 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"method": "eagle3"}, "takes what it finds"), ({"weights": "model.bin"}, "takes drafters as they are")],
)
def test_options_about_one_drafter_are_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        DrafterOptions("auto", **options).check()


def test_verbs_look_for_a_drafter_and_say_what_they_took(tmp_path: Path) -> None:
    model = heads(tmp_path, inside=True, companion=False)
    words = ["generate", str(model), "--prompt", "ab", "--max-new-tokens", "4", "--dtype", "float32"]
    done = CliRunner().invoke(app, [*words, "--draft-model", "auto"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "drafter: MTP heads" in done.stderr
    plain = CliRunner().invoke(app, words, catch_exceptions=False)
    assert "comes with a drafter" in plain.stderr
    assert "--method mtp" in plain.stderr
    assert plain.stdout == done.stdout
    report = json.loads(CliRunner().invoke(app, ["inspect", str(model), "--json"], catch_exceptions=False).stdout)
    assert report["mtp_modules"] == ["blk.4.nextn.* (llama.cpp's layout)"]


def test_inspect_examines_a_companion(tmp_path: Path) -> None:
    model = heads(tmp_path, inside=False, companion=True)
    other = save_target(tmp_path / "other", num_hidden_layers=3)
    companion = model.with_name("mtp-tiny-Q8_0.gguf")
    for target, code, fits in ((model, 0, True), (other, 1, False)):
        words = ["inspect", str(companion), "--model", str(target), "--json"]
        done = CliRunner().invoke(app, words, catch_exceptions=False)
        report = json.loads(done.stdout)
        assert (done.exit_code, report["kind"], report["usable"]) == (code, "mtp", fits)
    assert "doesn't fit the target: layers of 4, but the target's is 3" in report["problems"]
    shown = CliRunner().invoke(app, ["inspect", str(model), "--json"], catch_exceptions=False).stdout
    assert json.loads(shown)["mtp_modules"] == [f"{companion} (next to the file)"]


def test_inspect_prints_the_known_drafters(tmp_path: Path) -> None:
    shutil.copytree(save_target(tmp_path / "model"), tmp_path / "gpt-oss-20b")
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "gpt-oss-20b")], catch_exceptions=False).stdout
    assert "z-lab/gpt-oss-20b-DFlash (dflash;" in shown
