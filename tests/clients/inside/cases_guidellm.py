"""guidellm: a benchmark over chat completions, whose requests all succeed and whose tokens add up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from common import MODEL, TOKENIZER, URL


def test_a_benchmark(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    program = str(Path(sys.executable).with_name("guidellm"))
    command = [program, "benchmark", "run", "--target", URL, "--model", MODEL, "--processor", TOKENIZER]
    load = ["--profile", "concurrent", "--rate", "2", "--max-requests", "6"]
    data = ["--data", json.dumps({"prompt_tokens": 32, "output_tokens": 12})]
    done = subprocess.run([*command, *load, *data, "--output-path", str(report)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert not requests["errored"]
    assert len(requests["successful"]) == 6
    assert all(each["output_tokens"] == 12 for each in requests["successful"])
