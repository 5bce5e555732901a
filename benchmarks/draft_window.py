"""The drafter's cost of a round by the length of the context, with and without a window.

A round is what the engine asks of a drafter for one row: read the pairs of the round before, and draft a tree. The
contexts are random pairs, which cost what true ones do; nothing is said about acceptance. Each repeat times all four
cases in turn, some rounds of each, so that a ratio pairs what was measured next to each other. Without a window the row
is cut back to its length after every round; in a window it goes on, so that the steps of the window are paid for.

    python -m benchmarks.draft_window [--model demo] [--drafter demo] [--window 1024] --output FILE.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

from eyas.bench.machine import describe_machine
from eyas.drafters.decoding import NetworkDrafter
from eyas.drafters.loading import load_drafter
from eyas.files import write_json
from eyas.targets import Target, load_target
from eyas.tree import parse_tree
from eyas.types import SamplingParams
from eyas.verify import Sampler

CHUNK = 512


class Row:
    """A drafter with one row of random pairs."""

    def __init__(self, target: Target, drafter: NetworkDrafter, length: int, windowed: bool) -> None:
        """Read `length` pairs; if it isn't `windowed` the row keeps this length."""
        self._target, self._drafter, self._length, self._windowed = target, drafter, length, windowed
        self._draw = torch.Generator().manual_seed(0)
        drafter.resize(1)
        for done in range(0, length, CHUNK):
            count = min(CHUNK, length - done)
            drafter.observe(range(1), *self._pairs(count), [count])

    def _pairs(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Random tokens [1, count] and taps [1, count, A, Ht]."""
        taps = (1, count, len(self._drafter.taps), self._target.hidden_size)
        tokens = torch.randint(self._target.vocab_size, (1, count), generator=self._draw)
        return tokens, torch.randn(taps, generator=self._draw).to(self._target.dtype)

    def round(self, tree: str, pairs: int, sampler: Sampler) -> float:
        """Milliseconds of a round that reads so many pairs and drafts a tree."""
        tokens, states = self._pairs(pairs)
        spec, coupling = parse_tree(tree), sampler.coupling(range(1), True)
        started = time.perf_counter()
        self._drafter.observe(range(1), tokens, states, [pairs])
        self._drafter.draft(range(1), spec, coupling)
        seconds = time.perf_counter() - started
        if not self._windowed:
            self._drafter.truncate(0, self._length)
        return 1000 * seconds

    @property
    def cache_bytes(self) -> int:
        """The size of the drafter's slot cache."""
        return self._drafter._cache.nbytes()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Medians of each case's rounds, and of the ratios of a repeat's medians to those at the shortest length."""
    target = load_target(options.model, dtype=options.dtype, device="cpu")
    sampler = Sampler(1, target.vocab_size, target.device)
    sampler.admit(0, SamplingParams(), [3] * 8, ())
    cases = {
        (window, length): Row(
            target, load_drafter(options.drafter, target, window=window or "off"), length, window is not None
        )
        for window in (None, options.window)
        for length in options.lengths
    }  # fmt: skip
    times: dict[tuple[int | None, int], list[float]] = {case: [] for case in cases}
    for repeat in range(options.repeats + 1):
        for case, row in cases.items():
            found = [row.round(options.tree, options.pairs, sampler) for _ in range(options.rounds)]
            if repeat:
                times[case].append(statistics.median(found))
    figures = []
    for (window, length), found in times.items():
        ratios = [one / first for one, first in zip(found, times[window, options.lengths[0]], strict=True)]
        figures.append({
            "window": window,
            "context": length,
            "milliseconds": round(statistics.median(found), 3),
            "of_the_shortest": round(statistics.median(ratios), 3),
            "of_the_shortest_range": [round(min(ratios), 3), round(max(ratios), 3)],
            "cache_bytes": cases[window, length].cache_bytes,
        })  # fmt: skip
    names = ("model", "drafter", "dtype", "window", "lengths", "tree", "pairs", "rounds", "repeats")
    return {
        "date": str(date.today()),
        "machine": describe_machine(),
        "settings": {name: getattr(options, name) for name in names},
        "figures": figures,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--drafter", default="demo")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 16384])
    parser.add_argument("--tree", default="dynamic:5,6,24")
    parser.add_argument("--pairs", type=int, default=3, help="pairs that a round reads")
    parser.add_argument("--rounds", type=int, default=40, help="rounds of each case in a repeat")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    report = measure(options)
    for row in report["figures"]:
        window = "no window" if row["window"] is None else f"window {row['window']}"
        print(
            f"{window}, {row['context']:,} pairs: {row['milliseconds']} ms a round, x {row['of_the_shortest']}; "
            f"cache {row['cache_bytes'] / 2**20:.1f} MiB"
        )
    if options.output is not None:
        write_json(options.output, report)


if __name__ == "__main__":
    main()
