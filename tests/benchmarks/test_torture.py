"""The scripts that torture a server, with little to do."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def run(script: str, output: Path, *options: str) -> dict[str, Any]:
    """A script's report; it fails if what it checks doesn't hold."""
    command = [sys.executable, "-m", f"benchmarks.torture.{script}", *options, "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(output.read_text(encoding="utf-8"))
    return report


@pytest.mark.slow
def test_sixty_requests_as_in_the_soak(tmp_path: Path) -> None:
    """Memory can't settle in so few."""
    report = run("serve_soak", tmp_path / "r.json", "--requests", "60", "--distinct", "24", "--growth", "9")
    assert report["ends"]["finished"] >= 40
    assert report["preemptions"] > 0


@pytest.mark.slow
def test_a_killed_server_comes_back(tmp_path: Path) -> None:
    (kill,) = run("serve_kill", tmp_path / "r.json", "--kills", "1")["kills"]
    assert sum(kill["clients"].values()) == 8


@pytest.mark.slow
def test_hostile_clients(tmp_path: Path) -> None:
    """How long a well-behaved answer takes is for a quiet machine to say."""
    run("serve_hostile", tmp_path / "r.json", "--seconds", "1", "--patience", "60")
