"""Other engines against ours on the same weights, with the same prompts as token ids.

    python -m benchmarks.serving.peers PAIR --prompts EVAL [--vllm VENV/bin/python]
        [--llama LLAMA_SERVER [TARGET.gguf [DRAFTER.gguf]]] [--vllm-k 1 2 3] [--llama-k 2 3]
        [--sections plain best chain first] [--quantize int8 | --same-file] [--output FILE.json]

PAIR is a folder with `target` and `drafter` in it, as `heavy_pair.py` writes it, or `smollm2`, whose GGUF file
llama.cpp reads itself; vLLM reads only folders.

For 4-bit and 8-bit weights (with `--dtype auto`), `--same-file` makes eyas read TARGET.gguf too (made by
llama-quantize: Q4_0, Q4_K_M, Q8_0), and `--quantize` quantizes PAIR's weights. PAIR's target may also be an AWQ or GPTQ
folder, which vLLM reads too. llama.cpp then runs with flash attention and float16 caches.

  plain   plain decoding of every engine, one client
  best    each peer with chains of every K in its list, at 1, 4 and 16 clients, once: which K is its best?
  chain   ours (auto) against each peer with its best K, at 1, 4 and 16 clients
  first   1, 4 and 16 clients each ask once, at the same moment: time to first token (TTFT)

How to install the peers: `benchmarks/serving/peers.md`. Only one engine is under load at a time; the CPU time that
idle engines use meanwhile is reported.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Literal, NamedTuple

from benchmarks.engines.llama import drafting, exact
from benchmarks.engines.vllm import environment
from benchmarks.harness import Output, script
from benchmarks.serving.compare import Findings, compare
from eyas.assets import SMOLLM2
from eyas.bench.serving.client import read_items
from eyas.bench.serving.report import ServeReport
from eyas.bench.serving.run import ServePlan
from eyas.bench.serving.servers import ServerProcess, eyas_server
from eyas.errors import UsageError
from eyas.hub import find_target
from eyas.targets import load_tokenizer
from eyas.types import SamplingParams

Section = Literal["plain", "best", "chain", "first"]


class Pair(NamedTuple):
    """A target and its drafter, as given to `eyas serve`."""

    target: str
    drafter: str

    @classmethod
    def at(cls, name: str) -> Pair:
        """The pair in a folder, or the one called `smollm2`."""
        if name == SMOLLM2:
            return cls(name, name)
        folder = Path(name).resolve()
        return cls(str(folder / "target"), str(folder / "drafter"))


def vllm_server(python: Path, pair: Pair, chain: int, dtype: str, eager: bool) -> ServerProcess:
    """vLLM for CPU in its own environment; `chain` draft tokens, 0 is plain decoding."""
    drafter = {"method": "eagle3", "model": pair.drafter, "num_speculative_tokens": chain}

    def command(port: int) -> list[str]:
        return [
            *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", pair.target),
            *("--dtype", dtype, "--max-model-len", "2048", "--max-num-seqs", "64", "--no-enable-prefix-caching"),
            *("--port", str(port), "--host", "127.0.0.1", "--no-enable-log-requests"),
            *(["--enforce-eager"] if eager else []),
            *(["--speculative-config", json.dumps(drafter)] if chain else []),
        ]

    return ServerProcess(f"vllm {chain}", command, environment=environment(python, 2), ready_seconds=600)  # it compiles


def llama_server(
    binary: Path, target: Path, drafter: Path | None = None, *, chain: int, fast: bool = False
) -> ServerProcess:
    """llama.cpp's server with 16 slots; `chain` draft tokens, 0 is plain decoding. UsageError if they lack a drafter.

    `fast`: with flash attention and float16 caches.
    """
    own = ["-np", "16", "-fa", "on", "--no-webui", "--host", "127.0.0.1"] if fast else exact(16)
    if chain and drafter is None:
        raise UsageError("--llama: chains need a GGUF drafter; make one with eyas export DRAFTER --to gguf")

    def command(port: int) -> list[str]:
        return [
            *(str(binary), "-m", str(target), "-t", "2", "-c", "16384", "--port", str(port), *own),
            *(drafting(drafter, chain) if drafter and chain else []),
        ]

    return ServerProcess(f"llama.cpp {chain}", command)


def best(reports: Mapping[int, ServeReport]) -> int:
    """The K with the most tokens per second, weighting each number of clients equally."""
    speeds = {chain: [median(line.tokens_per_second) for line in report.lines] for chain, report in reports.items()}
    most = [max(each) for each in zip(*speeds.values(), strict=True)]
    return max(speeds, key=lambda chain: fmean(speed / top for speed, top in zip(speeds[chain], most, strict=True)))


@script
def main(
    pair: Annotated[Pair, "a folder, or smollm2", Pair.at],
    *,
    prompts: Annotated[Path, "a folder with .jsonl prompt files"],
    vllm: Annotated[Path | None, "the Python of vLLM's environment"] = None,
    vllm_eager: Annotated[bool, "run vLLM without compiling"] = False,
    llama: Annotated[Sequence[Path], "llama-server, then target and drafter as GGUF"] = (),
    vllm_k: Sequence[int] = (1, 2, 3),
    llama_k: Sequence[int] = (2, 3),
    sections: Sequence[Section] = ("plain", "best", "chain", "first"),
    clients: Annotated[Sequence[int], "concurrent clients, except in plain"] = (1, 4, 16),
    repeats: int = 3,
    tokens: int = 64,
    dtype: str = "bfloat16",
    quantize: Annotated[Literal["int8", "int4"] | None, "eyas's weights, quantized from PAIR's"] = None,
    same_file: Annotated[bool, "eyas also reads llama.cpp's target"] = False,
    output: Output = None,
) -> None:
    items = read_items(sorted(prompts.glob("*.jsonl")), None, 0, load_tokenizer(pair.target))
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    if same_file and len(llama) < 2:
        raise UsageError("--same-file needs a target: --llama LLAMA_SERVER TARGET.gguf")
    model = str(llama[1]) if same_file else pair.target
    common = [
        "--model",
        model,
        "--dtype",
        dtype,
        "--prefix-tokens",
        "0",
        *(["--quantize", quantize] if quantize else []),
    ]
    measured = partial(compare, items=items, params=params)
    peers: dict[str, Callable[..., ServerProcess]] = {}
    own_file = find_target(pair.target).gguf
    if vllm is not None:
        if own_file is not None:
            raise UsageError("--vllm: vLLM reads only folders; dequantize the target into one")
        peers["vllm"] = partial(vllm_server, vllm, pair, dtype=dtype, eager=vllm_eager)
    if llama:
        files = [*llama, own_file] if own_file and len(llama) == 1 else llama
        peers["llama.cpp"] = partial(llama_server, *files, fast=dtype == "auto" or quantize is not None)
    tried = {"vllm": vllm_k, "llama.cpp": llama_k}
    chosen = {name: tried[name][-1] for name in peers}
    findings = Findings(output)

    if "plain" in sections:
        servers = {"eyas": eyas_server("eyas", [*common, "--method", "none"])}
        servers |= {name: made(chain=0) for name, made in peers.items()}
        findings.add("plain", measured(servers, (1,), plan=ServePlan(repeats, requests=6)))
    if "best" in sections:
        for name, made in peers.items():
            found = {}
            for chain in tried[name]:
                found[chain] = measured({name: made(chain=chain)}, clients, plan=ServePlan(1, requests=6, per_client=1))
                findings.add(f"{name}, chains of {chain}", found[chain])
            chosen[name] = best(found)
    if "first" in sections:
        servers = {"eyas": eyas_server("eyas", [*common, "--method", "none"])}
        servers["eyas auto"] = eyas_server("eyas auto", [*common, "--draft-model", pair.drafter, "--tree", "auto"])
        servers |= {name: made(chain=0) for name, made in peers.items()}
        findings.add("first tokens", measured(servers, clients, plan=ServePlan(repeats, requests=1, per_client=1)))
    if "chain" in sections:
        servers = {name: made(chain=chosen[name]) for name, made in peers.items()}
        for name, server in servers.items():
            auto = eyas_server("eyas", [*common, "--draft-model", pair.drafter, "--tree", "auto"])
            both = {f"{name} chain:{chosen[name]}": server, "eyas auto": auto}
            findings.add(f"{name} against ours", measured(both, clients, plan=ServePlan(repeats, requests=6)))


if __name__ == "__main__":
    raise SystemExit(main())
