"""eyas and OpenVINO GenAI on one pair: greedy answers to one prompt at a time, all sides loaded and taking turns.

    python -m benchmarks.openvino PAIR --prompts EVAL --python OV/bin/python --target OV_TARGET --drafter OV_DRAFTER

PAIR is a folder written by `heavy_pair.py`. OpenVINO needs an environment of its own (`pip install openvino-genai
optimum-intel`) and reads the pair as exported by optimum-intel:

    optimum-cli export openvino --model PAIR/target --task text-generation-with-past --weight-format fp16 OV_TARGET
    optimum-cli export openvino --model PAIR/drafter --task text-generation-with-past --trust-remote-code OV_DRAFTER

For eyas's `--quantize int8` or `int4`, export the target with the same weight format. The drafter's export imports a
module that mentions `diffusers` and `einops`, but needs neither. The drafter must have the taps that OpenVINO uses: 2,
half of the layers, and the number of layers minus 3.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, NamedTuple

import eyas
from benchmarks.harness import Output, interleave, paired, report, script
from eyas.bench.serving.client import read_items
from eyas.text.chats import Message
from eyas.text.template import encode_chat

WORKER = Path(__file__).parent / "engines" / "inside" / "openvino_worker.py"


class Timed(NamedTuple):
    """An answer's tokens, its seconds, and the seconds to its first token."""

    tokens: list[int]
    seconds: float
    first: float

    @property
    def decoding(self) -> float:
        """Tokens per second after the first."""
        return (len(self.tokens) - 1) / (self.seconds - self.first)

    @property
    def whole(self) -> float:
        """Tokens per second, prefill included."""
        return len(self.tokens) / self.seconds


Side = Callable[[Sequence[int], int], Timed]


def openvino(python: Path, target: Path, drafter: Path, chain: int) -> Side:
    """OpenVINO with chains of `chain` draft tokens; 0 is plain decoding."""
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
        answer = line()  # also has counts if it drafts
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


@script
def main(
    pair: Path,
    *,
    prompts: Annotated[Path, "a folder with .jsonl prompt files"],
    python: Annotated[Path, "the Python of OpenVINO's environment"],
    target: Path,
    drafter: Path,
    chains: Sequence[int] = (1, 2, 3),
    dtype: str = "bfloat16",
    quantize: Annotated[Literal["int8", "int4"] | None, "eyas's weights"] = None,
    limit: int = 12,
    tokens: int = 64,
    output: Output = None,
) -> None:
    auto = eyas.load(pair / "target", pair / "drafter", tree="auto", dtype=dtype, quantize=quantize)
    sides = {"eyas auto": ours(auto), "eyas plain": ours(eyas.Engine(auto.target, auto.tokenizer))}
    for chain in (0, *chains):
        sides[f"openvino chain:{chain}" if chain else "openvino plain"] = openvino(python, target, drafter, chain)
    items = read_items(sorted(prompts.glob("*.jsonl")), None, seed=0)[: limit + 1]
    texts = [encode_chat(auto.tokenizer, [Message(**each) for each in item.prompt["messages"]]) for item in items]

    def in_turns(side: Side) -> Callable[[], Timed]:
        own = iter(texts)  # the first prompt warms up
        return lambda: side(next(own), tokens)

    found = interleave({name: in_turns(side) for name, side in sides.items()}, len(texts) - 1)

    def ratios(mine: str, theirs: str) -> dict[str, Any]:
        return {
            how: paired(*([getattr(one, how) for one in found[side]] for side in (mine, theirs)))
            for how in ("decoding", "whole")
        }

    plain = found["eyas plain"]
    against = [("eyas auto", "eyas plain")]
    against += [(mine, name) for mine in ("eyas plain", "eyas auto") for name in sides if name.startswith("openvino")]
    shown = {
        name: {
            "decoding tokens/s": median(one.decoding for one in answers),
            "whole tokens/s": median(one.whole for one in answers),
            "equal to eyas plain": sum(a.tokens == b.tokens for a, b in zip(answers, plain, strict=True)),
            "answers": len(answers),
        }
        for name, answers in found.items()
    }
    named = {f"{mine} / {theirs}": ratios(mine, theirs) for mine, theirs in against}
    report({"pair": pair.name, "dtype": dtype, "quantize": quantize, "sides": shown, "ratios": named}, output)


if __name__ == "__main__":
    raise SystemExit(main())
