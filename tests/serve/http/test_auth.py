"""Keys: what is open, what isn't, and what is said."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from eyas.serve.context import ServeSettings
from eyas.serve.observe.metrics import Metrics

from ..conftest import client_of, run
from ..fakes import FakeEngine

BODY = {"model": "tiny", "prompt": "a", "max_tokens": 1}
KEYS = {"api_keys": ("one", "two")}


def send(method: str, path: str, headers: dict[str, str] | None = None, **settings: Any) -> httpx.Response:
    async def work() -> httpx.Response:
        async with client_of(FakeEngine(), metrics=Metrics("tiny"), **settings) as client:
            return await client.request(method, path, json=BODY if method == "POST" else None, headers=headers)

    response: httpx.Response = run(work())
    return response


@pytest.mark.parametrize("header", [None, "Bearer", "Bearer ", "Bearer three", "Basic one", "one", "Bearer one two"])
@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/nothing")])
def test_without_a_known_key_nothing_is_told(method: str, path: str, header: str | None) -> None:
    response = send(method, path, {} if header is None else {"Authorization": header}, **KEYS)
    assert response.status_code == 401
    assert response.json()["error"]["type"] == "authentication_error"
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("key", ["one", "two"])
def test_any_of_the_keys_opens(key: str) -> None:
    assert send("POST", "/v1/completions", {"Authorization": f"bearer {key}"}, **KEYS).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/metrics", "/version"])
def test_probes_and_scrapers_need_no_key(path: str) -> None:
    assert send("GET", path, **KEYS).status_code == 200


def test_without_keys_everything_is_open() -> None:
    assert send("POST", "/v1/completions").status_code == 200


def test_keys_are_not_shown() -> None:
    assert "sesame" not in repr(ServeSettings(model_names=("tiny",), api_keys=("sesame",)))


def test_other_origins_are_let_in_only_if_named() -> None:
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    allowed = send("OPTIONS", "/v1/completions", asked, allowed_origins=("https://a.example",), **KEYS)
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    assert "access-control-allow-origin" not in send("OPTIONS", "/v1/completions", asked).headers
