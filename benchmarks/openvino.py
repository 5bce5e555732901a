"""eyas and OpenVINO GenAI on one pair: greedy answers of one sequence, all sides loaded, prompts going round.

    python -m benchmarks.openvino PAIR --prompts EVAL --python OV/bin/python --target OV_TARGET --drafter OV_DRAFTER

PAIR is a folder of `heavy_pair.py`. OpenVINO has an environment of its own (`pip install openvino-genai optimum-intel`)
and reads what optimum-intel makes of the pair:

    optimum-cli export openvino --model PAIR/target --task text-generation-with-past --weight-format fp16 OV_TARGET
    optimum-cli export openvino --model PAIR/drafter --task text-generation-with-past --trust-remote-code OV_DRAFTER

The drafter's export imports a module that names `diffusers` and `einops`; neither is needed for it. Its taps must be
those that OpenVINO takes: 2, half of the layers, and the last but two.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import eyas
from eyas.bench.machine import describe_machine
from eyas.bench.serving.load import read_items
from eyas.files import write_json
from eyas.text.chats import Message
from eyas.text.template import encode_chat

WORKER = Path(__file__).parent / "engines" / "inside" / "openvino_worker.py"


class Timed(NamedTuple):
    """An answer's tokens, its seconds, and how many of them went by before its first token."""

    tokens: list[int]
    seconds: float
    first: float

    @property
    def decoding(self) -> float:
        """Tokens per second after the first."""
        return (len(self.tokens) - 1) / (self.seconds - self.first)

    @property
    def whole(self) -> float:
        """Tokens per second, reading of the prompt included."""
        return len(self.tokens) / self.seconds


Side = Callable[[Sequence[int], int], Timed]


def openvino(python: Path, target: Path, drafter: Path, chain: int) -> Side:
    """OpenVINO with chains of `chain` draft tokens; 0 = plain."""
    worker = subprocess.Popen(
        [str(python), str(WORKER), str(target), str(drafter), str(chain)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert worker.stdin is not None
    assert worker.stdout is not None
    written, read = worker.stdin, worker.stdout

    def line() -> Any:
        while True:
            text = read.readline()
            if not text:
                raise SystemExit(f"OpenVINO with chains of {chain} has ended: run {WORKER.name} by hand to see why")
            if text[0] in '"{':
                return json.loads(text)

    assert line() == "ready"

    def ask(prompt: Sequence[int], tokens: int) -> Timed:
        written.write(json.dumps({"prompt": list(prompt), "tokens": tokens}) + "\n")
        written.flush()
        answer = line()  # with counts, too, where it drafts
        return Timed(answer["tokens"], answer["seconds"], answer["first"])

    return ask


def ours(engine: eyas.Engine) -> Side:
    """An eyas engine."""

    def ask(prompt: Sequence[int], tokens: int) -> Timed:
        began, first, found = time.perf_counter(), 0.0, []
        for chunk in engine.stream(
            [eyas.Request(tuple(prompt), eyas.SamplingParams(max_tokens=tokens, ignore_eos=True))]
        ):
            if chunk.token_ids and not found:
                first = time.perf_counter() - began
            found += chunk.token_ids
        return Timed(found, time.perf_counter() - began, first)

    return ask


def compare(mine: Sequence[Timed], theirs: Sequence[Timed], how: str) -> dict[str, float]:
    """Median, least and most of the paired ratios of two sides' tokens per second."""
    ratios = [getattr(a, how) / getattr(b, how) for a, b in zip(mine, theirs, strict=True)]
    return {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pair", type=Path)
    parser.add_argument("--prompts", type=Path, required=True, help="a folder with .jsonl prompt files")
    parser.add_argument("--python", type=Path, required=True, help="the Python of OpenVINO's environment")
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, required=True)
    parser.add_argument("--chains", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--limit", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()

    auto = eyas.load(options.pair / "target", options.pair / "drafter", tree="auto", dtype=options.dtype)
    sides = {"eyas auto": ours(auto), "eyas plain": ours(eyas.Engine(auto.target, auto.tokenizer))}
    for chain in (0, *options.chains):
        name = f"openvino chain:{chain}" if chain else "openvino plain"
        sides[name] = openvino(options.python, options.target, options.drafter, chain)

    items = read_items(sorted(options.prompts.glob("*.jsonl")), None, seed=0)[: options.limit + 1]
    prompts = [
        encode_chat(auto.tokenizer, [Message(**message) for message in item.prompt["messages"]]) for item in items
    ]
    found: dict[str, list[Timed]] = {name: [] for name in sides}
    for number, prompt in enumerate(prompts):
        for name, side in sides.items():
            answer = side(prompt, options.tokens)
            if number:  # the first warms up
                found[name].append(answer)
    plain = found["eyas plain"]
    report: dict[str, Any] = {"machine": describe_machine(), "pair": options.pair.name, "dtype": options.dtype}
    report["sides"] = {
        name: {
            "decoding tokens/s": statistics.median(one.decoding for one in answers),
            "whole tokens/s": statistics.median(one.whole for one in answers),
            "equal to eyas plain": sum(a.tokens == b.tokens for a, b in zip(answers, plain, strict=True)),
            "answers": len(answers),
        }
        for name, answers in found.items()
    }
    report["ratios"] = {
        f"{mine} / {theirs}": {how: compare(found[mine], found[theirs], how) for how in ("decoding", "whole")}
        for mine, theirs in [("eyas auto", "eyas plain")]
        + [(mine, name) for mine in ("eyas plain", "eyas auto") for name in sides if name.startswith("openvino")]
    }
    print(json.dumps(report, indent=2))
    if options.output is not None:
        write_json(options.output, report)


if __name__ == "__main__":
    main()
