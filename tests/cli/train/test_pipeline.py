"""`eyas pipeline`: commands that the command line takes, in order and once; a signal stops it in one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import typer

from eyas.cli.app import app
from eyas.cli.train import pipeline

from ..conftest import Run

RESULTS = {
    "data prepare": "chats/report.json",
    "data regenerate": "answers/report.json",
    "data capture": "store/manifest.json",
    "train": "run/drafter/config.json",
    "bench checkpoints": "run/pick/config.json",
    "bench methods": "run/bench/methods.json",
    "bench report": "report.html",
}
"""Verb -> what it writes last."""
VERDICT = {"verdict": "Fastest: ngram, 1.77 times as fast.", "serve": ["--method", "ngram"]}


STEP = """
import signal, sys, time
def stop(*_):
    time.sleep(0.5)
    print("saved", flush=True)
    sys.exit(130)
signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
print("begun", flush=True)
time.sleep(60)
"""
HERE = """
import sys
import eyas.cli.train.pipeline as pipeline
from eyas.cli.app import app
real = pipeline.subprocess.Popen
pipeline.subprocess.Popen = lambda words, **more: real([sys.executable, "step.py"], **more)
app(["pipeline", "m", "chats.jsonl", "-o", "out"], prog_name="eyas")
"""


class CommandLine:
    """Parses every command as `eyas` would, and leaves behind what it would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.verbs: list[str] = []
        self.fails: str | None = None
        self.words: dict[str, list[str]] = {}

    def __call__(self, command: list[str], start_new_session: bool) -> Any:
        assert command[:3] == [sys.executable, "-m", "eyas"]
        assert start_new_session
        leaf: Any = typer.main.get_command(app)
        words, names = command[3:], []
        while hasattr(leaf, "commands"):
            leaf, words = leaf.commands[words[0]], [*words[1:]]
            names.append(leaf.name)
        leaf.make_context(leaf.name, list(words))  # an option it doesn't have, or a file that isn't there, ends here
        verb = " ".join(names)
        self.verbs.append(verb)
        self.words[verb] = words
        self.code = 3 if verb == self.fails else 0
        if not self.code:
            self.leave(verb)
        return self

    def wait(self) -> int:
        return self.code

    def leave(self, verb: str) -> None:
        made = self.folder / RESULTS[verb]
        made.parent.mkdir(parents=True, exist_ok=True)
        made.write_text(json.dumps(VERDICT))
        if verb == "train":
            (self.folder / "run" / "prompts.jsonl").write_text("{}")


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CommandLine:
    found = CommandLine(tmp_path / "all")
    monkeypatch.setattr(pipeline.subprocess, "Popen", found)
    return found


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    (tmp_path / "chats.jsonl").touch()
    return tmp_path / "chats.jsonl"


def test_steps_run_in_order_and_once_and_the_end_is_what_to_serve(run: Run, commands: CommandLine, chats: Path) -> None:
    commands.fails = "train"
    line = ("pipeline", "org/model", chats, "stdlib,weight=1", "--output", commands.folder, "--set", "a.b=3")
    failed = run(*line, "--samples", 400)
    assert failed.exit_code == 3
    assert "error: that ended with exit code 3; the same command resumes from here" in failed.stderr
    every = list(RESULTS)
    assert commands.verbs == every[:4]
    commands.fails = None
    done = run(*line)
    assert done.exit_code == 0, done.stderr
    assert commands.verbs == [*every[:4], *every[3:]]
    assert f"already done: {commands.folder / RESULTS['data capture']}" in done.stderr
    assert commands.words["train"][-1] == "a.b=3"
    methods = commands.words["bench methods"]
    assert methods[methods.index("--tree") + 1] == "auto", "what is measured is what is served"
    assert commands.words["train"][1] == "drafter.target=org/model"
    assert "Fastest: ngram, 1.77 times as fast." in done.stdout
    assert done.stderr.splitlines()[-1] == "next: eyas serve org/model --method ngram"
    run(*line)
    assert len(commands.verbs) == 4 + 4


def test_chats_can_be_made_up_and_evaluations_left_out(
    run: Run, commands: CommandLine, chats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RESULTS, "data synthesize", "made_up.jsonl")
    told = ("--synthesize", 20, "--exclude", chats)
    done = run("pipeline", "m", "stdlib", "-o", commands.folder, *told)
    assert done.exit_code == 0, done.stderr
    assert commands.verbs[:2] == ["data synthesize", "data prepare"]
    assert commands.words["data synthesize"][2:4] == ["--chats", "20"]
    prepared = commands.words["data prepare"]
    assert prepared[:2] == ["stdlib", str(commands.folder / "made_up.jsonl")]
    assert prepared[prepared.index("--exclude") + 1] == str(chats)


def test_a_cluster_gets_what_it_can_share(run: Run, commands: CommandLine, chats: Path) -> None:
    told = ["--on", "ray:head:1", "--workers", "2"]
    assert run("pipeline", "m", chats, "-o", commands.folder, *told).exit_code == 0
    shares = ("data regenerate", "data capture", "bench checkpoints")
    found = {verb: words[words.index("--on") :][:4] for verb, words in commands.words.items() if "--on" in words}
    assert found == dict.fromkeys(shares, told)
    alone = run("pipeline", "m", chats, "-o", commands.folder, "--workers", "2")
    assert (alone.exit_code, "--workers has no effect without --on" in alone.stderr) == (2, True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_it_with_a_line_and_how_to_go_on(number: signal.Signals, tmp_path: Path) -> None:
    """A step that takes its time to save what it has: `eyas` of its process is a script that does so."""
    (tmp_path / "step.py").write_text(STEP)
    (tmp_path / "eyas_here.py").write_text(HERE)
    process = subprocess.Popen(
        [sys.executable, "eyas_here.py"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if line == "begun\n":
            break
    time.sleep(0.2)
    process.send_signal(number)
    said, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + number
    assert "saved" in said
    assert errors == (
        "stopped: what was done is kept in out.\nGo on with the same command: eyas pipeline m chats.jsonl -o out\n"
    )
