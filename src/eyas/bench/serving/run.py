"""A serving benchmark: under each load, every side in turn, several times in rotating order.

Only one side is under load at a time; all get the same requests in the same order. Ratios are taken within a repeat,
between runs next to each other, so that a passing slowdown of the machine affects both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass

from eyas.bench.offline.runner import rotated
from eyas.bench.serving.client import Client, Item, Load, LoadRun
from eyas.bench.serving.servers import Side


@dataclass(frozen=True)
class ServePlan:
    """How many requests a run has, and how often it is repeated."""

    repeats: int = 3
    requests: int = 16
    """Minimum number of requests of a run."""
    per_client: float = 2.0
    """In a closed loop, the fewest requests per client."""
    warmup: int = 1
    """Uncounted requests by each client, once for each load and side; 0 = none."""
    seed: int = 0
    """Seed of the prompts' order and of the arrivals."""

    def count(self, load: Load) -> int:
        """How many requests one run under a load has."""
        return load.requests(self.requests, self.per_client)

    def total(self, loads: Sequence[Load]) -> int:
        """How many requests a side gets in all, warm-up included."""
        return sum(self.warmup * load.clients + self.repeats * self.count(load) for load in loads)


Results = dict[Load, dict[str, list[LoadRun]]]
"""Load -> side -> its runs, repeat by repeat."""


async def measure_sides(
    sides: Sequence[Side],
    loads: Sequence[Load],
    items: Sequence[Item],
    connect: Callable[[Side], Client],
    plan: ServePlan,
    *,
    around: Callable[[str], AbstractContextManager[object]] = nullcontext,
    advance: Callable[[], None] = lambda: None,
) -> Results:
    """Measure every side under every load, `plan.repeats` times. Raises EndpointError for a side that can't be reached.

    `connect(side)` is a client of the side's server; `around(side)`, such as an `IdleMeter`, is entered around each
    measured run.
    """
    results: Results = {}
    async with AsyncExitStack() as stack:
        clients = {side.name: await stack.enter_async_context(connect(side)) for side in sides}
        at = 0  # number of the next request, which alone determines its prompt and seed
        for load in loads:
            warm = _taken(items, at, plan.warmup * load.clients)
            if warm:
                for client in clients.values():
                    await client.run(Load("closed", load.clients), warm, at, plan.seed)
            at += len(warm)
            results[load] = {name: [] for name in clients}
            for repeat in range(plan.repeats):
                batch = _taken(items, at, plan.count(load))
                for name in rotated(list(clients), repeat):
                    with around(name):
                        run = await clients[name].run(load, batch, at, plan.seed + repeat)
                    results[load][name].append(run)
                    advance()
                at += len(batch)
    return results


def _taken(items: Sequence[Item], first: int, count: int) -> list[Item]:
    """`count` items starting at `first`, wrapping around."""
    return [items[number % len(items)] for number in range(first, first + count)]
