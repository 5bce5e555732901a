"""`eyas bench report`: what is there gets in, what isn't is left out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from eyas.bench.report.page import accept_length_section, headline, render
from eyas.files import write_json

from ...bench.offline.candidates import candidate
from ...bench.offline.test_method_report import comparison, results
from ...bench.report.test_page import checked
from ...bench.serving.test_report import FOUR, ONE
from ...bench.serving.test_report import report as served
from ...bench.serving.test_report import run as answered
from ...pairs import Pair, write_rows
from ...runs import save_run

Run = Callable[..., Result]
MACHINE = {"cores": 2, "threads": 2}


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
    assert (result.exit_code, "has no drafter yet" in result.stderr) == (1, True)
    assert not (tmp_path / "report.html").exists()


def measured(name: str, length: float, seconds: float) -> dict[str, Any]:
    found = candidate(name, length, length, seconds=seconds).as_dict()
    training = [{"name": name, "training": {"validation_accept_length": 2.34, "decoded_accept_length": 2.74}}]
    kept = {"settings": {"tree": None}, "checkpoints": training}
    return {"pick": name, "drafter": "pick", "ranked": [found], **kept}


def lead(*reports: dict[str, Any] | None, methods: dict[str, Any] | None = None) -> str:
    return checked(render("A drafter", headline(*reports, methods, "models/target", Path("run/pick")), [])).text


def test_a_checkpoint_slower_than_plain_is_not_called_one_to_serve() -> None:
    fast, slow = (lead(measured("step-1", 2.0, seconds), None) for seconds in (5.0, 11.0))
    assert "step-1 is the drafter to serve" in fast
    assert "Speedup2.00x ±0.00" in fast.replace("\n", "")
    assert "eyas serve models/target --draft-model run/pick\n" in fast + "\n"
    assert "step-1 is the best, but not certain to pay" in slow
    assert "0.91 times the speed of plain decoding (give or take 0.00, two standard errors), so serving with it" in slow
    assert "--draft-model" not in slow


def test_the_headline_speaks_of_one_measurement() -> None:
    """A checkpoint that is slow with the default tree and fast with the best one is one to serve, and nothing else."""
    text = lead(measured("step-1", 2.0, 11.0), measured("chain:1", 1.8, 6.25))
    assert "step-1 with the draft tree chain:1 is the drafter to serve" in text
    assert "not certain" not in text
    assert "0.91" not in text
    assert "eyas serve models/target --draft-model run/pick --tree chain:1" in text
    for tile in ("Speedup1.60x ±0.00", "Accept length1.80 ±0.00", "Tokens/s16.0 ±0.0", "Lossless2 of 2"):
        assert tile in text.replace("\n", "")
    slow = lead(measured("step-1", 2.0, 5.0), measured("chain:1", 1.8, 11.0))
    assert "step-1 with the draft tree chain:1 is the best, but not certain to pay" in slow
    assert "2.00" not in slow


def test_where_methods_were_compared_the_headline_is_their_verdict() -> None:
    """The drafter may be certain to be faster than plain decoding, and a method without training faster still."""
    compared = comparison().as_dict()
    assert compared["fastest"] == "lookup"
    text = lead(
        measured("step-1", 2.0, 5.0), measured("chain:1", 1.8, 5.0), methods=compared | {"serve": ["--method", "x"]}
    )
    assert compared["verdict"] in text
    assert "eyas serve models/target --method x" in text
    for tile in ("Speedup1.90x ±0.00", "Accept length2.00 ±0.00", "Tokens/s19.0 ±0.0", "Lossless16 of 16"):
        assert tile in text.replace("\n", "")
    assert "step-1" not in text


def test_every_accept_length_says_what_it_was_measured_on() -> None:
    """One drafter, one definition, and a row for each figure of the page."""
    section = accept_length_section(measured("step-1", 2.0, 5.0), measured("chain:1", 1.8, 5.0), comparison().as_dict())
    text = " ".join(checked(render("A drafter", [], [section])).text.split())
    assert "accept length: tokens per target pass, the bonus token counted" in text
    for row in (
        "step-1 in training, simulated: a chain along the true answers of validation chats2.34",
        "step-1 in training, decoded: answers to prompts of validation chats2.74",
        "step-1, among the checkpointsits own2.00 ±0.00",
        "pick, with the best draft treechain:11.80 ±0.00",
        "lookup, among the methodschain:12.00 ±0.00",
    ):
        assert row in text, row


def test_a_figure_that_cannot_be_true_is_not_served() -> None:
    text = lead(None, None, methods=comparison(found=results(seconds=1.0)).as_dict())
    assert "No method was faster here, so serve without one. lookup isn't ranked: impossible" in text
    assert text.strip().endswith("eyas serve models/target") or "eyas serve models/target\n" in text
    assert "--method" not in text


def test_methods_samples_and_load_have_their_sections(run: Run, trained: Path) -> None:
    sample = {"task": "math", "prompt": "48/2?", "answer": "It is 24."}
    write_json(trained / "bench" / "methods.json", replace(comparison(), samples=[sample], machine=MACHINE).as_dict())
    load = served(
        {
            level: {"plain": [answered(2, "a")], "auto": [answered(1, "a", passes=5.0, kept=6.0)]}
            for level in (ONE, FOUR)
        }
    )
    write_json(trained / "bench" / "serve.json", {**load.as_dict(), "machine": MACHINE})
    text = " ".join(page(run, trained).split())
    for words in (
        "Methods and acceptance by position",
        "lookupcode01.90x ±0.002.00 ±0.00100%",
        "what each method costs",
        "lookupchain:12.00.524%",
        "Sample answers",
        "math: 48/2?",
        "It is 24.",
        "Concurrency",
        "concurrent clients",
        "4auto10.02.00x1002.20",
        "4plain5.01.00x200",
    ):
        assert words in text, words


def test_accept_length_by_data_compares_runs(run: Run, trained: Path, tmp_path: Path) -> None:
    """Each checkpoint by what it was trained on; runs that weren't measured, or don't say, are left out."""

    def measured_run(path: Path, chats: int, lengths: list[float]) -> Path:
        names = [f"step-{step:06d}" for step in (10, 20)][: len(lengths)]
        for name, step in zip(names, (10, 20), strict=False):
            made = {"steps": step, "rows": chats, "batch_tokens": 512, "loop": {"accumulate": 2}}
            write_json(path / "checkpoints" / name / "config.json", {"eyas": made})
        ranked = [candidate(name, length, length).as_dict() for name, length in zip(names, lengths, strict=True)]
        rows = [{"name": name, "step": 10, "training": {"moment": 5.0}} for name in names]
        write_json(path / "bench" / "checkpoints.json", {
            "ranked": ranked[::-1], "pick": names[-1], "reason": "best", "checkpoints": rows,
            "machine": MACHINE, "settings": {"tree": None},
        })  # fmt: skip
        return path

    alone = page(run, trained)
    assert "Accept length by data" not in alone
    measured_run(trained, 60, [1.5, 1.8])
    more = measured_run(tmp_path / "more", 400, [2.2])
    (tmp_path / "unmeasured").mkdir()
    text = " ".join(page(run, trained, "--beside", more, "--beside", tmp_path / "unmeasured").split())
    assert "run601010,2401.500 run602020,4801.800 more4001010,2402.200" in text
    assert "unmeasured" not in text
