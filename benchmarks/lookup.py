"""The time of a draft that is looked up in tokens: prompt lookup and suffix decoding, by the length of the context.

A draft is what a round asks of the drafter for one row: propose, and grow the tree. The context is source code of
Python's standard library, which then goes on with a passage that it has already, or with a new one. `suffix, full`
also searches finished answers that fill their memory. Microseconds, median and 95th percentile over the tokens.

    python -m benchmarks.lookup [--model demo] [--lengths 1000 4000 16000] [--tokens 400] --output FILE.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.replay import CPU, METHODS, NO_COUPLING, observe
from eyas.bench.machine import describe_machine
from eyas.data.chats.stdlib import library_modules
from eyas.drafters.history import HistoryDrafter
from eyas.drafters.weightless.suffix import ANSWER_TOKENS
from eyas.files import write_json
from eyas.targets import load_tokenizer
from eyas.tree import parse_tree

ANSWER = 512
"""Tokens of each of the finished answers."""


def drafters(tree: str | None, library: Sequence[int]) -> dict[str, tuple[HistoryDrafter, str]]:
    """What is timed, each with the tree that it drafts."""
    found = {}
    for name in (*METHODS, "suffix, chain", "suffix, full"):
        drafter = METHODS[name.partition(",")[0]](CPU)
        drafter.resize(1)
        found[name] = drafter, "chain:16" if name.endswith("chain") else tree or str(drafter.default_tree)
        if name.endswith("full"):
            for start in range(0, ANSWER_TOKENS, ANSWER):
                drafter.begin(0, [0], "me")
                observe(drafter, library[start : start + ANSWER])
                drafter.finish(0)
                drafter.truncate(0, 0)
    return found


def draft_times(
    drafter: HistoryDrafter, tree: str, context: Sequence[int], following: Sequence[int]
) -> tuple[list[float], list[int]]:
    """Microseconds of the draft before each of the tokens that follow, and its nodes."""
    spec = parse_tree(tree)
    drafter.begin(0, context, "me")
    observe(drafter, context[1:])
    times, nodes = [], []
    for token in following:
        observe(drafter, [token])
        began = time.perf_counter()
        draft = drafter.draft(range(1), spec, NO_COUPLING)
        times.append(1e6 * (time.perf_counter() - began))
        nodes.append(int(draft.valid.sum()))
    drafter.truncate(0, 0)
    return times[20:], nodes[20:]  # without what is done but once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="whose tokenizer is used")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1000, 4000, 16000], help="tokens of the context")
    parser.add_argument("--tokens", type=int, default=400, help="drafts timed of each kind")
    parser.add_argument("--tree", help="in place of each method's own")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()

    torch.set_num_threads(1)
    tokenizer = load_tokenizer(options.model)
    count = options.tokens + 20
    library: list[int] = []
    for module in islice(library_modules(), 400):
        library += tokenizer(module.text, add_special_tokens=False)["input_ids"]
        if len(library) > ANSWER_TOKENS + max(options.lengths) + count:
            break
    text = library[ANSWER_TOKENS:]
    results: list[dict[str, Any]] = []
    for name, (drafter, tree) in drafters(options.tree, library).items():
        for length in options.lengths:
            context = text[:length]
            ways = {"copies": context[length // 3 :][:count], "new text": text[length : length + count]}
            for way, following in ways.items():
                times, nodes = draft_times(drafter, tree, context, following)
                results.append(
                    {
                        "method": name,
                        "tree": tree,
                        "context": length,
                        "goes_on_with": way,
                        "median_us": round(statistics.median(times), 1),
                        "p95_us": round(sorted(times)[int(0.95 * len(times))], 1),
                        "mean_nodes": round(statistics.mean(nodes), 2),
                    }
                )
                print(*results[-1].values(), flush=True)
    if options.output is not None:
        write_json(options.output, {"results": results, "machine": describe_machine()})


if __name__ == "__main__":
    main()
