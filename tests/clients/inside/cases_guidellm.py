"""guidellm: benchmarks over chat completions, completions and responses: all requests succeed, tokens add up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from common import MODEL, TOKENIZER, URL


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_a_benchmark(route: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    program = str(Path(sys.executable).with_name("guidellm"))
    options = {
        "--backend": {"kind": "openai_http", "target": URL, "model": MODEL, "request_format": route},
        "--tokenizer": {"kind": "huggingface_auto", "model": TOKENIZER},
        "--profile": {"kind": "synchronous"},
        "--constraint": {"kind": "max_requests", "count": 3},
        "--data": {"kind": "synthetic_text", "prompt_tokens": 32, "output_tokens": 12},
        "--output": {"kind": "json", "path": str(report)},
    }
    arguments = [part for name, value in options.items() for part in (name, json.dumps(value))]
    command = [program, "run", "--disable-console", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert not requests["errored"], requests["errored"][0]
    assert len(requests["successful"]) == 3
    assert [each["output_tokens"] for each in requests["successful"]] == [12] * 3
