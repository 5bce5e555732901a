"""Every way a request can fail, as the official client tells its users."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from ..conftest import run
from ..fakes import FakeEngine
from ..live import Live, live

ASKED: Any = {"model": "tiny", "messages": [{"role": "user", "content": "How many?"}]}
LONG = [7] * 5000


@contextmanager
def client_of(engine: FakeEngine, *, key: str = "none", timeout: float = 20, **settings: Any) -> Iterator[Any]:
    """A client of a server over an engine, which it carries as `live`."""
    with (
        live(engine, **settings) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=timeout) as made,
    ):
        made.live = server  # type: ignore[attr-defined]
        yield made


def ends(reason: str) -> FakeEngine:
    """An engine whose answers all end so."""
    made = FakeEngine()
    made.ending = reason
    return made


@pytest.mark.parametrize(
    ("engine", "settings", "kind", "status", "code"),
    [
        (FakeEngine, {"max_body_bytes": 40}, openai.APIStatusError, 413, "body_too_large"),
        (FakeEngine, {"api_keys": ("right",)}, openai.AuthenticationError, 401, "invalid_api_key"),
        (FakeEngine, {"model_names": ("other",)}, openai.NotFoundError, 404, "model_not_found"),
        (FakeEngine, {"max_model_len": 3}, openai.BadRequestError, 400, "context_length_exceeded"),
        (lambda: FakeEngine(most=0), {}, openai.RateLimitError, 429, "queue_full"),
        (lambda: ends("error"), {}, openai.InternalServerError, 500, "engine_error"),
        (lambda: ends("deadline"), {}, openai.InternalServerError, 504, "deadline_exceeded"),
    ],
)
def test_statuses_are_the_client_s_exceptions(
    engine: Callable[[], FakeEngine],
    settings: dict[str, Any],
    kind: type[openai.APIStatusError],
    status: int,
    code: str,
) -> None:
    with client_of(engine(), **settings) as client, pytest.raises(kind) as raised:
        client.chat.completions.create(**ASKED)
    assert (raised.value.status_code, raised.value.code) == (status, code)
    assert raised.value.request_id
    assert ("retry-after" in raised.value.response.headers) == (status == 429)


def test_a_server_that_is_going_down_is_an_internal_error() -> None:
    with client_of(FakeEngine()) as client:
        client.live.thread.drain()
        with pytest.raises(openai.InternalServerError) as raised:
            client.chat.completions.create(**ASKED)
    assert raised.value.status_code == 503


def test_the_client_comes_again_when_it_is_told_to() -> None:
    engine = FakeEngine(most=0)
    with client_of(engine) as client:
        patient = client.with_options(max_retries=1)
        waited = []

        def make_room(*, response: Any, **_: Any) -> None:
            waited.append(response.headers["retry-after"])
            engine.most = 64

        patient._sleep_for_retry = make_room  # what the client does between two tries
        answer = patient.chat.completions.create(**ASKED)
    assert waited == ["7"]
    assert answer.choices[0].message.content


@pytest.mark.parametrize("reason", ["error", "deadline"])
def test_what_goes_wrong_in_a_stream_ends_it_with_an_error(reason: str) -> None:
    with client_of(ends(reason)) as client:
        stream = client.chat.completions.create(**ASKED, stream=True)
        assert next(stream).choices
        with pytest.raises(openai.APIError) as raised:
            list(stream)
    assert raised.value.message


def test_a_server_that_is_gone_is_a_connection_error() -> None:
    with client_of(FakeEngine()) as client:
        client.live.stop()
        with pytest.raises(openai.APIConnectionError):
            client.chat.completions.create(**ASKED)


def test_a_client_that_runs_out_of_patience_ends_its_request() -> None:
    engine = FakeEngine(LONG, stride=1, pause=0.01, context=None)
    with client_of(engine, timeout=0.3) as client:
        with pytest.raises(openai.APITimeoutError):
            client.chat.completions.create(**ASKED, max_tokens=5000)
        assert client.live.idle_soon()
    assert engine.cancelled == [0]


def test_canceling_a_task_ends_its_request() -> None:
    engine = FakeEngine(LONG, stride=1, pause=0.01, context=None)

    async def cancel(server: Live) -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            asked = asyncio.ensure_future(client.chat.completions.create(**ASKED, max_tokens=5000))
            while not engine.requests:
                await asyncio.sleep(0.01)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked

    with live(engine) as server:
        run(cancel(server))
        assert server.idle_soon()
    assert engine.cancelled == [0]
