"""Seconds of a target's pass by its number of tokens: bf16 and int8 weights, with products of pairs and without.

All sides are loaded in one process and take turns; a pass verifies a tree of one row, or reads a prompt. The table has
the medians of each side and of its ratios to bf16 without pairs. Where a processor has no `vdpbf16ps`, or is slower
with it, both ways are the same.

    python -m benchmarks.passes MODEL_DIR [--tokens 1 4 8 12 16 512] [--repeats 15] [--columns 64] [--output FILE.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from unittest import mock

import torch
from rich.console import Console
from rich.table import Table

from eyas.bench.machine import describe_machine
from eyas.targets import Target
from eyas.targets.loading import load_target
from eyas.targets.native import linears
from eyas.tree import DraftTree


def load(model: str, quantize: str | None, pairs: bool) -> Target:
    linears.best_layout(torch.device("cpu"), torch.bfloat16)  # measured as it is, not under the patch
    with mock.patch.object(linears, "_ways", linears._ways if pairs else lambda _: 0):
        target = load_target(model, dtype=torch.bfloat16, quantize=quantize)
    target.resize(1)
    target.cache.reserve(1024)
    return target


def seconds(target: Target, tokens: int, columns: int) -> float:
    """Time of a pass over a chain of so many tokens behind `columns` of cache, or of a prompt if they are many."""
    ids = torch.arange(tokens).unsqueeze(0) % target.vocab_size
    target.truncate(0, 0)
    began = time.perf_counter()
    if tokens > 64:
        target.prefill_to_end(range(1), ids.tolist(), ())
        return time.perf_counter() - began
    target.cache.lengths[:1] = [columns]
    parents = torch.arange(tokens - 1).unsqueeze(0) - 1
    valid = torch.ones_like(parents, dtype=torch.bool)
    tree = DraftTree(ids[:, 1:], parents, valid.float(), valid, tokens - 1, counted=tokens - 1)
    began = time.perf_counter()
    target.verify(range(1), ids[:, 0], tree, ())
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 6, 8, 12, 16, 24, 32, 512])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--columns", type=int, default=64)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()

    sides = {
        f"{weights}{', pairs' * pairs}": load(options.model, None if weights == "bf16" else weights, pairs)
        for weights in ("bf16", "int8")
        for pairs in (False, True)
    }
    first = next(iter(sides))
    table = Table("tokens", *(f"{name}, ms" for name in sides), *(f"{first} / {name}" for name in list(sides)[1:]))
    found: dict[int, dict[str, list[float]]] = {}
    for tokens in options.tokens:
        times: dict[str, list[float]] = {name: [] for name in sides}
        for repeat in range(options.repeats + 1):
            for name, target in sides.items():
                taken = seconds(target, tokens, options.columns)
                if repeat:
                    times[name].append(taken)
        found[tokens] = times
        ratios = [[a / b for a, b in zip(times[first], times[name], strict=True)] for name in list(sides)[1:]]
        table.add_row(
            str(tokens),
            *(f"{1000 * statistics.median(taken):.1f}" for taken in times.values()),
            *(f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})" for each in ratios),
        )
    Console(width=160).print(table)
    if options.output:
        report = {"model": options.model, "machine": describe_machine(), "seconds": found}
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
