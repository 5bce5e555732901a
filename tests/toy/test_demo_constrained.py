"""The embedded pair held to grammars: every token is plain decoding's, and what stops is valid."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest

import eyas
from eyas.engine import Engine, Speculation
from eyas.tree import parse_tree
from eyas.types import GrammarSpec

from ..serve.live import live
from .test_demo_pair import PROMPTS, base, requests

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "answer": {"type": "integer"},
        "unit": {"enum": ["pencils", "dollars", "none"]},
        "steps": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 2},
    },
    "required": ["answer", "unit", "steps"],
    "additionalProperties": False,
}
SPECS = (
    GrammarSpec("json_schema", json.dumps(SCHEMA)),
    GrammarSpec("regex", r"#### [0-9]+"),
    GrammarSpec("choice", '["yes", "no", "it depends"]'),
)


def asked(temperature: float) -> list[eyas.Request]:
    found = []
    for spec in SPECS:
        for each in requests(temperature, "plain")[:3]:
            params = each.params.model_copy(update={"max_tokens": 36})
            found.append(eyas.Request(each.prompt, params, grammar=spec))
    return found


def tokens(done: Sequence[eyas.Completion]) -> list[list[int]]:
    return [each.token_ids for each in done]


@pytest.mark.every(2)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_constrained_answers(temperature: float) -> None:
    speculation = base().speculation
    assert speculation is not None
    plain = Engine(base().target, base().tokenizer, batch_size=4).generate(asked(temperature))
    for tree in ("dynamic:5,4,15", "shared:4,4,20"):
        fast = Speculation(speculation.drafter, parse_tree(tree))
        done = Engine(base().target, base().tokenizer, fast, batch_size=4).generate(asked(temperature))
        assert tokens(done) == tokens(plain)
        assert sum(each.stats.walked for each in done) > 0
    stopped = [(r.grammar, d.text) for r, d in zip(asked(temperature), plain, strict=True) if d.finish_reason == "stop"]
    assert len(stopped) > len(plain) / 2
    for spec, text in stopped:
        if spec == SPECS[0]:
            jsonschema.validate(json.loads(text), SCHEMA)
        elif spec == SPECS[1]:
            assert re.fullmatch(SPECS[1].text, text)
        else:
            assert text in json.loads(SPECS[2].text)


class Sum(pydantic.BaseModel):
    """What clients that parse answers are given."""

    answer: int
    unit: Literal["pencils", "dollars"]


def test_clients_that_parse_answers_get_one() -> None:
    """As `parse` of openai's client and pydantic-ai's NativeOutput ask (a strict schema), and as instructor does.

    Given more than one blank between two tokens, or properties that nobody named, the pair fills its answers with them.
    """
    speculation = base().speculation
    assert speculation is not None
    engine = Engine(
        base().target, base().tokenizer, Speculation(speculation.drafter, parse_tree("chain:3")), batch_size=4
    )
    schema = {"name": "Sum", "schema": Sum.model_json_schema()}
    asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": PROMPTS[0]}], "max_tokens": 60}
    with live(engine) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        for sampling in ({"temperature": 0}, {"seed": 1}):
            (choice,) = client.chat.completions.parse(**asked, **sampling, response_format=Sum).choices
            assert isinstance(choice.message.parsed, Sum)
            loose = {"type": "json_schema", "json_schema": schema}
            (choice,) = client.chat.completions.create(**asked, **sampling, response_format=loose).choices
            assert choice.finish_reason == "stop"
            assert Sum.model_validate_json(choice.message.content or "")
