"""Requests' fields become grammars; two that contradict each other are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from eyas.errors import RequestError
from eyas.serve.tools.structured import grammar_from_request
from eyas.types import GrammarSpec

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, GrammarSpec("json_object")),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            GrammarSpec("json_schema", json.dumps(SCHEMA)),
        ),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, GrammarSpec("json_schema", json.dumps(SCHEMA))),
        ({"structured_outputs": {"json": '{"type": "null"}'}}, GrammarSpec("json_schema", '{"type": "null"}')),
        ({"structured_outputs": {"json_object": True}}, GrammarSpec("json_object")),
        ({"structured_outputs": {"json_object": False}}, None),
        ({"structured_outputs": {"regex": "a+"}}, GrammarSpec("regex", "a+")),
        ({"guided_choice": ["a", "b"]}, GrammarSpec("choice", '["a", "b"]')),
        ({"guided_grammar": "start: /a/", "guided_json": None}, GrammarSpec("lark", "start: /a/")),
    ],
)
def test_fields(fields: dict[str, Any], expected: GrammarSpec | None) -> None:
    assert grammar_from_request(**fields) == expected


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"response_format": {"type": "xml"}}, "'xml' is not supported"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "schema is missing"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag is not supported"),
        ({"guided_whitespace_pattern": "x"}, "guided_whitespace_pattern is not supported"),
        ({"json": "x"}, "json is not supported"),
        ({"guided_regex": 7}, "has to be a text"),
        ({"guided_json": {"a": {1, 2}}}, "no JSON"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format and guided_regex both"),
    ],
)
def test_what_is_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(RequestError, match=why):
        grammar_from_request(**fields)
