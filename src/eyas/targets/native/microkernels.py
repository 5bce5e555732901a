"""Which microkernels multiply inputs and weights in bfloat16 on this machine: tiles, pairs, or chains."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from eyas.machine import clock, measured_once
from eyas.targets.native.library import KINDS, MAX_TOKENS_PER_PRODUCT, Linear, Microkernel, kernels, loaded_kernels
from eyas.targets.native.ops import multiplied

_LOG = logging.getLogger("eyas")
SEVERAL = 6
"""Weights of a measurement: with one alone, the caches would hold it."""


@cache
def chosen_microkernels() -> int:
    """What multiplies bfloat16 inputs and weights on this machine, as the kernels take it.

    By tiles (AMX) if they exist and aren't slower; otherwise in pairs (`vdpbf16ps`) for the numbers of tokens, one bit
    each, with which pairs are faster. Measured once per machine, in about 100 ms. A processor whose sums aren't the
    documented ones gets chains.
    """
    found = kernels()
    if found is None or not found.microkernels:
        return 0
    faster = measured_once(f"microkernels-{found.name}", lambda: _measure_microkernels(found.microkernels))
    return Microkernel.TILES if faster["tiles"] else sum(1 << tokens for tokens in faster["pairs"])


def _measure_microkernels(offered: Microkernel) -> dict[str, Any]:
    """Whether tiles are faster, and the numbers of tokens with which pairs are."""
    bfloat16 = torch.bfloat16
    weights = [loaded_kernels().pack(torch.randn(1024, 1024, dtype=bfloat16)) for _ in range(SEVERAL)]

    def by(bits: int) -> list[Callable[[Tensor], Tensor]]:
        structs = [Linear(each.data_ptr(), None, 1024, 1024, KINDS[bfloat16], bits) for each in weights]
        return [partial(multiplied, each, rounds=False) for each in structs]

    chains, pairs, tiles, documented = map(by, (0, (1 << 32) - 1, Microkernel.TILES, Microkernel.TILES_OF_VECTORS))
    inputs = [
        torch.randn(tokens, 1024, generator=torch.Generator().manual_seed(tokens)).bfloat16()
        for tokens in (*range(1, MAX_TOKENS_PER_PRODUCT + 1), 16, 256)
    ]
    if _differ(chains[0], pairs[0], inputs):
        return {"tiles": False, "pairs": []}
    best = [best_seconds((chains, pairs), x, 3) for x in inputs]
    faster = [
        len(x)
        for x, (chain, pair) in zip(inputs, best, strict=True)
        if pair < chain and len(x) <= MAX_TOKENS_PER_PRODUCT
    ]
    if Microkernel.TILES not in offered or _differ(tiles[0], documented[0], inputs[::4]):
        return {"tiles": False, "pairs": faster}
    ratios = [best_seconds((tiles,), x, 3)[0] / min(other) for x, other in zip(inputs, best, strict=True)]
    few, many = ratios[:-1], ratios[-1]
    return {"tiles": sum(few) < 1.1 * len(few) and many < 1.0, "pairs": faster}


def best_seconds(alternatives: Sequence[Sequence[Callable[[Tensor], object]]], x: Tensor, repeats: int) -> list[float]:
    """The best time of each alternative for multiplying x, each with several weights.

    They take turns on one thread and are timed in its CPU time, so that load on the machine doesn't decide.
    """
    best = [float("inf")] * len(alternatives)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for each in list(zip(*alternatives, strict=True)) * repeats:
            for number, multiply in enumerate(each):
                began = clock()
                multiply(x)
                best[number] = min(best[number], clock() - began)
    finally:
        torch.set_num_threads(threads)
    return best


def _differ(one: Callable[[Tensor], Tensor], other: Callable[[Tensor], Tensor], inputs: Sequence[Tensor]) -> bool:
    """Whether two that should give the same bits don't; logs a warning if so."""
    same = all(torch.equal(one(x), other(x)) for x in inputs)
    if not same:
        _LOG.warning("this processor sums bfloat16 products in an undocumented order: its instructions aren't used")
    return not same
