"""Servers by load: is speculation ever slower than plain decoding?

    python -m benchmarks.serving.sweep HEAVY --prompts EVAL [--sections auto off] [--output FILE.json]
    python -m benchmarks.serving.sweep HEAVY --prompts EVAL --sections methods --methods suffix medusa=FOLDER

HEAVY is a folder written by `heavy_pair.py`, EVAL a folder with prompt files. Sections:

  auto    plain against auto with 1 to 64 concurrent clients, 5 repeats: ratios, first-token times
  off     plain against a server with a drafter whose requests ask it not to speculate, and against a second plain one
  methods plain against automatic trees of each of `--methods`, for every number of clients

Answers have `--tokens` tokens; two numbers give random lengths between them. Clients then don't all restart at the same
moment, which would favor a server that gives all of them the same pace. Repeats share no prompts, and prefix reuse is
off.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from benchmarks.harness import Output, script
from benchmarks.serving.compare import Findings, compare
from eyas.bench.serving.client import read_items
from eyas.bench.serving.run import ServePlan
from eyas.bench.serving.servers import ServerProcess, eyas_server
from eyas.types import SamplingParams

Section = Literal["auto", "off", "methods"]
SMALL, LARGE = (1, 2, 4, 8), (16, 32, 64)


@script
def main(
    heavy: Path,
    *,
    prompts: Annotated[Path, "a folder with .jsonl prompt files"],
    sections: Sequence[Section] = ("auto", "off"),
    methods: Annotated[Sequence[str], "METHOD or METHOD=DRAFTER, for section methods"] = (),
    clients: Annotated[Sequence[int], "concurrent clients"] = (*SMALL, *LARGE),
    repeats: int = 5,
    tokens: Sequence[int] = (64, 192),
    per_client: Annotated[float, "requests per client and repeat"] = 3.0,
    dtype: str = "bfloat16",
    output: Output = None,
) -> None:
    if ("methods" in sections) != bool(methods):
        raise SystemExit("--sections methods and --methods METHOD ... belong together")
    items = read_items(sorted(prompts.glob("*.jsonl")), None, seed=0)
    draw = random.Random(0)
    items = [replace(item, tokens=draw.randint(tokens[0], tokens[-1])) for item in items]
    params = SamplingParams(max_tokens=max(tokens), ignore_eos=True)

    common = ["--model", str(heavy / "target"), "--dtype", dtype, "--prefix-tokens", "0"]

    def server(name: str, tree: str | None) -> ServerProcess:
        draft = ["--draft-model", str(heavy / "drafter"), "--tree", str(tree)]
        drafting = ["--method", "none"] if tree is None else draft
        return eyas_server(name, [*common, *drafting])

    def method_server(text: str) -> ServerProcess:
        method, _, drafter = text.partition("=")
        draft = ["--draft-model", drafter] if drafter else []
        return eyas_server(method, [*common, "--method", method, *draft, "--tree", "auto"])

    findings = Findings(output)
    measured = partial(compare, items=items, params=params)

    plan = ServePlan(repeats, requests=8, per_client=per_client)

    def servers(**trees: str | None) -> dict[str, ServerProcess]:
        return {name: server(name, tree) for name, tree in trees.items()}

    small = [count for count in SMALL if count in clients]
    for section in sections:
        if section == "auto":
            findings.add("auto", measured(servers(plain=None, auto="auto"), clients, plan=plan))
        if section == "off":
            sides = servers(plain=None, off="auto", again=None)
            findings.add("off", measured(sides, small, plan=plan, speculate={"off": False}))
        if section == "methods":
            sides = {"plain": server("plain", None)} | {text.partition("=")[0]: method_server(text) for text in methods}
            findings.add("methods", measured(sides, clients, plan=plan))


if __name__ == "__main__":
    raise SystemExit(main())
