"""Slow functions beside the event loop: clients take turns, and what nobody waits for isn't begun."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from eyas.errors import QueueFullError
from eyas.serve.context import ServerContext, ServeSettings
from eyas.serve.fair_turns import FairTurns, FairWorkers

from .conftest import run


def test_a_newcomer_waits_for_one_call_of_a_greedy_client_not_for_all() -> None:
    made: list[str] = []

    async def work() -> None:
        workers = FairWorkers(1, "test")
        greedy = [workers.run(f"greedy/{number}", 100, made.append, "greedy") for number in range(20)]
        waiting = [asyncio.ensure_future(each) for each in greedy]
        await asyncio.sleep(0)
        await workers.run("polite", 100, made.append, "polite")
        await asyncio.gather(*waiting)

    run(work())
    assert made.index("polite") <= 2
    assert len(made) == 21


def test_a_call_that_nobody_waits_for_is_not_made_and_one_that_runs_holds_its_thread() -> None:
    made: list[int] = []
    go = threading.Event()

    async def work() -> None:
        workers = FairWorkers(1, "test")
        running = asyncio.ensure_future(workers.run("a", 1, go.wait, 30))
        waiting = [asyncio.ensure_future(workers.run("a", 1, made.append, number)) for number in range(5)]
        await asyncio.sleep(0.01)
        for task in (running, *waiting[:4]):
            task.cancel()
        await asyncio.gather(running, *waiting[:4], return_exceptions=True)
        await asyncio.sleep(0.01)
        assert not made, "the thread is still busy"
        go.set()
        await waiting[4]
        await workers.run("b", 1, made.append, 9)

    run(work())
    assert made == [4, 9]


def test_a_call_that_is_cancelled_as_its_turn_comes_is_nobody_elses_error() -> None:
    made: list[str] = []
    errors: list[object] = []
    go = threading.Event()

    async def work() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        workers = FairWorkers(1, "test")
        running = asyncio.ensure_future(workers.run("a", 1, go.wait, 30))
        gone = [asyncio.ensure_future(workers.run("a", 1, made.append, "gone")) for _ in range(3)]
        await asyncio.sleep(0.01)
        go.set()
        time.sleep(0.1)  # the loop is told that the thread is free, but hasn't heard yet
        for task in gone:
            task.cancel()
        await workers.run("b", 1, made.append, "b")
        await asyncio.gather(running, *gone, return_exceptions=True)
        await asyncio.gather(*(workers.run("b", 1, made.append, "b") for _ in range(2)))

    run(work())
    assert made == ["b"] * 3
    assert not errors


def test_a_turn_goes_on_after_a_request_that_is_cancelled_as_its_turn_comes() -> None:
    async def work() -> None:
        turns = FairTurns(1)
        await turns.take("a", 1)
        gone = asyncio.ensure_future(turns.take("a", 1))
        await asyncio.sleep(0)  # it waits now
        turns.give_back()  # and has its turn, but hasn't heard
        gone.cancel()
        await asyncio.wait_for(turns.take("b", 1), 5)
        assert gone.cancelled()

    run(work())


def test_too_much_waiting_text_is_refused_but_everyone_may_bring_some() -> None:
    go = threading.Event()

    async def work() -> None:
        workers = FairWorkers(1, "test")
        tasks = [asyncio.ensure_future(workers.run("a", 20 << 20, go.wait, 30)) for _ in range(2)]
        await asyncio.sleep(0.01)
        with pytest.raises(QueueFullError, match="too much text"):
            await workers.run("a/b", 20 << 20, go.wait)
        tasks.append(asyncio.ensure_future(workers.run("c", 20 << 20, go.wait, 30)))
        await asyncio.sleep(0.01)
        go.set()
        await asyncio.gather(*tasks)

    run(work())


def reading() -> ServerContext:
    """The state of a server, as far as bodies are read by it."""
    nothing: Any = None
    return ServerContext(nothing, ServeSettings(model_names=("m",)), nothing)


def test_a_request_begins_before_those_that_another_client_sent_earlier() -> None:
    begun: list[str] = []

    async def work() -> None:
        context = reading()

        async def one(client: str) -> None:
            await context.turn_to_read(client, 100)
            begun.append(client)

        tasks = [asyncio.ensure_future(one("greedy")) for _ in range(20)]
        gone = asyncio.ensure_future(one("gone"))
        await asyncio.sleep(0)
        gone.cancel()
        await one("polite")
        assert begun.index("polite") <= 2
        await asyncio.gather(*tasks)

    run(work())
    assert len(begun) == 21


def test_large_requests_begin_at_a_pace() -> None:
    async def work() -> None:
        context = reading()
        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.gather(*(context.turn_to_read("greedy", 2_500_000) for _ in range(4)))  # 0.1 s each
        assert loop.time() - began >= 0.29
        await context.turn_to_read("greedy", 100)

    run(work())
