"""qwen-code: a question to the agent without its user interface, with tools shown; the answer whole and streamed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from common import KEY, MODEL, QUESTION, URL


@pytest.mark.parametrize("form", ["json", "stream-json"])
def test_question(form: str, tmp_path: Path) -> None:
    binaries = [os.path.join(sys.prefix, "bin"), os.path.join(sys.prefix, "node_modules", ".bin")]
    path = os.pathsep.join([*binaries, os.environ["PATH"]])
    # without it, qwen-code asks for answers of 32,000 tokens, which must fit the context beside the prompt
    environment = {**os.environ, "PATH": path, "QWEN_CODE_MAX_OUTPUT_TOKENS": "256"}
    command = [
        "qwen", "--bare", "--system-prompt", "Be brief.", "--core-tools", "read_file", "--auth-type", "openai",
        "--openai-base-url", f"{URL}/v1", "--openai-api-key", KEY, "-m", MODEL, "-o", form, "--max-session-turns", "2",
    ]  # fmt: skip
    if form == "stream-json":
        command.append("--include-partial-messages")
    done = subprocess.run(
        [*command, QUESTION], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    events = json.loads(done.stdout) if form == "json" else [json.loads(line) for line in done.stdout.splitlines()]
    assert events[0]["tools"]
    result = events[-1]
    assert (result["type"], result["is_error"]) == ("result", False)
    assert result["result"].strip()
    assert 0 < result["usage"]["output_tokens"] == result["usage"]["total_tokens"] - result["usage"]["input_tokens"]
    pieces = [event for event in events if event["type"] == "stream_event"]
    assert bool(pieces) == (form == "stream-json")
