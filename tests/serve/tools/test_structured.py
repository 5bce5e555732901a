"""Requests' fields become grammars; two that contradict each other are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from eyas.errors import RequestError
from eyas.serve.tools.structured import closed_schema, grammar_from_request
from eyas.types import GrammarSpec

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}


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
        (
            {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": "[ ]?"}},
            GrammarSpec("json_schema", json.dumps(SCHEMA), "[ ]?"),
        ),
        (
            {"guided_json": SCHEMA, "guided_whitespace_pattern": ""},
            GrammarSpec("json_schema", json.dumps(SCHEMA), ""),
        ),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"whitespace_pattern": " "}},
            GrammarSpec("json_object", whitespace=" "),
        ),
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
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern applies to JSON"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "whitespace_pattern applies to JSON"),
        (
            {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " "}, "guided_whitespace_pattern": " "},
            "mean the same: send one",
        ),
        ({"json": "x"}, "json is not supported"),
        ({"guided_regex": 7}, "must be a string"),
        ({"guided_json": {"properties": {"a": {1, 2}}}}, "valid JSON"),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "response_format, guided_regex: only one of them may constrain the answer",
        ),
    ],
)
def test_what_is_refused(fields: dict[str, Any], why: str) -> None:
    with pytest.raises(RequestError, match=why):
        grammar_from_request(**fields)


A: dict[str, Any] = {"properties": {"a": {"type": "integer"}}}
CLOSED_A = {**A, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (A, CLOSED_A),
        ({**A, "additionalProperties": True}, {**A, "additionalProperties": True}),
        ({"items": A, "$defs": {"x": A}}, {"items": CLOSED_A, "$defs": {"x": CLOSED_A}}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [CLOSED_A, {"type": "null"}]}),
        (
            {"properties": {"properties": A, "enum": {"enum": [A]}}},
            {"properties": {"properties": CLOSED_A, "enum": {"enum": [A]}}, "additionalProperties": False},
        ),
    ],
)
def test_objects_get_no_properties_that_nobody_named(schema: dict[str, Any], closed: dict[str, Any]) -> None:
    before = json.dumps(schema)
    assert closed_schema(schema) == closed
    assert json.dumps(schema) == before


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**A, "required": ["b"]},
        {**A, "minProperties": 2},
        {**A, "patternProperties": {"^x": {}}},
        {"allOf": [A, {"properties": {"b": {}}}]},
        {"oneOf": [A, {"properties": {"b": {}}}]},
        {"properties": {"x": {"not": A}}},
        {**A, "anyOf": [{"properties": {"b": {}}}]},
        {**A, "$ref": "#/$defs/x"},
        {"properties": 7, "required": 8},
        {**A, "required": [["a"]]},
        [A],
    ],
)
def test_schemas_that_closing_could_contradict_stay_as_they_are(schema: Any) -> None:
    assert closed_schema(schema) == schema
