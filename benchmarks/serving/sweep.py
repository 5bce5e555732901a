"""The serving figures: is speculation ever slower, is the automatic tree as good as the best fixed one?

    python -m benchmarks.serving.sweep HEAVY --prompts EVAL [--sections auto fixed chains off] [--output FILE.json]
    python -m benchmarks.serving.sweep HEAVY --prompts EVAL --sections methods --methods suffix medusa=FOLDER

HEAVY is a folder of `heavy_pair.py`; EVAL one with prompt files. Sections:

  auto    plain against auto at 1 to 64 clients at once, 5 repeats: ratios, first-token times
  fixed   auto (the baseline) against fixed trees, every number of clients: auto / best fixed is 1 / the best ratio
  chains  auto chains (the baseline) against auto trees at 1 to 8 clients, 5 repeats
  off     plain against a server with a drafter that is asked not to speculate, and against another of its own kind
  methods plain against automatic trees of each of `--methods`, every number of clients

Answers have `--tokens` tokens, or, with two numbers, as many between as chance will have it: then clients don't all
start anew at once, which flatters whoever gives all the same pace. Prompts are not shared between repeats, and prefix
reuse is off.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.serving.compare import Findings, compare
from eyas.bench.serving.load import read_items
from eyas.bench.serving.run import ServePlan
from eyas.bench.serving.servers import ServerProcess, eyas_server
from eyas.types import SamplingParams

SECTIONS = ["auto", "fixed", "chains", "off", "methods"]
SMALL, LARGE = (1, 2, 4, 8), (16, 32, 64)
FIXED = {
    SMALL: ("chain:3", "chain:5", "dynamic:3,4,8", "dynamic:5,4,15", "dynamic:7,8,32"),
    LARGE: ("chain:1", "chain:2", "chain:3", "dynamic:3,4,8"),  # more nodes can't pay at so many rows
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heavy", type=Path)
    parser.add_argument("--prompts", type=Path, required=True, help="a folder with .jsonl prompt files")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS[:-1])
    parser.add_argument(
        "--methods", nargs="+", default=[], help="METHOD or METHOD=DRAFTER, for the section of that name"
    )
    parser.add_argument("--clients", type=int, nargs="+", default=[*SMALL, *LARGE], help="at once")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 192])
    parser.add_argument("--per-client", type=float, default=3.0, help="requests of each client and repeat")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if ("methods" in options.sections) != bool(options.methods):
        parser.error("--sections methods and --methods METHOD ... belong together")

    items = read_items(sorted(options.prompts.glob("*.jsonl")), None, seed=0)
    draw = random.Random(0)
    items = [replace(item, tokens=draw.randint(options.tokens[0], options.tokens[-1])) for item in items]
    params = SamplingParams(max_tokens=max(options.tokens), ignore_eos=True)

    common = ["--model", str(options.heavy / "target"), "--dtype", options.dtype, "--prefix-tokens", "0"]

    def server(name: str, tree: str | None) -> ServerProcess:
        draft = ["--draft-model", str(options.heavy / "drafter"), "--tree", str(tree)]
        drafting = ["--method", "none"] if tree is None else draft
        return eyas_server(name, [*common, *drafting])

    def method_server(text: str) -> ServerProcess:
        method, _, drafter = text.partition("=")
        draft = ["--draft-model", drafter] if drafter else []
        return eyas_server(method, [*common, "--method", method, *draft, "--tree", "auto"])

    findings = Findings(options.output)
    measured = partial(compare, items=items, params=params)

    def plan(repeats: int = options.repeats, per_client: float = options.per_client) -> ServePlan:
        return ServePlan(repeats, requests=8, per_client=per_client)

    def servers(**trees: str | None) -> dict[str, ServerProcess]:
        return {name: server(name, tree) for name, tree in trees.items()}

    small = [count for count in SMALL if count in options.clients]
    for section in options.sections:
        if section == "auto":
            findings.add("auto", measured(servers(plain=None, auto="auto"), options.clients, plan=plan()))
        if section == "fixed":
            for group, trees in FIXED.items():
                clients = [count for count in group if count in options.clients]
                if not clients:
                    continue
                sides = {tree: server(tree, tree) for tree in ("auto", *trees)}
                report = measured(sides, clients, plan=plan(max(1, options.repeats // 2), 1.0))
                findings.add(f"fixed, {clients[0]} to {clients[-1]} clients", report)
        if section == "chains":
            findings.add("chains", measured(servers(chain="auto:chain", auto="auto"), small, plan=plan()))
        if section == "off":
            sides = servers(plain=None, off="auto", again=None)
            findings.add("off", measured(sides, small, plan=plan(), speculate={"off": False}))
        if section == "methods":
            sides = {"plain": server("plain", None)} | {
                text.partition("=")[0]: method_server(text) for text in options.methods
            }
            findings.add("methods", measured(sides, options.clients, plan=plan()))


if __name__ == "__main__":
    main()
