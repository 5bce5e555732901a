"""The pipeline's commands are ones that the command line takes; what is done is not done again."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import typer

from eyas.cli.app import app
from eyas.text.chats import exchange, write_chats

RECIPE = Path(__file__).parents[2] / "recipes" / "pipeline.py"


@pytest.fixture
def pipeline() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pipeline", RECIPE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class CommandLine:
    """Parses every command as `eyas` would, and leaves behind what it would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.verbs: list[str] = []
        self.fails: str | None = None
        self.shared: dict[str, list[str]] = {}
        """Verb -> what it was told about a cluster."""

    def __call__(self, command: list[str], check: bool) -> Any:
        assert command[:3] == [sys.executable, "-m", "eyas"]
        assert not check
        leaf: Any = typer.main.get_command(app)
        words, names = command[3:], []
        while hasattr(leaf, "commands"):
            leaf, words = leaf.commands[words[0]], [*words[1:]]
            names.append(leaf.name)
        leaf.make_context(leaf.name, list(words))  # an option it doesn't have, or a file that isn't there, ends here
        verb = " ".join(names)
        self.verbs.append(verb)
        if "--on" in words:
            self.shared[verb] = words[words.index("--on") :][:4]
        if verb == self.fails:
            return SimpleNamespace(returncode=1)
        self.leave(verb)
        return SimpleNamespace(returncode=0)

    def leave(self, verb: str) -> None:
        """The result that the pipeline looks for."""
        place = {"data prepare": "prepared", "data regenerate": "answered"}.get(verb)
        if place is not None:
            (self.folder / place).mkdir()
            for split in ("train", "validation"):
                ids = ("stdlib:stdlib-code-a", "stdlib:stdlib-ask-b", "mine:1")
                write_chats(self.folder / place / f"{split}.jsonl", [exchange(name, "Why?", "So.") for name in ids])
        made = {
            "data prepare": "prepared/report.json",
            "data regenerate": "answered/report.json",
            "data capture": "store/manifest.json",
            "train": "run/drafter/config.json",
            "bench checkpoints": "run/pick/config.json",
            "bench trees": "run/bench/trees.json",
            "bench report": "report.html",
        }[verb]
        (self.folder / made).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / made).write_text("{}")


STAGES = [
    "data prepare", "data regenerate", "data capture", "train", "bench checkpoints", "bench trees", "bench report",
]  # fmt: skip


def test_stages_run_in_order_and_once(pipeline: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = CommandLine(tmp_path)
    monkeypatch.setattr(subprocess, "run", commands)
    monkeypatch.setattr(sys, "argv", ["pipeline.py", "--folder", str(tmp_path)])
    commands.fails = "train"
    with pytest.raises(SystemExit, match="eyas train ended with exit code 1; run the same command again"):
        pipeline.main()
    assert commands.verbs == STAGES[:4]
    commands.fails = None
    pipeline.main()
    assert commands.verbs == [*STAGES[:4], *STAGES[3:]]
    pipeline.main()
    assert commands.verbs[-1] == "bench report"
    assert len(commands.verbs) == 4 + 4 + 1
    for name, chat in (("code", "stdlib:stdlib-code-a"), ("prose", "stdlib:stdlib-ask-b"), ("mine", "mine:1")):
        (row,) = map(json.loads, (tmp_path / "prompts" / f"{name}.jsonl").read_text().splitlines())
        assert row["id"] == chat
        assert len(row["token_ids"]) > 2


def test_a_cluster_gets_what_it_can_share(
    pipeline: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = CommandLine(tmp_path)
    monkeypatch.setattr(subprocess, "run", commands)
    monkeypatch.setattr(sys, "argv", ["pipeline.py", "--folder", str(tmp_path), "--on", "ray:head:1", "--workers", "2"])
    pipeline.main()
    assert commands.verbs == STAGES
    told = ["--on", "ray:head:1", "--workers", "2"]
    shares = ("data regenerate", "data capture", "bench checkpoints", "bench trees")
    assert {verb: words[:4] for verb, words in commands.shared.items()} == dict.fromkeys(shares, told)
    monkeypatch.setattr(sys, "argv", ["pipeline.py", "--folder", str(tmp_path), "--workers", "2"])
    with pytest.raises(SystemExit):
        pipeline.main()
    assert "--workers says nothing without --on" in capsys.readouterr().err
