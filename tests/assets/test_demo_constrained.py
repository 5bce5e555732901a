"""The embedded pair held to grammars: every token is plain decoding's, and what stops is valid."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import jsonschema
import pytest

import eyas
from eyas.engine import Engine, Speculation
from eyas.tree import parse_tree
from eyas.types import GrammarSpec

from .test_demo_pair import base, requests

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
