"""The programs and the notebook of examples/, run as they are with a tiny model."""

from __future__ import annotations

import json
import runpy
import signal
import sys
from pathlib import Path

import pytest

from .forks import Fork
from .pairs import save_drafter, save_target

EXAMPLES = Path(__file__).parent.parent / "examples"
PROGRAMS = sorted(path.name for path in EXAMPLES.glob("*.py"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("pair")
    return str(save_target(folder / "target")), str(save_drafter(folder / "drafter"))


class Server(Fork):
    """A fork in the place of a new Python, which takes seconds to start."""

    def __init__(self, command: list[str]) -> None:
        super().__init__(command[1:])

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def run(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def test_generate(pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(monkeypatch, "generate.py", "--model", pair[0], "--drafter", pair[1], "--tokens", "8")
    said = capsys.readouterr().out
    assert "the same tokens as without a drafter: True" in said
    assert "plain: 7 passes" in said


def test_serve_and_ask(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("subprocess.Popen", Server)
    run(monkeypatch, "serve_and_ask.py", "--model", pair[0], "--drafter", pair[1], "--tokens", "8")
    assert "tokens; speculation: {'target_passes':" in capsys.readouterr().out


def test_train_a_drafter(
    pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "def add{number}(a, b):"}}\n' for number in range(12)))
    words = ("--output", str(tmp_path / "run"), "--model", pair[0], "--prompts", str(prompts))
    run(monkeypatch, "train_a_drafter.py", *words, "--tokens", "12", "--steps", "2")
    assert "accept length" in capsys.readouterr().out


def test_the_notebook(pair: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    notebook = json.loads((EXAMPLES / "rounds.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    named = 'MODEL, DRAFTER = "smollm2", "smollm2"'
    assert sum(named in cell for cell in cells) == 1
    names: dict[str, object] = {}
    for number, cell in enumerate(cells):
        exec(compile(cell.replace(named, f"MODEL, DRAFTER = {pair}"), f"cell {number}", "exec"), names)
    said = capsys.readouterr().out
    assert "round 1: " in said
    assert "passes instead of 31" in said
    assert not any(cell.get("outputs") for cell in notebook["cells"]), "outputs are not kept: they are made anew"


def test_no_program_is_left_out() -> None:
    assert PROGRAMS == ["generate.py", "serve_and_ask.py", "train_a_drafter.py"]
