"""What a drafter learns from answers stays with the API key, and its user, that asked for them."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from eyas.drafters.weightless.suffix import SuffixDrafter
from eyas.session import load
from eyas.types import Limits

from ...pairs import Pair
from ..conftest import client_of, run

ONE = hashlib.sha256(b"one").hexdigest()[:16]


def rounds_of(pair: Pair, monkeypatch: pytest.MonkeyPatch, asked: list[tuple[str, str | None]]) -> list[int]:
    """The same question from each (API key, user) in turn: how many rounds its answer took."""
    engine = load(pair.model, method="suffix", tree="chain:24", limits=Limits(max_running=1))
    rounds = [0]
    draft = SuffixDrafter.draft

    def counted(*arguments: Any) -> Any:
        rounds[-1] += 1
        return draft(*arguments)

    monkeypatch.setattr(SuffixDrafter, "draft", counted)

    async def work() -> None:
        async with client_of(engine, api_keys=("one", "two")) as client:
            for key, user in asked:
                body = {"model": "tiny", "prompt": "Clips!", "max_tokens": 24, "seed": 3, "ignore_eos": True}
                headers = {"Authorization": f"Bearer {key}"}
                response = await client.post("/v1/completions", json={**body, "user": user}, headers=headers)
                assert response.status_code == 200, response.text
                rounds.append(0)

    run(work())
    return rounds[:-1]


def test_keys_and_users_share_no_answers(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [("one", None), ("two", None), ("two", f"{ONE}/"), ("two", f"../{ONE}/"), ("one", "ann"), ("one", None)]
    first, *others, again = rounds_of(pair, monkeypatch, asked)
    assert others == [first] * 4
    assert again < first / 2  # its own answer is copied
