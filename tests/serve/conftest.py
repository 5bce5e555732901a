"""Servers in this process: for a fake engine through ASGI, and for a tiny pair on a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from eyas.engine import Engine
from eyas.serve.app import ENDPOINTS, create_app
from eyas.serve.context import ServeSettings
from eyas.serve.engine_thread import EngineThread
from eyas.serve.observe.metrics import Metrics
from eyas.serve.observe.observer import Observer
from eyas.session import load
from eyas.types import Limits

from ..pairs import Pair, save_drafter, save_target
from .fakes import FakeEngine
from .live import Live, live

Ask = Callable[..., Any]


@asynccontextmanager
async def client_of(
    engine: Any, observer: Observer | None = None, metrics: Metrics | None = None, **settings: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server for an engine; the engine's thread ends with the block."""
    thread = EngineThread(lambda: engine, observer=observer, backlog=settings.get("backlog_chunks", 1024))
    app = create_app(thread, ServeSettings(**{"model_names": ("tiny",), **settings}), observer, metrics=metrics)
    thread.start()
    while thread.status == "loading":
        await asyncio.sleep(0.001)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            client.thread = thread  # type: ignore[attr-defined]
            yield client
    finally:
        thread.stop()
        thread.join(10)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def ask(engine: FakeEngine) -> Ask:
    """`ask(path, **json)` -> the response of a server for the fake engine."""

    def call(path: str, settings: dict[str, Any] | None = None, **body: Any) -> httpx.Response:
        return run(post(engine, path, {"model": "tiny", **body}, **(settings or {})))

    return call


async def post(engine: Any, path: str, body: Any, **settings: Any) -> httpx.Response:
    """Send one request to a new server."""
    async with client_of(engine, **settings) as client:
        return await client.post(path, json=body)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """A coroutine's result, with a timeout of 30 seconds."""
    return asyncio.run(asyncio.wait_for(work, 30))


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A tiny target and drafter as directories."""
    path = tmp_path_factory.mktemp("pair")
    return Pair(save_target(path / "model"), save_drafter(path / "drafter"))


@pytest.fixture(scope="session")
def server(pair: Pair) -> Iterator[Live]:
    """A server for the tiny pair on a real socket."""
    limits = Limits(max_running=4, max_waiting=64, prefill_chunk=32, prefix_tokens=2048)
    engine = load(pair.model, pair.drafter, tree="dynamic:3,3,8", limits=limits)
    metrics = Metrics("tiny", ENDPOINTS)
    with live(engine, metrics, metrics=metrics) as made:
        yield made


@pytest.fixture(scope="session")
def offline(pair: Pair) -> Engine:
    """The same target without a drafter, for expected answers."""
    return load(pair.model)
