"""llama.cpp as a consumer of exported drafters: its server, with the target and the drafter as GGUF."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx

from engines.compare import Answer
from engines.counts import Counts
from engines.metrics import read_counts
from engines.vllm import Job
from eyas.bench.serve_process import ServerProcess
from eyas.errors import EndpointError

TO_GGUF = Path(__file__).parents[1] / "to_gguf.py"


def converted(sources: Path, model: Path, output: Path, *options: str) -> Path:
    """A Hugging Face folder as float32 GGUF, by llama.cpp's own converter. EndpointError if it fails."""
    command = [sys.executable, str(TO_GGUF), str(sources), str(model), *options]
    done = subprocess.run(
        [*command, "--outtype", "f32", "--outfile", str(output)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise EndpointError(f"llama.cpp's converter failed on {model.name}: {done.stderr[-2000:]}")
    return output


def exact(slots: int) -> list[str]:
    """Options under which outputs are those of a plain float32 model and drafts don't depend on the number of slots."""
    return [
        *("-np", str(slots), "-fa", "off", "-ctk", "f32", "-ctv", "f32", "--no-webui", "--host", "127.0.0.1"),
    ]


def drafting(drafter: Path, chain: int) -> list[str]:
    """Chains of `chain` tokens, float32 caches; sampling drafts on the backend goes wrong with two slots or more."""
    return [
        *("-md", str(drafter), "--spec-type", "draft-eagle3", "--spec-draft-n-max", str(chain)),
        *("-ctkd", "f32", "-ctvd", "f32", "--no-spec-draft-backend-sampling"),
    ]


def server(binary: Path, job: Job) -> ServerProcess:
    """One slot. No draft is cut short for being improbable: defaults, but older versions had others."""

    def command(port: int) -> list[str]:
        return [
            *(str(binary), "-m", str(job.model), "-c", "1024", "-t", "1", "--metrics", *exact(1)),
            *("--port", str(port), *drafting(job.drafter, job.chain)),
            *("--spec-draft-n-min", "0", "--spec-draft-p-min", "0"),
        ]

    return ServerProcess("llama.cpp", command)


def over_http(running: ServerProcess, job: Job) -> list[Answer]:
    """Answers of `/completion`; by position from `/metrics`, which must agree with the `timings` of each answer."""
    answers, before = [], Counts.none(job.chain)
    with httpx.Client(base_url=running.root, timeout=300, trust_env=False) as client:
        for prompt in job.prompts:
            body = {"prompt": list(prompt), "n_predict": job.tokens, "temperature": 0, "cache_prompt": False}
            reply = client.post("/completion", json=body | {"return_tokens": True}).raise_for_status().json()
            counted = read_counts(client.get("/metrics").raise_for_status().text, job.chain)
            answer = Answer(tuple(reply["tokens"]), counted - before)
            told = [reply["timings"].get(name, 0) for name in ("draft_n", "draft_n_accepted")]
            if told != [answer.counts.drafted, sum(answer.counts.accepted)]:
                raise EndpointError(f"llama.cpp's timings say {told}, its metrics {answer.counts}")
            answers.append(answer)
            before = counted
    return answers


def version_of(sources: Path | None) -> str:
    """llama.cpp names no releases in an sdist: the package whose sources they are."""
    package = "llama-cpp-python"
    for folder in () if sources is None else sources.resolve().parents:
        name, _, version = folder.name.replace("_", "-").rpartition("-")
        if name == package:
            return f"in {package} {version}"
    return "unknown"
