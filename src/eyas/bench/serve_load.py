"""How requests arrive: from so many clients who each wait for their answer, or at random moments."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

AnswerT = TypeVar("AnswerT")
Ask = Callable[[int], Awaitable[AnswerT]]
"""Asks request `i` of the load."""


@dataclass(frozen=True)
class Load:
    """One level of load."""

    kind: Literal["closed", "open"]
    level: float
    """Clients at once, or requests a second."""

    def __str__(self) -> str:
        return f"{self.level:g} at once" if self.kind == "closed" else f"{self.level:g} requests/s"

    @property
    def clients(self) -> int:
        """Clients at once; 1 where requests come as they come."""
        return int(self.level) if self.kind == "closed" else 1

    def requests(self, least: int, per_client: float) -> int:
        """How many are sent: in a closed loop at least `per_client` by each client."""
        return max(least, math.ceil(per_client * self.clients)) if self.kind == "closed" else least


async def run_load(load: Load, ask: Ask[AnswerT], count: int, seed: int) -> list[AnswerT]:
    """Send `count` requests; the answers in the order of the requests."""
    if load.kind == "closed":
        return await _closed(ask, count, load.clients)
    return await _open(ask, arrivals(load.level, count, seed))


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Seconds at which requests arrive: a Poisson process, the first one at 0; the same for the same seed."""
    chance = random.Random(seed)
    moments = [0.0]
    while len(moments) < count:
        moments.append(moments[-1] + chance.expovariate(rate))
    return moments[:count]


async def _closed(ask: Ask[AnswerT], count: int, clients: int) -> list[AnswerT]:
    """Each client asks its next question when it has its answer."""
    answers: dict[int, AnswerT] = {}
    waiting = iter(range(count))

    async def client() -> None:
        for number in waiting:
            answers[number] = await ask(number)

    await asyncio.gather(*(client() for _ in range(min(clients, count))))
    return [answers[number] for number in range(count)]


async def _open(ask: Ask[AnswerT], moments: Sequence[float]) -> list[AnswerT]:
    """Requests are sent at their moments, whatever became of those before."""
    began = asyncio.get_running_loop().time()

    async def arriving(number: int, moment: float) -> AnswerT:
        await asyncio.sleep(max(0.0, began + moment - asyncio.get_running_loop().time()))
        return await ask(number)

    return list(await asyncio.gather(*(arriving(number, moment) for number, moment in enumerate(moments))))
