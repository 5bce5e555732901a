"""vLLM for CPU as a consumer of exported drafters: in its own process, and behind its OpenAI API."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.engines.compare import Answer
from benchmarks.engines.counts import Counts
from eyas.bench.serving.servers import ServerProcess, eyas_server
from eyas.errors import EndpointError
from eyas.interop.serving.commands import vllm_speculation

START_SECONDS = 600.0
SERVER = "vllm.entrypoints.openai.api_server"
NAME = "demo"


def environment(python: Path, threads: int) -> dict[str, str]:
    """Environment variables that let vLLM run on a CPU, offline, without taking all cores and memory."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "LD_PRELOAD": str(python.parent.parent / "lib" / "libiomp5.so"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SLEEP_WHEN_IDLE": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": "",
    }


@dataclass(frozen=True)
class Job:
    """A run of an engine."""

    model: Path
    drafter: Path
    chain: int
    """Number of draft tokens; 0 is plain decoding."""
    tokens: int
    prompts: Sequence[tuple[int, ...]]
    method: str = "eagle3"
    """The engines' name for the drafter's method."""
    dtype: str = "float32"


def offline(python: Path, job: Job) -> tuple[str, list[Answer]]:
    """vLLM's `LLM` class: its version and the answers. EndpointError, with its errors, if it fails."""
    request = {
        "model": str(job.model),
        "dtype": job.dtype,
        "speculation": vllm_speculation(job.method, str(job.drafter), job.chain) if job.chain else None,
        "tokens": job.tokens,
        "prompts": [list(prompt) for prompt in job.prompts],
    }
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "answers.json"
        script = Path(__file__).parent / "inside" / "vllm_offline.py"  # alone: its folder is on vLLM's import path
        done = subprocess.run(
            [str(python), str(script), str(output)],
            input=json.dumps(request),
            env=os.environ | environment(python, 1),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode or not output.is_file():
            text = done.stdout + done.stderr
            reasons = dict.fromkeys(re.findall(r"\w+Error: .+", text))  # of all its processes
            raise EndpointError(f"vLLM failed: {'; '.join(reasons) or text[-2000:]}")
        found = json.loads(output.read_text(encoding="utf-8"))
    return found["version"], _answers(found["answers"], job.chain)


def _answers(rows: Sequence[Mapping[str, Any]], chain: int) -> list[Answer]:
    """Answers, with their counts as differences of cumulative counters."""
    answers = []
    before = Counts.none(chain)
    for row in rows:
        counted = _counts(row["counters"], chain)
        answers.append(Answer(tuple(row["tokens"]), counted - before))
        before = counted
    return answers


def _counts(counters: Mapping[str, Any], chain: int) -> Counts:
    if not counters:
        return Counts.none(chain)
    return Counts(
        int(counters["spec_decode_num_drafts"]),
        int(counters["spec_decode_num_draft_tokens"]),
        tuple(int(count) for count in counters["spec_decode_num_accepted_tokens_per_pos"]),
    )


def server(python: Path, job: Job) -> ServerProcess:
    """`eyas serve --engine vllm`, which becomes vLLM's server."""
    words = ["env", *(f"{name}={value}" for name, value in environment(python, 1).items()), str(python), "-m", SERVER]
    arguments = [
        *("--engine", "vllm", "--engine-command", shlex.join(words), "--model", str(job.model)),
        *("--draft-model", str(job.drafter), "--num-speculative-tokens", str(job.chain), "--dtype", "float32"),
        *("--max-model-len", "1024", "--max-running", "1", "--prefix-tokens", "0", "--served-model-name", NAME),
        "--engine-option=--enforce-eager",
    ]
    return eyas_server("vllm", arguments, ready_seconds=START_SECONDS)


def server_of_folder(python: Path, job: Job) -> ServerProcess:
    """vLLM's server with a speculators folder alone, which names the target and K."""

    def command(port: int) -> list[str]:
        return [
            *(str(python), "-m", SERVER, "--model", str(job.drafter), "--served-model-name", NAME),
            *("--dtype", "float32", "--max-model-len", "1024", "--max-num-seqs", "1", "--enforce-eager"),
            *("--no-enable-prefix-caching", "--host", "127.0.0.1", "--port", str(port)),
        ]

    return ServerProcess("vllm", command, environment=environment(python, 1), ready_seconds=START_SECONDS)


def over_http(running: ServerProcess, job: Job) -> tuple[str, list[Answer]]:
    """Version and answers of `/v1/completions`, counts from `/metrics`."""
    with httpx.Client(base_url=running.root, timeout=3000, trust_env=False) as client:
        version = str(client.get("/version").raise_for_status().json()["version"])
        answers = []
        before = Counts.none(job.chain)
        written = 0
        for prompt in job.prompts:
            body = {"model": NAME, "prompt": list(prompt), "max_tokens": job.tokens, "temperature": 0}
            reply = client.post("/v1/completions", json=body | {"return_token_ids": True})
            tokens = tuple(reply.raise_for_status().json()["choices"][0]["token_ids"])
            written += len(tokens)
            counted = Counts.of_page(_settled(client, written), job.chain)
            answers.append(Answer(tokens, counted - before))
            before = counted
    return version, answers


def _settled(client: httpx.Client, written: int) -> str:
    """The metrics page, once it has counted every token written: it may lag behind an answer."""
    for _ in range(200):
        page = client.get("/metrics").raise_for_status().text
        found = re.search(r"^vllm:generation_tokens_total(?:{[^}]*})? (\S+)$", page, re.M)
        if found is not None and float(found[1]) >= written:
            return page
        time.sleep(0.05)
    raise EndpointError(f"vLLM's /metrics never counted {written} tokens")
