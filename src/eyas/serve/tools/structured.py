"""Structured output: the grammar that an answer must satisfy, from OpenAI's and vLLM's request fields."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from eyas.errors import RequestError
from eyas.serve.schema.request import GenerationRequest
from eyas.types import GrammarSpec
from eyas.verify.grammar import JSON_KINDS

_UNCLEAR = frozenset("allOf oneOf not if dependentSchemas unevaluatedProperties".split())
"""Keywords that prevent closing an object without looking at the rest of the schema."""
_GUIDED = {"json": "json_schema", "json_object": "json_object", "regex": "regex", "choice": "choice", "grammar": "lark"}
"""NAME in vLLM's `structured_outputs.NAME`, or in `guided_NAME` except for `json_object` -> kind of GrammarSpec."""


def requested_grammar(body: GenerationRequest) -> GrammarSpec | None:
    """The grammar that a body asks for; None if it leaves the text free. Raises RequestError if it asks for two."""
    return grammar_from_request(
        _as_json(getattr(body, "response_format", None)),
        _as_json(body.structured_outputs),
        guided_json=body.guided_json,
        guided_regex=body.guided_regex,
        guided_choice=body.guided_choice,
        guided_grammar=body.guided_grammar,
        guided_whitespace_pattern=body.guided_whitespace_pattern,
    )


def grammar_from_request(
    response_format: Mapping[str, Any] | None = None, structured_outputs: Mapping[str, Any] | None = None, **guided: Any
) -> GrammarSpec | None:
    """The grammar that these fields, as JSON, ask for; None if they leave the text free.

    `guided` are vLLM's older names: guided_json, guided_regex, guided_choice, guided_grammar. A whitespace pattern
    goes with any field that asks for JSON. Raises RequestError if two fields ask for a grammar, or one for an unknown
    kind; `compile_grammar` checks whether it compiles.
    """
    structured_outputs = dict(structured_outputs or {})
    patterns = {
        "structured_outputs.whitespace_pattern": structured_outputs.pop("whitespace_pattern", None),
        "guided_whitespace_pattern": guided.pop("guided_whitespace_pattern", None),
    }
    found: dict[str, GrammarSpec] = {}
    if response_format is not None and (spec := _from_response_format(response_format)) is not None:
        found["response_format"] = spec
    for name, value in structured_outputs.items():
        if name not in _GUIDED:
            raise RequestError(f"structured_outputs.{name} is not supported: use one of {', '.join(_GUIDED)}")
        if value is not None and value is not False:
            found[f"structured_outputs.{name}"] = _from_guided(name, value)
    for name, value in guided.items():
        short = name.removeprefix("guided_")
        if short == name or short not in _GUIDED or short == "json_object":
            raise RequestError(f"{name} is not supported")
        if value is not None:
            found[name] = _from_guided(short, value)
    if len(found) > 1:
        raise RequestError(f"{', '.join(found)}: only one of them may constrain the answer")
    return _with_whitespace(next(iter(found.values()), None), patterns)


def _with_whitespace(spec: GrammarSpec | None, patterns: Mapping[str, str | None]) -> GrammarSpec | None:
    given = {name: pattern for name, pattern in patterns.items() if pattern is not None}
    if len(given) > 1:
        raise RequestError(f"{' and '.join(given)} mean the same: send one of them")
    for name, pattern in given.items():
        if spec is None or spec.kind not in JSON_KINDS:
            raise RequestError(f"{name} applies to JSON: send it with a schema or json_object, or leave it out")
        spec = replace(spec, whitespace=pattern)
    return spec


def _from_response_format(response_format: Mapping[str, Any]) -> GrammarSpec | None:
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return GrammarSpec("json_object")
    if kind != "json_schema":
        raise RequestError(f"response_format.type {kind!r} is not supported: use text, json_object or json_schema")
    wrapper = response_format.get("json_schema")
    schema = wrapper.get("schema") if isinstance(wrapper, Mapping) else None
    if schema is None:
        raise RequestError("response_format.json_schema.schema is missing")
    return GrammarSpec("json_schema", _dump(closed_schema(schema)))


def _from_guided(name: str, value: Any) -> GrammarSpec:
    kind = _GUIDED[name]
    if kind == "json_object":
        return GrammarSpec("json_object")
    if kind == "json_schema":
        return GrammarSpec(
            "json_schema", _closed_text(value) if isinstance(value, str) else _dump(closed_schema(value))
        )
    if kind == "choice":
        return GrammarSpec("choice", _dump(value))
    if not isinstance(value, str):
        raise RequestError(f"{name} must be a string")
    return GrammarSpec("regex" if kind == "regex" else "lark", value)


def closed_schema(schema: Any) -> Any:
    """Forbid unlisted properties in every object that lists some and says nothing about others.

    xgrammar (in vLLM and SGLang) and llama.cpp do so too, since small models keep inventing properties. What satisfies
    the closed schema satisfies the given one. A schema whose combinations this could contradict is returned as it is.
    """
    for part in _subschemas(schema):
        if part.keys() & _UNCLEAR or ("properties" in part and part.keys() & {"anyOf", "$ref"}):
            return schema
    closed = json.loads(_dump(schema))
    for part in _subschemas(closed):
        if _lists_all(part):
            part.setdefault("additionalProperties", False)
    return closed


def _lists_all(part: dict[str, Any]) -> bool:
    """Whether an object needs no properties beyond those it lists; False also for an invalid schema."""
    named = part.get("properties")
    required = part.get("required", [])
    if not isinstance(named, dict) or not named or not isinstance(required, list):
        return False
    asks_more = "minProperties" in part or "patternProperties" in part
    return not asks_more and all(isinstance(each, str) and each in named for each in required)


def _subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and all schemas inside it, but no lookalikes: values of enum, const, default and examples."""
    if not isinstance(schema, dict):
        return
    yield schema
    inside = [schema.get(name) for name in ("items", "additionalProperties")]
    for name in ("properties", "patternProperties", "$defs", "definitions"):
        inside += schema[name].values() if isinstance(schema.get(name), dict) else ()
    for name in ("anyOf", "prefixItems"):
        inside += schema[name] if isinstance(schema.get(name), list) else ()
    for each in inside:
        yield from _subschemas(each)


def _closed_text(text: str) -> str:
    try:
        return _dump(closed_schema(json.loads(text)))
    except (ValueError, RecursionError):  # compiling it will refuse it with the reason
        return text


def _dump(value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the schema isn't valid JSON: {error}") from error


def _as_json(part: BaseModel | None) -> dict[str, Any] | None:
    return None if part is None else part.model_dump(mode="json", by_alias=True, exclude_none=True)
