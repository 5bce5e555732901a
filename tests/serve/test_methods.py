"""Every method of drafting under the server: seeded answers of concurrent clients are plain decoding's."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from eyas.types import Request

from ..engine.test_methods import ALL, engine_of, plain, requests
from .conftest import client_of, run


async def _answers(method: str) -> list[dict[str, Any]]:
    """All requests, one shortly after another, to a server that runs four at a time."""

    async def answer(index: int, asked: Request) -> dict[str, Any]:
        params = asked.params
        body = {
            "model": "tiny", "prompt": list(asked.prompt), "max_tokens": params.max_tokens, "seed": params.seed,
            "temperature": params.temperature, "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        await asyncio.sleep(0.003 * index)  # one joins while others are being answered
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    async with client_of(engine_of(method, 4)) as client:
        return list(await asyncio.gather(*(answer(i, asked) for i, asked in enumerate(requests()))))


@pytest.mark.every(2)
@pytest.mark.parametrize("method", ALL)
def test_concurrent_answers_are_plain_decoding_s(method: str) -> None:
    found = run(_answers(method))
    assert [one["choices"][0]["token_ids"] for one in found] == plain()
    assert any(one["usage"]["eyas"]["accepted_by_position"] for one in found)  # something was drafted
