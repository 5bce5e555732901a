"""`eyas data prepare` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

from ...pairs import Pair, write_rows
from ..conftest import Run

ROWS = [
    {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"a{n}"}]} for n in range(30)
]


def test_tables_for_people_and_json_for_machines(run: Run, pair: Pair, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", [*ROWS, "{", {"instruction": "q1", "output": "x"}])
    done = run(
        "data", "prepare", f"{file},weight=2", "--model", pair.model, "--output", tmp_path / "out", "--samples", 20
    )
    assert done.exit_code == 0, done.stderr
    for words in ("what was read", "what was written", "answer", "a.jsonl:31", "same prompt as another chat"):
        assert words in done.stdout
    assert f"{tmp_path / 'out'} is complete" in done.stderr
    named = f"--model {pair.model} --chats {tmp_path / 'out'} --output {tmp_path / 'answers'}"
    assert done.stderr.splitlines()[-1] == f"next: eyas data regenerate {named}"
    again = run(
        "data", "prepare", f"{file},weight=2", "--model", pair.model, "-o", tmp_path / "out", "--samples", 20, "--json"
    )
    report = json.loads(again.stdout)
    assert report == json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["sources"][0]["chats"] == 20
    assert report["splits"]["train"]["answer_tokens"] > 0
    assert report["settings"]["near_duplicates"] == 0.8
    for choice, threshold in (("off", None), ("0.5", 0.5)):
        done = run("data", "prepare", file, "--near-duplicates", choice, "-o", tmp_path / choice, "--json")
        assert json.loads(done.stdout)["settings"]["near_duplicates"] == threshold


def test_bad_calls(run: Run, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", ROWS)
    for arguments, code, words in (
        ((f"{file},weight=none",), 2, "weight"),
        ((file, file), 2, "two sources are named a"),
        ((file, "--max-length", 9), 2, "give --model"),
        ((file, "--model", tmp_path / "gone"), 2, "there is no"),
        ((file, "--too-long", "burn"), 2, "'burn' is not one of 'drop', 'cut'"),
        ((file, "--near-duplicates", "some"), 2, "write auto, off, or a similarity"),
        ((file, "--near-duplicates", "2"), 2, "--near-duplicates 2: write auto, off, or a similarity from 0.1 to 1"),
        ((file, "--exclude", tmp_path / "gone.jsonl"), 1, "can't read"),
        ((tmp_path / "gone.jsonl",), 2, "no file or folder"),
    ):
        done = run("data", "prepare", *arguments, "--output", tmp_path / "out")
        assert done.exit_code == code, done.stderr
        assert words in done.stderr
        assert not (tmp_path / "out").exists()


def test_what_is_not_as_asked_is_said_first(run: Run, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl", ROWS)
    shown = run("data", "prepare", file, "-o", tmp_path / "out", "--samples", 100)
    assert shown.exit_code == 0, shown.output
    assert shown.stdout.splitlines()[0] == "note: only 30 of the 100 requested chats could be drawn"
