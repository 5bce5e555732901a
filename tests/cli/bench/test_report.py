"""`eyas bench report`: what is there gets in, what isn't is left out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from eyas.bench.report.page import render
from eyas.bench.report.sections import headline
from eyas.files import write_json

from ...bench.offline.candidates import candidate
from ...bench.report.test_page import checked
from ...pairs import Pair, write_rows
from ...runs import save_run

Run = Callable[..., Result]


@pytest.fixture
def trained(pair: Pair, tmp_path: Path) -> Path:
    folder = save_run(tmp_path / "run", pair.model, steps=(10, 20))
    shutil.copytree(folder / "checkpoints" / "step-000020", folder / "best")
    return folder


def page(run: Run, trained: Path, *options: object) -> str:
    output = trained.parent / "report.html"
    result = run("bench", "report", trained, "--output", output, *options)
    assert result.exit_code == 0, result.output
    return checked(output.read_text(encoding="utf-8")).text


def test_a_run_alone(run: Run, trained: Path) -> None:
    text = page(run, trained)
    for words in ("What was trained on what", "Training", "Machine and provenance", "Nothing was measured"):
        assert words in text
    for words in ("Checkpoints on real tasks", "Draft trees", "Data", "Store"):
        assert words not in text


def test_everything(run: Run, trained: Path, pair: Pair, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "48/2?"}, {"prompt": "def"}])
    few = ("--prompt-file", rows, "--max-new-tokens", 6, "--repeats", 1, "--warmup", 0)
    assert run("bench", "checkpoints", trained, *few, "--write").exit_code == 0
    pair_options = ("--model", pair.model, "--draft-model", trained / "pick")
    trees = (
        "--tree-depth",
        "2",
        "--tree-top-k",
        "2",
        "--tree-nodes",
        "3,4",
        "--output",
        trained / "bench" / "trees.json",
    )
    assert run("bench", "trees", *pair_options, *few, *trees).exit_code == 0
    chats = tmp_path / "chats"
    chats.mkdir()
    source = {"name": "mine", "rows": 5, "chats": 3, "share": 1.0, "dropped": {"too long": {"count": 2, "first": []}}}
    split = {"chats": 3, "length": {"total": 30, "quantiles": {"0.5": 10}}, "answer_share": 0.5}
    report = {"made_by": "me", "sources": [source], "splits": {"train": split, "validation": split}, "settings": {}}
    write_json(chats / "report.json", report)
    answered = tmp_path / "answered"
    answered.mkdir()
    write_json(answered / "report.json", {"made_by": "regenerate", "answers": 3, "settings": {"turns": "last"}})
    for folder in (chats, answered):
        for name in ("train", "validation"):
            (folder / f"{name}.jsonl").touch()

    text = page(run, trained, "--chats", chats, "--chats", answered)
    picked = json.loads((trained / "bench" / "checkpoints.json").read_text())
    grown = json.loads((trained / "bench" / "trees.json").read_text())
    for words in (
        "too long",
        "made by me",
        picked["reason"],
        grown["reason"],
        f"draft tree {grown['pick']} is",
        "Draft trees",
    ):
        assert words in text


def test_what_is_refused(run: Run, trained: Path, tmp_path: Path) -> None:
    result = run("bench", "report", trained, "--output", tmp_path / "no" / "report.html")
    assert (result.exit_code, "make it first" in result.stderr) == (2, True)
    shutil.rmtree(trained / "best")
    result = run("bench", "report", trained, "--output", tmp_path / "report.html")
    assert (result.exit_code, "holds no drafter yet" in result.stderr) == (1, True)
    assert not (tmp_path / "report.html").exists()


def measured(name: str, length: float, seconds: float) -> dict[str, Any]:
    return {"pick": name, "drafter": "run/pick", "ranked": [candidate(name, length, length, seconds=seconds).as_dict()]}


def lead(*reports: dict[str, Any] | None) -> str:
    return checked(render("A drafter", headline(*reports, "models/target", Path("run/pick")), [])).text


def test_a_checkpoint_slower_than_plain_is_not_called_one_to_serve() -> None:
    fast, slow = (lead(measured("step-1", 2.0, seconds), None) for seconds in (5.0, 11.0))
    assert "step-1 is the drafter to serve: 2.00 tokens a pass and 2.00 times" in fast
    assert "eyas serve models/target --draft-model run/pick\n" in fast + "\n"
    assert "step-1 is not one to serve yet: 2.00 tokens a pass and 0.91 times" in slow
    assert "--draft-model" not in slow


def test_the_headline_speaks_of_one_measurement() -> None:
    """A checkpoint that is slow with the default tree and fast with the best one is one to serve, and nothing else."""
    text = lead(measured("step-1", 2.0, 11.0), measured("chain:1", 1.8, 5.0))
    assert "step-1 with the draft tree chain:1 is the drafter to serve: 1.80 tokens a pass and 2.00 times" in text
    assert "not one to serve" not in text
    assert "0.91" not in text
    assert "eyas serve models/target --draft-model run/pick --tree chain:1" in text
    for tile in ("Speedup2.00x", "Accept length1.80", "Tokens/s20.0", "Lossless2 of 2"):
        assert tile in text.replace("\n", "")
    slow = lead(measured("step-1", 2.0, 5.0), measured("chain:1", 1.8, 11.0))
    assert "step-1 with the draft tree chain:1 is not one to serve yet" in slow
    assert "2.00 times" not in slow
