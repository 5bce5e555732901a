"""From what OpenAI's and vLLM's clients ask for to the grammar an answer is held to.

Everything is taken in wire form: the JSON of the request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from eyas.errors import RequestError
from eyas.serve.api.schema.sampling import SamplingFields
from eyas.types import GrammarSpec

_GUIDED = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "lark",
}
"""vLLM's `structured_outputs.NAME` (and, but for json_object, `guided_NAME`) and what it is here."""


def grammar_from_request(
    response_format: Mapping[str, Any] | None = None,
    structured_outputs: Mapping[str, Any] | None = None,
    **guided: Any,
) -> GrammarSpec | None:
    """The grammar that a request's fields ask for, None if they leave the text free.

    `guided` are vLLM's older names: guided_json, guided_regex, guided_choice, guided_grammar. RequestError if two ask
    for something, or one for something unknown. Whether the grammar compiles is `compile_grammar`'s to say.
    """
    found: dict[str, GrammarSpec] = {}
    if response_format is not None and (spec := _from_response_format(response_format)) is not None:
        found["response_format"] = spec
    for name, value in (structured_outputs or {}).items():
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
        raise RequestError(f"{' and '.join(found)} both constrain the answer: send one of them")
    return next(iter(found.values()), None)


def _from_response_format(asked: Mapping[str, Any]) -> GrammarSpec | None:
    kind = asked.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return GrammarSpec("json_object")
    if kind != "json_schema":
        raise RequestError(f"response_format.type {kind!r} is not supported: use text, json_object or json_schema")
    wrapper = asked.get("json_schema")
    schema = wrapper.get("schema") if isinstance(wrapper, Mapping) else None
    if schema is None:
        raise RequestError("response_format.json_schema.schema is missing")
    return GrammarSpec("json_schema", _dump(schema))


def _from_guided(name: str, value: Any) -> GrammarSpec:
    kind = _GUIDED[name]
    if kind == "json_object":
        return GrammarSpec("json_object")
    if kind == "json_schema":
        return GrammarSpec("json_schema", value if isinstance(value, str) else _dump(value))
    if kind == "choice":
        return GrammarSpec("choice", _dump(value))
    if not isinstance(value, str):
        raise RequestError(f"{name} has to be a text")
    return GrammarSpec("regex" if kind == "regex" else "lark", value)


def _dump(value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"the schema is no JSON: {error}") from error


# What an answer must look like: out of a request's fields.


def grammar_of(asked: SamplingFields) -> GrammarSpec | None:
    """The grammar that a request's fields ask for. RequestError."""
    return grammar_from_request(
        _as_sent(getattr(asked, "response_format", None)),
        _as_sent(asked.structured_outputs),
        guided_json=asked.guided_json,
        guided_regex=asked.guided_regex,
        guided_choice=asked.guided_choice,
        guided_grammar=asked.guided_grammar,
    )


def _as_sent(part: BaseModel | None) -> dict[str, Any] | None:
    return None if part is None else part.model_dump(mode="json", by_alias=True, exclude_none=True)
