"""What the process that compiles grammars is told of the server: nothing that is secret."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from ..conftest import post, run
from ..fakes import FakeEngine

SECRETS = ("EYAS_API_KEY", "HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY")


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_the_process_that_compiles_grammars_inherits_no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SECRETS:
        monkeypatch.setenv(name, "sesame")
    started: list[tuple[bytes, bytes]] = []

    class Watched(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **given: Any) -> None:
            super().__init__(*arguments, **given)
            folder = Path(f"/proc/{self.pid}")
            while not (environment := (folder / "environ").read_bytes()):  # as long as the kernel sets it up
                time.sleep(0.001)
            started.append((environment, (folder / "cmdline").read_bytes()))

    monkeypatch.setattr(subprocess, "Popen", Watched)
    body = {"model": "tiny", "prompt": "a", "guided_choice": ["Natalia"]}
    answer = run(post(FakeEngine(), "/v1/completions", body, api_keys=()))
    assert answer.status_code == 200
    ((environment, command),) = started
    assert b"sesame" not in environment + command
    assert b"PATH=" in environment
