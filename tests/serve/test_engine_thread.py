"""The engine's thread: order, groups, cancellation, slow readers, endings."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from eyas.errors import ModelError, QueueFullError, RequestError
from eyas.serve.engine_thread import EngineStoppedError, EngineThread, RequestHandle, TooSlowError
from eyas.serve.observe.observer import Observers
from eyas.types import Chunk, Request, SamplingParams

from .conftest import run
from .fakes import FakeEngine, ids

PROMPT = (5, 6)


def request(tokens: int = 50) -> Request:
    return Request(PROMPT, SamplingParams(max_tokens=tokens))


@asynccontextmanager
async def running(engine: Any, **options: Any) -> AsyncIterator[EngineThread]:
    thread = EngineThread(lambda: engine, **options)
    thread.start()
    while thread.status == "loading":
        await asyncio.sleep(0.001)
    try:
        yield thread
    finally:
        thread.stop()
        thread.join(10)


async def tokens_of(handle: RequestHandle, count: int = 1) -> list[list[int]]:
    found: list[list[int]] = [[] for _ in range(count)]
    async for index, chunk in handle:
        found[index] += chunk.token_ids
    return found


def test_chunks_come_in_order_and_end() -> None:
    async def work() -> None:
        engine = FakeEngine()
        async with running(engine) as thread:
            handle = await thread.submit([request(), request(4)], deadline=3.0, queue_key="ann")
            assert await tokens_of(handle, 2) == [engine.text, engine.text[:4]]
            assert engine.keys == ["ann"] * 2
            assert engine.deadlines == [3.0] * 2
            assert thread.idle

    run(work())


def test_many_at_once_each_get_their_own() -> None:
    async def work() -> None:
        engine = FakeEngine()
        async with running(engine) as thread:
            handles = await asyncio.gather(*(thread.submit([request(1 + i % 7)]) for i in range(50)))
            got = await asyncio.gather(*(tokens_of(handle) for handle in handles))
            assert [each[0] for each in got] == [engine.text[: 1 + i % 7] for i in range(50)]

    run(work())


def test_a_group_is_queued_as_a_whole_or_not_at_all() -> None:
    async def work() -> None:
        engine = FakeEngine(most=2)
        async with running(engine) as thread:
            with pytest.raises(QueueFullError):
                await thread.submit([request()] * 3)
            assert sorted(engine.cancelled) == [0, 1]
            with pytest.raises(RequestError):
                await thread.submit([Request((10**6,))])
            assert await tokens_of(await thread.submit([request(3)])) == [engine.text[:3]]

    run(work())


def test_canceling_ends_with_a_completion() -> None:
    async def work() -> None:
        engine = FakeEngine(stride=1)
        engine.go.clear()
        async with running(engine) as thread:
            handle = await thread.submit([request(), request()])
            handle.cancel(1)
            handle.cancel(1)
            handle.cancel(7)
            engine.go.set()
            reasons = {index: chunk.completion.finish_reason async for index, chunk in handle if chunk.completion}
            assert reasons == {0: "length", 1: "cancelled"}
            assert engine.cancelled == [1]

    run(work())


def test_others_go_on_while_a_client_that_leaves_cancels_much() -> None:
    calls: list[str] = []

    class Slow(FakeEngine):
        def cancel(self, index: int) -> None:
            calls.append("cancel")
            time.sleep(0.02)
            super().cancel(index)

        def step(self) -> list[Chunk]:
            calls.append("step")
            return super().step()

    async def work() -> None:
        async with running(Slow(range(5, 200), stride=1, pause=0.001)) as thread:
            many, other = await thread.submit([request(150)] * 20), await thread.submit([request(150)])
            many.cancel()
            await asyncio.gather(tokens_of(many, 20), tokens_of(other))

    run(work())
    assert calls.count("cancel") == 20
    assert "cancel " * 6 not in " ".join(calls) + " "


def test_a_submission_nobody_waits_for_is_cancelled() -> None:
    async def work() -> None:
        engine = FakeEngine(pause=0.05)
        async with running(engine) as thread:
            first = await thread.submit([request()])  # the thread is busy with a step
            waiting = asyncio.ensure_future(thread.submit([request()]))
            await asyncio.sleep(0)
            waiting.cancel()
            await tokens_of(first)
            while not thread.idle:
                await asyncio.sleep(0.01)
            assert engine.cancelled == [1]

    run(work())


def test_a_reader_that_falls_behind_is_cancelled_and_stalls_nobody() -> None:
    async def work() -> None:
        engine = FakeEngine([7] * 200, stride=1, pause=0.001)
        async with running(engine, backlog=20) as thread:
            slow = await thread.submit([request(200)])
            quick = await thread.submit([request(60)])
            assert len((await tokens_of(quick))[0]) == 60
            with pytest.raises(TooSlowError):
                await tokens_of(slow)
            assert engine.cancelled == [0]

    run(work())


def test_an_engine_that_fails_tells_everyone_and_why() -> None:
    async def work() -> None:
        engine = FakeEngine(pause=0.02)
        async with running(engine) as thread:
            handle = await thread.submit([request()])
            engine.step_error = ZeroDivisionError("a bug")
            with pytest.raises(EngineStoppedError, match="failed"):
                await tokens_of(handle)
            assert await _status(thread, "failed")
            assert isinstance(thread.error, ZeroDivisionError)
            with pytest.raises(EngineStoppedError):
                await thread.submit([request()])

    run(work())


async def _status(thread: EngineThread, wanted: str) -> bool:
    for _ in range(500):
        if thread.status == wanted:
            return True
        await asyncio.sleep(0.01)
    return False


def test_an_engine_that_can_not_be_loaded_is_a_failure() -> None:
    def load() -> Any:
        raise ModelError("no such model")

    async def work() -> None:
        thread = EngineThread(load)
        with pytest.raises(EngineStoppedError):
            _ = thread.engine
        thread.start()
        assert await _status(thread, "failed")
        assert isinstance(thread.error, ModelError)

    run(work())


def test_draining_takes_nothing_new_and_finishes_what_runs() -> None:
    async def work() -> None:
        engine = FakeEngine(pause=0.01)
        async with running(engine) as thread:
            handle = await thread.submit([request()])
            thread.drain()
            with pytest.raises(EngineStoppedError, match="draining"):
                await thread.submit([request()])
            assert await tokens_of(handle) == [engine.text]

    run(work())


def test_stopping_fails_what_runs() -> None:
    async def work() -> None:
        async with running(FakeEngine(pause=0.02)) as thread:
            handle = await thread.submit([request()])
            thread.stop()
            with pytest.raises(EngineStoppedError, match="going down"):
                await tokens_of(handle)

    run(work())


def test_a_loop_that_is_closed_stops_nobody() -> None:
    engine = FakeEngine(pause=0.02)
    thread = EngineThread(lambda: engine)
    thread.start()

    async def leave() -> None:
        await _status(thread, "ready")
        await thread.submit([request()])

    async def stay() -> list[list[int]]:
        return await tokens_of(await thread.submit([request()]))

    run(leave())
    assert run(stay()) == [engine.text]
    thread.stop()
    thread.join(10)


def test_the_observer_is_told_of_every_step_on_the_engine_s_thread() -> None:
    class Ears(Observers):
        steps = 0
        names: frozenset[str] = frozenset()

        def stepped(self, state: Any, controller: Any, outcome: Any) -> None:  # noqa: ARG002
            Ears.steps += 1
            Ears.names |= {threading.current_thread().name}

    async def work() -> None:
        async with running(FakeEngine(stride=1), observer=Ears()) as thread:
            await tokens_of(await thread.submit([request(5)]))

    run(work())
    assert Ears.steps >= 5
    assert Ears.names == {"engine"}


def test_a_chunk_of_an_ended_sequence_is_nothing() -> None:
    async def work() -> None:
        handle = RequestHandle(1, 10, lambda *_: None)
        handle.deliver(3, Chunk(3, (1,), 0))
        handle.fail(EngineStoppedError("gone"))
        with pytest.raises(EngineStoppedError):
            await tokens_of(handle)

    run(work())


def test_the_fake_writes_what_it_says() -> None:
    assert FakeEngine("In May.").text == ids("In May.")


def test_a_request_on_its_way_to_the_engine_is_not_idleness() -> None:
    """Else draining would end the engine right before it begins."""
    begun = threading.Event()
    go_on = threading.Event()

    class Slow(FakeEngine):
        def submit(self, *args: Any, **options: Any) -> int:
            begun.set()
            go_on.wait(10)
            return super().submit(*args, **options)

    async def work() -> None:
        async with running(Slow()) as thread:
            submitting = asyncio.create_task(thread.submit([request(4)]))
            while not begun.is_set():
                await asyncio.sleep(0.001)
            assert not thread.idle
            go_on.set()
            handle = await submitting
            await tokens_of(handle)
            assert thread.idle

    run(work())
