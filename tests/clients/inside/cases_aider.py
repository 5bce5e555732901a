"""aider: an edit of a file, over OpenAI's and Ollama's API. The demo target is too small to write one.

So what is proved is that the request is answered to its end and that aider takes it for the model's answer.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from common import KEY, MODEL, URL

ROUTES = {
    "openai": {"OPENAI_API_BASE": f"{URL}/v1", "OPENAI_API_KEY": KEY},
    "ollama_chat": {"OLLAMA_API_BASE": URL},
}


@pytest.mark.parametrize("streamed", ["--stream", "--no-stream"])
@pytest.mark.parametrize("route", ROUTES)
def test_edit(route: str, streamed: str, tmp_path: Path) -> None:
    (tmp_path / "add.py").write_text("def add(a, b):\n    return a - b\n", encoding="utf-8")
    (tmp_path / "settings.yml").write_text(
        f"- {{name: {route}/{MODEL}, edit_format: whole, use_temperature: 0}}\n", encoding="utf-8"
    )
    command = [
        os.path.join(sys.prefix, "bin", "aider"), "--model", f"{route}/{MODEL}",
        "--model-settings-file", "settings.yml", "--yes-always", "--no-git",
        "--no-pretty", "--no-show-model-warnings", "--no-show-release-notes",
        "--no-check-update", "--analytics-disable", streamed, "--message", "Let add return the sum.", "add.py",
    ]  # fmt: skip
    environment = {**os.environ, **ROUTES[route]}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = (tmp_path / ".aider.chat.history.md").read_text(encoding="utf-8")
    assert re.search(r"^#### Let add return the sum\..*\n\n[^>\s]", said, re.MULTILINE), said  # the answer follows
    assert re.search(r"Tokens: \S+ sent, [1-9]\d* received", said), said
