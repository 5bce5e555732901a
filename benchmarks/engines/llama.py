"""llama.cpp as a consumer of exported drafters: its server and example program, with target and drafter as GGUF."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from benchmarks.engines.compare import Answer
from benchmarks.engines.counts import Counts
from benchmarks.engines.vllm import Job
from eyas.bench.serving.servers import ServerProcess, eyas_server
from eyas.errors import EndpointError

TO_GGUF = Path(__file__).parents[1] / "to_gguf.py"


class Llama(NamedTuple):
    """A built llama.cpp."""

    server: Path
    sources: Path
    """The sources, with the converter."""

    @property
    def example(self) -> Path:
        """The example program that speculates without a server."""
        return self.server.with_name("llama-speculative-simple")


def converted(sources: Path, model: Path, output: Path, *options: str) -> Path:
    """Convert a Hugging Face folder to float32 GGUF with llama.cpp's converter. EndpointError if it fails."""
    command = [sys.executable, str(TO_GGUF), str(sources), str(model), *options]
    done = subprocess.run(
        [*command, "--outtype", "f32", "--outfile", str(output)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise EndpointError(f"llama.cpp's converter failed on {model.name}: {done.stderr[-2000:]}")
    return output


def exact(slots: int) -> list[str]:
    """Options that give the outputs of a plain float32 model."""
    return ["-np", str(slots), "-fa", "off", "-ctk", "f32", "-ctv", "f32", "--no-webui", "--host", "127.0.0.1"]


def drafting(drafter: Path, chain: int, method: str = "eagle3") -> list[str]:
    """Options for chains of `chain` tokens and float32 caches; backend sampling of drafts fails with several slots."""
    return [
        *("-md", str(drafter), "--spec-type", f"draft-{method}", "--spec-draft-n-max", str(chain)),
        *("-ctkd", "f32", "-ctvd", "f32", "--no-spec-draft-backend-sampling"),
    ]


def server(binary: Path, job: Job) -> ServerProcess:
    """`eyas serve --engine llama.cpp`, which becomes the server: one slot, no flash attention, float32 caches."""
    options = "-c 1024 -t 1 -ctk f32 -ctv f32 -ctkd f32 -ctvd f32 --no-webui".split()
    drafts = ["--draft-model", str(job.drafter), "--num-speculative-tokens", str(job.chain)] if job.chain else []
    arguments = [
        *("--engine", "llama.cpp", "--engine-command", str(binary), "--model", str(job.model), *drafts),
        *("--max-running", "1", "--attention", "eager", "--prefix-tokens", "0"),
        *(f"--engine-option={option}" for option in options),
    ]
    return eyas_server("llama.cpp", arguments)


def in_process(program: Path, job: Job, tokenizer: Any) -> list[Answer]:
    """Answers of llama.cpp's `speculative-simple`, a process per prompt. EndpointError if one fails.

    It takes text, so the prompt is decoded; the program must tokenize it to the same number of tokens.
    """
    command = [str(program), "-m", str(job.model), *drafting(job.drafter, job.chain, job.method), "-fa", "off"]
    command += "-ctk f32 -ctv f32 -c 1024 -t 1 --temp 0 --no-escape -lv 5".split()
    answers = []
    for prompt in job.prompts:
        log = _whole_log([*command, "-n", str(job.tokens), "-p", tokenizer.decode(list(prompt))])
        if _LAST.findall(log) != [str(len(prompt))]:
            raise EndpointError(f"{program.name} tokenizes the prompt differently: {tokenizer.decode(list(prompt))!r}")
        tokens, counts = read_log(log, job.chain, tokenizer.eos_token_id)
        answers.append(Answer(tuple(tokens[: job.tokens]), counts))
    return answers


_TRIES = 10
_LAST = re.compile(r"\bencoded +(\d+) tokens in +[\d.]+ seconds, speed:")
"""The line that follows all rounds."""


def _whole_log(command: Sequence[str]) -> str:
    """A program's output; run again if llama.cpp's logging thread lost the end of it (`common_log_main`)."""
    for _ in range(_TRIES):
        done = subprocess.run(command, capture_output=True, check=False)
        log = (done.stdout + done.stderr).decode("utf-8", "replace")
        if done.returncode:
            raise EndpointError(f"{command[0]} ended with {done.returncode}: {log[-1000:]}")
        if _LAST.search(log):
            return log
    raise EndpointError(f"{command[0]} lost the end of its log {_TRIES} times: {log[-1000:]}")


_EVENT = re.compile(
    r"draft candidate +0, pos +\d+: +(?P<draft>\d+) \("
    r"|accepted (?P<accepted>\d+)/(?P<offered>\d+) draft tokens, the last target token is: \((?P<last>\d+)\)"
)


def read_log(log: str, chain: int, end: int) -> tuple[list[int], Counts]:
    """The tokens in a log, up to and including the EOS token `end` if there is one, and counts."""
    tokens = list[int]()
    draft = list[int]()
    counts = Counts.none(chain)
    for event in _EVENT.finditer(log):
        if event["draft"] is not None:
            draft.append(int(event["draft"]))
            continue
        accepted = int(event["accepted"])
        offered = int(event["offered"])
        tokens += [*draft[:accepted], int(event["last"])]
        counts += Counts(int(offered > 0), offered, tuple(int(i < accepted) for i in range(chain)))
        draft = []
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens, counts


def over_http(running: ServerProcess, job: Job) -> list[Answer]:
    """Answers of `/completion`; counts by position are from `/metrics` and must agree with each answer's `timings`."""
    answers = []
    before = Counts.none(job.chain)
    with httpx.Client(base_url=running.root, timeout=3000, trust_env=False) as client:
        for prompt in job.prompts:
            body = {"prompt": list(prompt), "n_predict": job.tokens, "temperature": 0}
            reply = client.post("/completion", json=body | {"return_tokens": True}).raise_for_status().json()
            counted = Counts.of_page(client.get("/metrics").raise_for_status().text, job.chain)
            answer = Answer(tuple(reply["tokens"]), counted - before)
            drafted = [reply["timings"].get(name, 0) for name in ("draft_n", "draft_n_accepted")]
            if drafted != [answer.counts.drafted, sum(answer.counts.accepted)]:
                raise EndpointError(f"llama.cpp's timings say {drafted}, its metrics {answer.counts}")
            answers.append(answer)
            before = counted
    return answers


def version_of(built: Llama) -> str:
    """The commit that the server was built from, or its package; for an sdist, found in the path of its sources."""
    said = subprocess.run([str(built.server), "--version"], capture_output=True, text=True, check=False)
    commit = re.search(r"commit ([0-9a-f]{7,})", said.stdout + said.stderr)
    if commit is not None:
        return f"at {commit[1]}"
    named = re.search(r"version: ([a-z]\S+ [\d.]+)$", said.stdout, re.M)
    if named is not None:
        return f"in {named[1]}"
    package = "llama-cpp-python"
    for folder in built.sources.resolve().parents:
        name, _, version = folder.name.replace("_", "-").rpartition("-")
        if name == package:
            return f"in {package} {version}"
    return "unknown"
