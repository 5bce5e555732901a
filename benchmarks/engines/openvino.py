"""OpenVINO GenAI as a consumer of exported drafters: in its own process, on the pair as optimum-intel exports it."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engines.compare import Answer
from benchmarks.engines.counts import Counts
from benchmarks.engines.vllm import Job
from eyas.errors import EndpointError

WORKER = Path(__file__).parent / "inside" / "openvino_worker.py"
UNUSED = "diffusers"
"""A package that optimum-intel's drafter module names but a drafter doesn't need; an empty one stands in for it."""


def converted(python: Path, model: Path, output: Path) -> Path:
    """Export a target or a drafter with `optimum-cli export openvino`, in float32. EndpointError if it fails."""
    with tempfile.TemporaryDirectory() as stand_ins:
        (Path(stand_ins) / UNUSED).mkdir()
        (Path(stand_ins) / UNUSED / "__init__.py").touch()
        words = ["--task", "text-generation-with-past", "--trust-remote-code", "--weight-format", "fp32"]
        command = [str(python.parent / "optimum-cli"), "export", "openvino", "--model", str(model), *words, str(output)]
        environment = os.environ | {"PYTHONPATH": stand_ins, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode or not (output / "openvino_model.xml").is_file():
        raise EndpointError(f"optimum-cli failed: {(done.stderr or done.stdout)[-2000:]}")
    return output


def version_of(python: Path) -> str:
    """The version of OpenVINO GenAI in an environment."""
    asked = "from importlib.metadata import version; print(version('openvino-genai'))"
    return subprocess.run([str(python), "-c", asked], capture_output=True, text=True, check=True).stdout.strip()


def in_process(python: Path, job: Job) -> list[Answer]:
    """The answers of `LLMPipeline`, one prompt after another, in float32."""
    lines = [json.dumps({"prompt": list(p), "tokens": job.tokens, "ignore_eos": False}) + "\n" for p in job.prompts]
    precise = ("INFERENCE_PRECISION_HINT=f32", "KV_CACHE_PRECISION=f32")
    command = [str(python), str(WORKER), str(job.model), str(job.drafter), str(job.chain), *precise]
    done = subprocess.run(command, input="".join(lines), capture_output=True, text=True, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(rows) != len(job.prompts):
        raise EndpointError(f"OpenVINO GenAI failed: {done.stderr[-2000:]}")
    return [Answer(tuple(row["tokens"]), counts_of(row, job.chain)) for row in rows]


def counts_of(row: Mapping[str, Any], chain: int) -> Counts:
    """The counts of an answer: every pass after prefill verifies a draft and emits a bonus token."""
    emitted: Sequence[int] = row["emitted"][1:]
    accepted = tuple(sum(tokens > position + 1 for tokens in emitted) for position in range(chain))
    return Counts(len(emitted), row["drafted"], accepted)
