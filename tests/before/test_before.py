"""What an earlier version wrote is still read: stores, runs, drafters, answered chats, sweeps, measured costs.

README.md says which version, and how the files were made. Seconds aside, everything must come out as it did then.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from eyas.cli.app import app
from eyas.data.store import FeatureStore

FILES = Path(__file__).parent / "files"
EXPECTED = json.loads((FILES / "expected.json").read_text())
TREE = "dynamic:4,8,40"
ANSWERING = (
    "data", "regenerate", "--model", "target", "--chats", "chats", "--dtype", "float32", "--max-new-tokens", "12",
    "--temperature", "0.7", "--seed", "3",
)  # fmt: skip
CAPTURING = (
    "data", "capture", "--model", "target", "--dtype", "float32", "--chats", "answered", "--taps", "1,2,4", "--final",
    "all", "--shard-mib", "0.02", "--max-length", "96",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _in_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The paths in the files are relative to their folder."""
    monkeypatch.chdir(shutil.copytree(FILES, tmp_path / "files"))


def eyas(*arguments: Any) -> str:
    """Run a verb; its standard output."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def contents(folder: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def chats(folder: str) -> dict[str, list[dict[str, Any]]]:
    """A chat folder's rows, but for the mark of answers that were cut, which is younger than the files."""
    return {
        path.name: [
            {name: value for name, value in json.loads(line).items() if name != "cut_off"}
            for line in path.read_text().splitlines()
        ]
        for path in (Path(folder, "train.jsonl"), Path(folder, "validation.jsonl"))
    }


def records(folder: str) -> list[dict[str, float]]:
    """A run's metrics but for the time they took."""
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in ("seconds", "per_second")} for line in lines]


def assert_alike(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    """The same figures in the same order."""
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


def decoded(*arguments: str) -> list[dict[str, Any]]:
    """Of every prompt the tokens, and how many rounds accepted so many drafted ones."""
    asked = ("--prompt-file", "prompts.jsonl", "--max-new-tokens", "24", "--batch-size", "3", "--raw", "--json")
    lines = eyas("generate", "--model", "target", "--dtype", "float32", *asked, *arguments).splitlines()
    return [
        {"tokens": row["token_ids"], "accepted": row["stats"]["accepted_histogram"]} for row in map(json.loads, lines)
    ]


def test_the_files_are_small() -> None:
    assert sum(path.stat().st_size for path in FILES.rglob("*")) < 1.5e6


def test_a_store_is_recognized_and_left_as_it_is() -> None:
    before = contents("store")
    eyas(*CAPTURING, "--output", "store")
    assert contents("store") == before


def test_a_store_is_trained_from() -> None:
    opened = FeatureStore.open(Path("store"))
    chats = [json.loads(line) for line in Path("answered/train.jsonl").read_text().splitlines()]
    assert [list(row.tokens) for row in opened.rows("train")] == [chat["tokens"] for chat in chats]
    shutil.rmtree("run")
    eyas("train", "stored.yaml")
    assert_alike(records("run"), EXPECTED["runs"]["stored"])


def test_a_run_goes_on_where_it_stopped() -> None:
    done = records("run")
    assert [row["step"] for row in done if "loss" in row] == [1, 2, 3, 4, 5, 6]
    eyas("train", "run/config.yaml", "drafter.loop.steps=12")
    assert records("run")[: len(done)] == done  # nothing was done again
    assert_alike(records("run"), EXPECTED["runs"]["continued"])
    assert sorted(path.name for path in Path("run/checkpoints").iterdir()) == [
        f"step-{step:06d}" for step in (3, 6, 9, 12)
    ]


@pytest.mark.every(3)
@pytest.mark.parametrize("kind", ["plain", "eagle1", "eagle3", "eagle3.1", "mla", "mlp"])
def test_every_kind_of_drafter_drafts_what_it_drafted(kind: str) -> None:
    drafter = ("--draft-model", f"drafters/{kind}", "--tree", TREE, "--draft-quantize", "off")
    found = decoded(*(("--method", "none") if kind == "plain" else drafter))
    assert found == EXPECTED["decoded"][kind]
    assert [row["tokens"] for row in found] == [row["tokens"] for row in EXPECTED["decoded"]["plain"]]
    assert kind == "plain" or sum(sum(row["accepted"][1:]) for row in found) > 10


def test_answered_chats_are_answered() -> None:
    before = chats("answered")
    journal = Path("answered/journal.jsonl").read_bytes()
    eyas(*ANSWERING, "--output", "answered")
    assert chats("answered") == before
    assert Path("answered/journal.jsonl").read_bytes() == journal  # nothing was asked again


def test_interrupted_answering_goes_on() -> None:
    journal = Path("interrupted/journal.jsonl").read_bytes()
    assert not journal.endswith(b"\n")  # half of an entry
    whole = journal[: journal.rindex(b"\n") + 1]
    eyas(*ANSWERING, "--output", "interrupted")
    assert Path("interrupted/journal.jsonl").read_bytes().startswith(whole)
    assert chats("interrupted") == chats("answered")


def test_a_sweep_knows_its_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    from eyas.config import load_config
    from eyas.labs.sweep.search import SweepConfig
    from eyas.labs.sweep.sweep import Sweep

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a trial is trained again")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    said: list[str] = []
    sweep = Sweep(load_config(SweepConfig, Path("sweep.yaml"), ()), said.append)
    sweep.train()
    assert {o.trial.name: round(o.accept_length, 4) for o in sweep.ranked} == EXPECTED["trials"]
    assert {path.name for path in Path("sweep/trials").iterdir()} == EXPECTED["trials"].keys()


def test_measured_costs_are_used() -> None:
    """Those of another machine are refused; the refusal names this one, and then they do."""
    asks = ("generate", "--model", "target", "--draft-model", "drafters/eagle3", "--dtype", "float32", "--tree", "auto",
            "--costs", "costs.json", "--prompt", "What is 1+1?", "--json")  # fmt: skip
    refused = CliRunner().invoke(app, asks)
    assert refused.exit_code != 0
    said = " ".join(refused.stderr.split())
    assert "were measured on 'a machine of before', but this is '" in said
    table = json.loads(Path("costs.json").read_text())
    here = said.split("this is '")[1].split("'")[0]
    Path("costs.json").write_text(json.dumps({**table, "measured_on": here}))
    before = Path("costs.json").read_bytes()
    plain = json.loads(eyas("generate", "--model", "target", "--method", "none", "--dtype", "float32", *asks[-3:]))
    assert json.loads(eyas(*asks))["token_ids"] == plain["token_ids"]
    assert Path("costs.json").read_bytes() == before


def test_recipes_mean_what_they_meant() -> None:
    """A run's config.yaml is its recipe with everything filled in."""
    filled = yaml.safe_load(Path("run/config.yaml").read_text())["drafter"]
    assert filled["loop"]["steps"] == 6
    eyas("train", "run.yaml")  # nothing is left to do
    now = yaml.safe_load(Path("run/config.yaml").read_text())["drafter"]
    for section, values in filled.items():
        if isinstance(values, dict):  # settings that are younger than the run are None: what there was before them
            assert {
                name: value for name, value in now[section].items() if name in values or value is not None
            } == values
        else:
            assert now[section] == values
