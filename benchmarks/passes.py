"""Seconds of a target's pass by its number of tokens: bf16 and int8 weights, with products of pairs and without.

All sides are loaded in one process and take turns; a pass verifies a tree of one row, or reads a prompt. The table has
the medians of each side and of its ratios to bf16 without pairs. Where a processor has no `vdpbf16ps`, or is slower
with it, both ways are the same.

    python -m benchmarks.passes MODEL_DIR [--tokens 1 4 8 12 16 512] [--repeats 15] [--columns 64] [--output FILE.json]
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from statistics import median
from unittest import mock

import torch

from benchmarks.harness import Output, interleave, paired, report, script
from eyas.targets import Target
from eyas.targets.loading import load_target
from eyas.targets.native import linears
from eyas.targets.slots import SlotCache
from eyas.tree import DraftTree


def load(model: str, quantize: str | None, pairs: bool) -> tuple[Target, SlotCache]:
    linears.best_layout(torch.device("cpu"), torch.bfloat16)  # measured as it is, not under the patch
    with mock.patch.object(linears, "_ways", linears._ways if pairs else lambda _: 0):
        target = load_target(model, dtype=torch.bfloat16, quantize=quantize)
    return target, target.allocate(1, 1024)


def seconds(target: Target, cache: SlotCache, tokens: int, columns: int) -> float:
    """Time of a pass over a chain of so many tokens behind `columns` of cache, or of a prompt if they are many."""
    ids = torch.arange(tokens).unsqueeze(0) % target.vocab_size
    cache.truncate(0, 0)
    began = time.perf_counter()
    if tokens > 64:
        target.prefill_to_end(cache, range(1), ids.tolist(), ())
        return time.perf_counter() - began
    cache.lengths[:1] = [columns]
    parents = torch.arange(tokens - 1).unsqueeze(0) - 1
    valid = torch.ones_like(parents, dtype=torch.bool)
    tree = DraftTree(ids[:, 1:], parents, valid.float(), valid, tokens - 1, counted=tokens - 1)
    began = time.perf_counter()
    target.verify(cache, range(1), ids[:, 0], tree, ())
    return time.perf_counter() - began


@script
def main(
    model: str,
    *,
    tokens: Sequence[int] = (1, 2, 4, 6, 8, 12, 16, 24, 32, 512),
    repeats: int = 15,
    columns: int = 64,
    output: Output = None,
) -> None:
    sides = {
        f"{weights}{', pairs' * pairs}": load(model, None if weights == "bf16" else weights, pairs)
        for weights in ("bf16", "int8")
        for pairs in (False, True)
    }
    rows, raw = [], {}
    for count in tokens:
        raw[count] = times = interleave(
            {name: partial(seconds, *side, count, columns) for name, side in sides.items()}, repeats
        )
        ratios = {name: paired(times["bf16"], taken) for name, taken in times.items() if name != "bf16"}
        rows.append({
            "tokens": count,
            "ms": {name: round(1000 * median(taken), 1) for name, taken in times.items()},
            "bf16 over": {name: f"{r['median']:.2f} {r['least']:.2f}-{r['most']:.2f}" for name, r in ratios.items()},
        })  # fmt: skip
    report({"model": model, "seconds": raw}, output, rows)


if __name__ == "__main__":
    raise SystemExit(main())
