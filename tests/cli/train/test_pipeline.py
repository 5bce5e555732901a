"""`eyas pipeline`: commands that the command line takes, in order and once; a signal stops it in one line."""

from __future__ import annotations

import json
import os
import re
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

from ...pairs import Pair, write_rows
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
VERDICT = {
    "verdict": "Fastest: ngram, 1.77 times as fast.",
    "serve": ["--method", "ngram", "--tree", "chain:10"],
    "splits": {"train": {"chats": 100, "length": {"total": 20_000}}},
}


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
HERE = '''
import sys
import eyas.cli.train.pipeline as pipeline
from eyas.cli.app import app
real = pipeline.subprocess.Popen

def popen(words, *others, **more):
    """Only a step is the script: libraries start processes, too."""
    step = words[:3] == [sys.executable, "-m", "eyas"]
    return real([sys.executable, "step.py"] if step else words, *others, **more)

pipeline.subprocess.Popen = popen
app(["pipeline", "model", "chats.jsonl", "-o", "out"], prog_name="eyas")
'''


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
        words = command[3:]
        names = []
        while hasattr(leaf, "commands"):
            leaf = leaf.commands[words[0]]
            words = [*words[1:]]
            leaf = getattr(leaf, "command", leaf)  # verbs are imported when they are run
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


def test_steps_run_in_order_and_once_and_the_end_is_what_to_serve(
    run: Run, commands: CommandLine, chats: Path, pair: Pair
) -> None:
    commands.fails = "train"
    line = ("pipeline", pair.model, chats, "stdlib,weight=1", "--output", commands.folder, "--samples", 400)
    failed = run(*line, "--set", "drafter.loop.accumulate=3")
    assert failed.exit_code == 3
    assert "error: step 4, eyas train, ended with exit code 3: see above for what to correct." in failed.stderr
    assert "resumes" not in failed.stderr, "the same command would fail again"
    every = list(RESULTS)
    assert commands.verbs == every[:4]
    assert "step 4 of 7; about " in failed.stderr
    commands.fails = None
    done = run(*line, "--set", "drafter.loop.accumulate=4")
    assert done.exit_code == 0, done.stderr
    assert commands.verbs == [*every[:4], *every[3:]]
    assert f"already done: {commands.folder / RESULTS['data capture']}" in done.stderr
    assert commands.words["train"][-1] == "drafter.loop.accumulate=4"
    assert "--tree" not in commands.words["bench methods"], "every method is measured with auto, too"
    assert commands.words["train"][1] == f"drafter.target={pair.model}"
    assert "Fastest: ngram, 1.77 times as fast." in done.stdout
    assert done.stderr.splitlines()[-1] == f"next: eyas serve {pair.model} --method ngram --tree chain:10"
    run(*line, "--set", "drafter.loop.accumulate=4")
    assert len(commands.verbs) == 4 + 4
    other = run(*line[:-1], 300, "--set", "drafter.loop.accumulate=4")
    assert (other.exit_code, len(commands.verbs)) == (2, 8), "what is asked for is never ignored"
    assert f"{commands.folder / 'chats' / 'report.json'} was made by another command" in other.stderr


def test_chats_can_be_made_up_and_evaluations_left_out(
    run: Run, commands: CommandLine, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RESULTS, "data synthesize", "made_up.jsonl")
    evaluation = write_rows(tmp_path / "evaluation.jsonl", [{"prompt": "48/2?"}])
    told = ("--synthesize", 20, "--exclude", evaluation, "--samples", 100)
    done = run("pipeline", pair.model, "stdlib", "-o", commands.folder, *told)
    assert done.exit_code == 0, done.stderr
    assert commands.verbs[:2] == ["data synthesize", "data prepare"]
    assert commands.words["data synthesize"][2:4] == ["--chats", "20"]
    prepared = commands.words["data prepare"]
    assert prepared[:2] == ["stdlib", str(commands.folder / "made_up.jsonl")]
    assert prepared[prepared.index("--exclude") + 1] == str(evaluation)


