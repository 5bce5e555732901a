"""How requests arrive."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from eyas.bench.serving.client import Load, arrivals, run_load


@pytest.mark.parametrize(("clients", "count", "most"), [(1, 5, 1), (3, 10, 3), (8, 4, 4)])
def test_a_closed_loop_keeps_its_clients_busy(clients: int, count: int, most: int) -> None:
    running = 0
    seen = []

    async def ask(number: int) -> int:
        nonlocal running
        running += 1
        seen.append(running)
        await asyncio.sleep(0)
        running -= 1
        return number * number

    answers = asyncio.run(run_load(Load("closed", clients), ask, count, 0))
    assert answers == [n * n for n in range(count)]
    assert max(seen) == most


def test_arrivals_are_poisson_and_seeded() -> None:
    moments = arrivals(4.0, 4000, seed=7)
    assert moments == arrivals(4.0, 4000, seed=7) != arrivals(4.0, 4000, seed=8)
    gaps = [b - a for a, b in pairwise(moments)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(0.25, rel=0.05)
    assert deviation == pytest.approx(mean, rel=0.08)  # exponential: both are 1 / rate


def test_an_open_loop_waits_for_nobody() -> None:
    together = 0

    async def ask(number: int) -> int:
        nonlocal together
        together += 1
        while together < 5:  # nobody is answered before all have arrived
            await asyncio.sleep(0.001)
        return number

    assert asyncio.run(asyncio.wait_for(run_load(Load("open", 500.0), ask, 5, 3), 20)) == [0, 1, 2, 3, 4]


def test_requests_of_a_level() -> None:
    assert Load("closed", 8).requests(10, 2) == 16
    assert Load("closed", 2).requests(10, 2) == 10
    assert Load("open", 8).requests(10, 2) == 10
