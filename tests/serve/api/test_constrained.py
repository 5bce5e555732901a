"""Structured output through the API, over a real engine: legal answers, hostile grammars refused."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import jsonschema
import pytest

from ...engine.test_grammar import SCHEMA, TREE_SCHEMA, engine
from ..conftest import client_of
from ..tools.test_grammar_trials import DEEP

pytest.importorskip("llguidance")

BOMB = "(([ab]{1,100}){1,100}){90,100}"
"""Compiles, and becomes too complex after a few letters; it can't be complete before 90."""


def ask(*bodies: dict[str, Any]) -> list[httpx.Response]:
    """Completions, all at once."""

    async def all_of_them() -> list[httpx.Response]:
        async with client_of(engine("dynamic:4,3,8", batch=4)) as client:
            posts = [
                client.post("/v1/completions", json={"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 60, **body})
                for body in bodies
            ]
            return list(await asyncio.gather(*posts))

    return asyncio.run(all_of_them())


def test_constrained_completions() -> None:
    answers = ask(
        *({"guided_json": SCHEMA, "seed": seed, "temperature": 0.8} for seed in range(3)),
        {"structured_outputs": {"json": TREE_SCHEMA}, "seed": 1},
        {"guided_choice": ["clips", "May"], "logprobs": 2, "temperature": 0},
        {"guided_regex": BOMB, "temperature": 0, "max_tokens": 200},
        {"guided_grammar": DEEP.text},
        {"guided_regex": "(a"},
    )
    assert [each.status_code for each in answers[:5]] == [200] * 5
    stopped = 0
    for answer, schema in zip(answers, [SCHEMA] * 3 + [TREE_SCHEMA], strict=False):
        (choice,) = answer.json()["choices"]
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["text"]), schema)
            stopped += 1
    assert stopped > 0
    (choice,) = answers[4].json()["choices"]
    assert choice["text"] in ("clips", "May")
    assert choice["finish_reason"] == "stop"
    assert "".join(choice["logprobs"]["tokens"]) == choice["text"]
    for answer, why in zip(answers[5:], ["limit of llguidance", "breaks the compiler", "unclosed"], strict=True):
        assert answer.status_code == 400
        assert why in answer.json()["error"]["message"]