def test_a_cluster_gets_what_it_can_share(run: Run, commands: CommandLine, chats: Path, pair: Pair) -> None:
    told = ["--on", "ray:head:1", "--workers", "2"]
    done = run("pipeline", pair.model, chats, "-o", commands.folder, *told)
    assert done.exit_code == 0, done.stderr
    shares = ("data regenerate", "data capture", "bench checkpoints")
    found = {verb: words[words.index("--on") :][:4] for verb, words in commands.words.items() if "--on" in words}
    assert found == dict.fromkeys(shares, told)
    alone = run("pipeline", pair.model, chats, "-o", commands.folder, "--workers", "2")
    assert (alone.exit_code, "--workers has no effect without --on" in alone.stderr) == (2, True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--set", "drafter.loop.steps=30"), "give either steps or epochs"),
        (("--set", "drafter.lop.epochs=3"), "there is no such key"),
        (("--set", "drafter.max_length=100000"), "beyond the target's context"),
        (("--set", "drafter.shape.taps=[1,2,99]"), "99"),
        (("--set", "drafter.shape.hidden_size=48", "--set", "drafter.shape.head=shared"), "doesn't fit"),
        (("--set", "drafter.warm_start=./gone"), "there is no ./gone"),
        (("--set", "drafter.validation.tree=bush"), "bush"),
        (("--set", "drafter.source=online"), "the online source"),
        (("--set", "drafter.output=elsewhere"), "eyas pipeline sets that itself"),
        (("--recipe", "magic"), "no recipe of that name"),
        (("--draft-model", "./gone"), "there is no ./gone"),
        (("more.jsonl",), "there is no file or folder more.jsonl"),
        (("stdlib", "stdlib"), "two sources are named stdlib"),
        (("--on", "moon"), "moon"),
    ],
)
def test_every_setting_is_checked_before_anything_runs(
    run: Run, commands: CommandLine, chats: Path, pair: Pair, options: tuple[str, ...], words: str
) -> None:
    """Also those that only the last step would stumble over, hours later."""
    refused = run("pipeline", pair.model, chats, *options, "-o", commands.folder)
    assert refused.exit_code in (1, 2)
    assert words in refused.stderr
    assert commands.verbs == []
    assert not commands.folder.exists()


def test_a_dry_run_shows_the_steps_and_about_how_long_they_take(
    run: Run, commands: CommandLine, chats: Path, pair: Pair
) -> None:
    done = run("pipeline", pair.model, chats, "-o", commands.folder, "--samples", 100, "--dry-run")
    assert done.exit_code == 0, done.stderr
    for verb in RESULTS:
        assert f"eyas {verb} " in done.stdout
    assert re.search(r"about .* in all, a rough estimate for this machine", done.stderr)
    assert commands.verbs == []
    assert not commands.folder.exists()


def test_a_budget_sizes_chats_and_measuring(run: Run, commands: CommandLine, chats: Path, pair: Pair) -> None:
    line = ("pipeline", pair.model, chats, "-o", commands.folder, "--minutes", 20)
    done = run(*line)
    assert done.exit_code == 0, done.stderr
    prepared = commands.words["data prepare"]
    samples = prepared[prepared.index("--samples") + 1]
    assert f"{int(samples):,} chats, for --minutes 20" in done.stderr
    for verb in ("bench checkpoints", "bench methods"):
        words = commands.words[verb]
        assert 1.0 <= float(words[words.index("--minutes") + 1]) <= 20.0
    again = run(*line)
    assert again.exit_code == 0, "the number of chats is kept"


def test_chats_that_training_would_refuse_stop_it_at_once(
    run: Run, commands: CommandLine, chats: Path, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(VERDICT, "splits", {"train": {"chats": 1}, "validation": {"chats": 0}})
    refused = run("pipeline", pair.model, chats, "-o", commands.folder)
    assert refused.exit_code == 1
    assert "has no chats for validation" in refused.stderr
    assert commands.verbs == ["data prepare"]


def test_the_store_has_what_the_recipe_reads(run: Run, commands: CommandLine, chats: Path, pair: Pair) -> None:
    line = ("pipeline", pair.model, chats, "-o", commands.folder, "--samples", 100, "--dry-run")

    def shown(*options: str) -> str:
        return " ".join(run(*line, *options).stdout.split())

    assert "--final" not in shown()
    assert "--final all" in shown("--recipe", "eagle1", "--set", "drafter.max_length=auto")
    assert "--taps 1,2,3" in shown("--set", "drafter.shape.taps=[1,2,3]")


@pytest.mark.every(2)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_it_with_a_line_and_how_to_go_on(number: signal.Signals, tmp_path: Path, pair: Pair) -> None:
    """A step that takes its time to save what it has: `eyas` of its process is a script that does so."""
    (tmp_path / "step.py").write_text(STEP)
    (tmp_path / "model").symlink_to(pair.model)
    (tmp_path / "chats.jsonl").touch()
    (tmp_path / "eyas_here.py").write_text(HERE)
    process = subprocess.Popen(
        [sys.executable, "eyas_here.py"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line == "begun\n":
            break
    time.sleep(0.2)
    process.send_signal(number)
    said, errors = process.communicate(timeout=120)
    assert process.returncode == 128 + number
    assert "saved" in said
    assert errors.endswith(
        "left\nstopped: what was done is kept in out.\n"
        "Resume with the same command: eyas pipeline model chats.jsonl -o out\n"
    )
