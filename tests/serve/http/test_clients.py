"""Who a client is, and what its requests may take from others: shares, prefixes, time, the event loop."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from eyas.errors import UsageError
from eyas.serve.context import ServeSettings
from eyas.serve.fair_turns import FairWorkers
from eyas.serve.http import request as reading
from eyas.serve.http.streaming import encoded
from eyas.session import load
from eyas.types import Limits

from ...pairs import Pair
from ..conftest import client_of, post, run
from ..fakes import FakeEngine
from ..live import live

ASKED = {"model": "tiny", "prompt": [9] * 100, "max_tokens": 2}


@pytest.mark.parametrize(("trusted", "client"), [((), "127.0.0.1"), (("127.0.0.1/32",), "8.8.8.8")])
def test_forwarded_addresses_count_only_where_asked_for(trusted: Sequence[str], client: str) -> None:
    engine = FakeEngine()
    with live(engine, trusted_proxies=tuple(trusted)) as server:
        sent = {"X-Forwarded-For": "8.8.8.8"}
        httpx.post(f"{server.url}/v1/completions", json=ASKED | {"user": "ann"}, headers=sent).raise_for_status()
    assert engine.keys == [f"{client}/ann"]


@pytest.mark.parametrize(("keys", "reused"), [(("one", "two"), [0, 98, 0]), ((), [0, 98, 98])])
def test_prefixes_of_one_key_are_not_found_by_another(pair: Pair, keys: tuple[str, ...], reused: list[int]) -> None:
    engine = load(pair.model, limits=Limits(max_running=2, prefix_tokens=2048))

    async def work() -> list[int]:
        found = []
        async with client_of(engine, api_keys=keys) as client:
            for key in ("one", "one", "two"):
                response = await client.post("/v1/completions", json=ASKED, headers={"Authorization": f"Bearer {key}"})
                found.append(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
        return found

    assert run(work()) == reused


TEXT = "a " * 100_000
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": json.dumps({"a": TEXT})}}
LARGE: dict[str, dict[str, Any]] = {
    "arguments": {"messages": [{"role": "assistant", "content": "", "tool_calls": [CALL]}]},
    "reasoning": {"messages": [{"role": "assistant", "content": "", "reasoning": TEXT}]},
    "description": {"tools": [{"type": "function", "function": {"name": "f", "description": TEXT}}]},
    "variables": {"chat_template_kwargs": {"enable_thinking": [TEXT]}},
}


@pytest.mark.parametrize("where", LARGE)
def test_all_text_of_a_chat_counts_before_it_is_cut_into_tokens(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(*_: object, **__: object) -> None:
        raise AssertionError("it was cut into tokens")

    monkeypatch.setattr("eyas.serve.api.chat.chat_prompt", cut)
    hello = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    answer = run(post(FakeEngine(), "/v1/chat/completions", hello | LARGE[where]))
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded", answer.text


def test_bad_words_have_their_turn_by_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else 256 words of 256 characters would be cut into tokens before anybody's short prompt."""
    sizes: list[int] = []
    work = FairWorkers.run

    async def noted(self: FairWorkers, key: str, characters: int, *rest: Any) -> Any:
        sizes.append(characters)
        return await work(self, key, characters, *rest)

    monkeypatch.setattr(FairWorkers, "run", noted)
    run(post(FakeEngine(), "/v1/completions", ASKED | {"bad_words": ["clips" * 50] * 3}))
    assert sizes == [0, 2 * 3 * 250]


def test_the_time_of_a_request_counts_from_its_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas.serve.api.chat.completion_prompt", lambda *_: time.sleep(3))
    answer = run(post(FakeEngine(), "/v1/completions", ASKED, request_seconds=0.2))
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")


def test_a_body_above_the_limit_that_never_comes_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_LINGER_SECONDS", 0.3)
    with live(FakeEngine(), max_body_bytes=1000) as server, server.connect() as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\n\r\n")
        client.settimeout(15)
        assert client.recv(1000).startswith(b"HTTP/1.1 413")


def test_json_is_written_in_pieces_and_reads_the_same() -> None:
    inner = [None, *({"5": {"logprob": -0.5, "text": 'a"\u00e9\n'}} for _ in range(100))]
    value = {
        "choices": [{"index": 0, "a": inner, "b": {"c": inner, "d": {}}}],
        "e": [],
        "f": {},
        "g": "\u2028",
        "h": [[]],
    }
    assert json.loads(run(encoded(value))) == value
    assert run(encoded({})) == b"{}"


def test_a_large_answer_lets_others_have_their_turn() -> None:
    entry = {str(token): {"logprob": -1.0, "rank": token, "decoded_token": "a"} for token in range(20)}
    value = {"choices": [{"index": index, "prompt_logprobs": [entry] * 500} for index in range(24)]}
    paused = [0.0]

    async def others() -> None:
        while True:
            began = time.thread_time()
            await asyncio.sleep(0)
            paused.append(time.thread_time() - began)

    async def work() -> float:
        beside = asyncio.ensure_future(others())
        await asyncio.sleep(0)  # it has begun
        began = time.thread_time()
        await encoded(value)
        took = time.thread_time() - began
        await asyncio.sleep(0)  # it has seen how long it had to wait
        beside.cancel()
        return took

    whole = run(work())
    assert max(paused) < max(0.05, whole / 4)


@pytest.mark.parametrize("stop", ["", [""], ["a", ""]])
def test_an_empty_stop_string_is_named_as_such(stop: Any) -> None:
    answer = run(post(FakeEngine(), "/v1/completions", ASKED | {"stop": stop}))
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("stop: a stop string has at least one character")


@pytest.mark.parametrize("name", ["*.*", "*.", "a*", "*a.de", ""])
def test_names_of_hosts_that_match_nothing_are_refused(name: str) -> None:
    from eyas.cli.serve.serve import _checked_host

    with pytest.raises(UsageError, match=r"write NAME, \*\.DOMAIN"):
        _checked_host(name)


def test_settings_name_no_proxies_by_default() -> None:
    assert ServeSettings(model_names=("m",)).trusted_proxies == ()
