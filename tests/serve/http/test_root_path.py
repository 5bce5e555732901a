"""Behind a proxy that shows the server under a path: with the path and without it, keys and metrics as ever."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from eyas.serve.app import ENDPOINTS
from eyas.serve.observe.metrics import Metrics

from ..conftest import client_of, run
from ..fakes import FakeEngine

BODY = {"model": "tiny", "prompt": "a", "max_tokens": 1}
KEY = {"Authorization": "Bearer one"}
SETTINGS = {"root_path": "/eyas", "api_keys": ("one",)}


def send(*requests: tuple[str, str, dict[str, str]], **settings: Any) -> list[httpx.Response]:
    async def work() -> list[httpx.Response]:
        metrics = Metrics("tiny", ENDPOINTS)
        async with client_of(FakeEngine(), metrics, metrics=metrics, **settings) as client:
            return [
                await client.request(method, path, json=BODY if method == "POST" else None, headers=headers)
                for method, path, headers in requests
            ]

    found: list[httpx.Response] = run(work())
    return found


@pytest.mark.parametrize("prefix", ["/eyas", ""])
def test_requests_come_with_the_path_or_without_it(prefix: str) -> None:
    health, kept_out, answered, models, schema = send(
        ("GET", f"{prefix}/health", {}),
        ("POST", f"{prefix}/v1/completions", {}),
        ("POST", f"{prefix}/v1/completions", KEY),
        ("GET", f"{prefix}/v1/models/tiny", KEY),
        ("GET", f"{prefix}/openapi.json", KEY),
        **SETTINGS,
    )
    assert [each.status_code for each in (health, kept_out, answered, models)] == [200, 401, 200, 200]
    assert schema.json()["servers"] == [{"url": "/eyas"}]


def test_the_path_opens_nothing_and_hides_nothing() -> None:
    responses = send(
        ("GET", "/eyas/eyas/v1/models", KEY),
        ("GET", "/eyashealth", KEY),
        ("GET", "/eyas/v1/models", {}),
        ("POST", "/eyas/v1/completions", {}),
        ("GET", "/eyas/metrics", {}),
        **SETTINGS,
    )
    assert [each.status_code for each in responses[:3]] == [404, 404, 401]
    assert 'endpoint="/v1/completions"' in responses[-1].text  # refused requests are counted under the route's name


def test_the_path_alone_is_a_folder_from_which_the_page_loads_its_files() -> None:
    bare, asked, page = send(("GET", "/eyas", {}), ("GET", "/eyas?a=1", {}), ("GET", "/eyas/", {}), **SETTINGS)
    assert (bare.status_code, bare.headers["location"]) == (307, "/eyas/")
    assert asked.headers["location"] == "/eyas/?a=1"
    assert page.status_code != 307


def test_without_the_option_the_path_is_unknown() -> None:
    (response,) = send(("GET", "/eyas/health", {}))
    assert response.status_code == 404
