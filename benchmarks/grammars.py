"""Ordinary schemas and tools on vocabularies of every size, beside busy threads: none is refused, each answer valid.

The vocabularies are made up (`tests/vocabularies.py`) except those of the models that are named. Every grammar goes the
server's way: a trial in a child process, then the server's compiler. An answer is drawn from it token by token and must
satisfy its schema, or be read back as calls that satisfy the tools' schemas. For each vocabulary: how long a new
grammar and a token take, in milliseconds.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import jsonschema
import numpy as np

from benchmarks.harness import Output, report, script
from eyas.errors import EyasError
from eyas.serve.tools.calling import tool_call_grammar
from eyas.serve.tools.grammar_trials import GrammarTrials
from eyas.serve.tools.parser import CallPiece, ToolCallParser
from eyas.serve.tools.structured import closed_schema
from eyas.serve.tools.styles import HERMES
from eyas.targets import load_tokenizer
from eyas.types import GrammarSpec
from eyas.verify import compile_grammar
from eyas.verify.constraint import Constraint
from tests.vocabularies import byte_fallback, byte_level

_MAX_TOKENS = 4000
_ENDING = 0.35
"""How often a token with a quote or a closing bracket is preferred, without which strings never end."""


def _object(required: list[str] | None = None, /, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties) if required is None else required}


def _list(items: Any, **limits: int) -> dict[str, Any]:
    return {"type": "array", "items": items, **limits}


TEXT, WHOLE, NUMBER, YES = ({"type": kind} for kind in ("string", "integer", "number", "boolean"))
MAYBE = {"anyOf": [TEXT, {"type": "null"}]}
PLACE = _object(street=TEXT, city=TEXT, zip={"type": "string", "pattern": "^[0-9]{5}$"})
SCHEMAS: dict[str, dict[str, Any]] = {
    "answer": _object(answer=TEXT),
    "person": _object(name=TEXT, age=WHOLE),
    "two strings": _object(title=TEXT, body=TEXT),
    "tags": _object(tags=_list(TEXT)),
    "mood": _object(mood={"enum": ["good", "bad", "so so"]}),
    "score": _object(score={"type": "integer", "minimum": 0, "maximum": 100}, why=TEXT),
    "place": PLACE,
    "people": _object(people=_list(_object(name=TEXT, home=PLACE), maxItems=4)),
    "optional": _object(["a"], a=TEXT, b=TEXT, c=WHOLE, d=YES, e=NUMBER),
    "nullable": _object(name=MAYBE, note=MAYBE),
    "date": _object(day={"type": "string", "format": "date"}, at={"type": "string", "format": "date-time"}),
    "email": _object(to={"type": "string", "format": "email"}, subject=TEXT),
    "short": _object(name={"type": "string", "minLength": 1, "maxLength": 40}),
    "long": _object(text={"type": "string", "maxLength": 2000}),
    "steps": _object(steps=_list(_object(explanation=TEXT, output=TEXT), minItems=1, maxItems=8), final_answer=TEXT),
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {"node": _object(["value"], value=WHOLE, children=_list({"$ref": "#/$defs/node"}, maxItems=2))},
    },
    "country": _object(country={"enum": [f"country {number}" for number in range(250)]}),
    "shapes": _object(
        shape={"anyOf": [_object(kind={"const": "circle"}, r=NUMBER), _object(kind={"const": "box"}, a=NUMBER)]}
    ),
    "many fields": _object(**{f"field_{number}": TEXT for number in range(30)}),
    "map": {"type": "object", "additionalProperties": WHOLE, "maxProperties": 6},
}
"""Twenty schemas as they are sent for structured output."""
TOOLS: dict[str, list[dict[str, Any]]] = {
    name: [{"type": "function", "function": {"name": tool, "parameters": schema}} for tool, schema in tools.items()]
    for name, tools in {
        "weather": {"get_weather": _object(city=TEXT, unit={"enum": ["C", "F"]})},
        "search": {"search": _object(["query"], query=TEXT, limit=WHOLE)},
        "read": {"read_file": _object(["path"], path=TEXT, offset=WHOLE, limit=WHOLE)},
        "write": {"write_file": _object(path=TEXT, content=TEXT)},
        "edit": {"edit_file": _object(["path", "old", "new"], path=TEXT, old=TEXT, new=TEXT, all=YES)},
        "shell": {"bash": _object(["command"], command=TEXT, timeout={"type": "number", "maximum": 600000})},
        "argv": {"exec": _object(["argv"], argv=_list(TEXT), env={"type": "object", "additionalProperties": TEXT})},
        "nothing": {"now": _object()},
        "mail": {"send_mail": _object(["to", "body"], to=_list({"type": "string", "format": "email"}), body=TEXT)},
        "todo": {"todo": _object(items=_list(_object(text=TEXT, state={"enum": ["open", "done"]}), maxItems=5))},
        "sql": {"query": _object(["sql"], sql=TEXT, parameters=_list({"anyOf": [TEXT, NUMBER, {"type": "null"}]}))},
        "http": {"fetch": _object(["url"], url=TEXT, method={"enum": ["GET", "POST"]}, body=MAYBE)},
        "calendar": {"book": _object(start={"type": "string", "format": "date-time"}, people=_list(TEXT))},
        "numbers": {"add": _object(a=NUMBER, b=NUMBER), "divide": _object(a=NUMBER, b=NUMBER)},
        "nested": {"create": _object(user=_object(name=TEXT, home=PLACE), roles=_list({"enum": ["a", "b"]}))},
        "patch": {"apply_patch": _object(patch=TEXT)},
        "patterns": {"issue": _object(key={"type": "string", "pattern": "^[A-Z]{2,6}-[0-9]{1,5}$"}, text=TEXT)},
        "agent": {
            "task": _object(description=TEXT, prompt=TEXT),
            "glob": _object(["pattern"], pattern=TEXT, path=TEXT),
            "grep": _object(["pattern"], pattern=TEXT, path=TEXT, glob=TEXT, context=WHOLE, multiline=YES),
            "ls": _object(path=TEXT, ignore=_list(TEXT)),
        },
        "many optional": {"configure": _object([], **{f"option_{number}": MAYBE for number in range(24)})},
        "forty tools": {f"tool_{number}": _object(text=TEXT, count=WHOLE) for number in range(40)},
    }.items()
}
"""Twenty sets of tools, one of which has to be called."""


@contextmanager
def busy(threads: int) -> Iterator[None]:
    """Keep this many other threads of the machine busy."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(threads)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def draw_answer(tokenizer: Any, spec: GrammarSpec, seed: int) -> tuple[str, float]:
    """A random answer that the grammar accepts, and the seconds that a token took."""
    constraint = Constraint(compile_grammar(tokenizer, spec), [tokenizer.eos_token_id])
    draw = random.Random(seed)
    tokens = list[int]()
    endings = _endings(tokenizer)
    seconds = 0.0
    while len(tokens) < _MAX_TOKENS:
        mask, took = constraint.compute_in_background(constraint.state.matcher.deep_copy())
        began = time.thread_time()
        legal = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        ending = legal[np.isin(legal, endings)]
        preferred = ending if ending.size and draw.random() < _ENDING else legal
        token = int(preferred[draw.randrange(preferred.size)])
        if token == tokenizer.eos_token_id:
            return tokenizer.decode(tokens), seconds / max(1, len(tokens))
        if constraint.consume([token]) != 1:
            raise EyasError(constraint.error or "an illegal token")
        tokens.append(token)
        seconds += took + time.thread_time() - began
    raise EyasError(f"the answer has {_MAX_TOKENS} tokens and no end")


def _endings(tokenizer: Any) -> Any:
    signs = "@", ".", '"', "}", "]", '"}', '"]', '",', "},", "}]"
    vocabulary = tokenizer.get_vocab()
    return np.array([vocabulary[sign] for sign in signs if sign in vocabulary] + [tokenizer.eos_token_id])


def check_calls(text: str, tools: list[dict[str, Any]]) -> None:
    """Raise ValidationError unless an answer consists of calls that satisfy the tools' schemas."""
    parser = ToolCallParser(HERMES)
    pieces = [*parser.feed(text), *parser.finish()]
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
    calls: list[list[str]] = []
    for piece in pieces:
        if not isinstance(piece, CallPiece):
            raise jsonschema.ValidationError(f"text between calls: {piece.text[:50]!r}")
        if piece.name is not None:
            calls.append([piece.name, ""])
        calls[-1][1] += piece.arguments
    if not calls:
        raise jsonschema.ValidationError("no call")
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), schemas[name])


def try_all(tokenizer: Any, trials: GrammarTrials) -> dict[str, Any]:
    """Every schema and every set of tools on one vocabulary."""
    cases = {name: GrammarSpec("json_schema", json.dumps(closed_schema(schema))) for name, schema in SCHEMAS.items()}
    for name, tools in TOOLS.items():
        spec = tool_call_grammar(tools, "required", HERMES, tokenizer, parallel=False)
        assert spec is not None
        cases[f"tools: {name}"] = spec
    compiling = list[float]()
    tokens = list[float]()
    refused = dict[str, str]()
    invalid = dict[str, str]()
    for number, (name, spec) in enumerate(cases.items()):
        began = time.perf_counter()
        try:
            trials.compile(tokenizer, spec)
            compiling.append(time.perf_counter() - began)
            text, seconds = draw_answer(tokenizer, spec, number)
        except EyasError as error:
            refused[name] = str(error)
            continue
        tokens.append(seconds)
        try:
            if name in SCHEMAS:
                jsonschema.validate(json.loads(text), SCHEMAS[name])
            else:
                check_calls(text, TOOLS[name.removeprefix("tools: ")])
        except (ValueError, jsonschema.ValidationError) as error:
            invalid[name] = f"{error}: {text[:200]}"
    return {
        "tokens": len(tokenizer),
        "grammars": len(cases),
        "refused": refused,
        "invalid": invalid,
        "new_grammar_ms": round(1000 * statistics.median(compiling), 1),
        "token_ms": round(1000 * statistics.median(tokens), 3),
        "slowest_token_ms": round(1000 * max(tokens), 3),
    }


@script
def main(
    *,
    models: Annotated[tuple[str, str], "models whose vocabularies are used for about 49k and 152k"] = ("", ""),
    threads: Annotated[int, "how many other threads are busy"] = 2,
    output: Output = None,
) -> int:
    smaller, larger = models
    vocabularies: dict[str, Callable[[], Any]] = {
        "32k, byte fallback": lambda: byte_fallback(32_000),
        smaller or "49k, byte level": lambda: load_tokenizer(smaller) if smaller else byte_level(49_152),
        larger or "152k, byte level": lambda: load_tokenizer(larger) if larger else byte_level(151_936),
        "262k, byte fallback": lambda: byte_fallback(262_144),
    }
    results = {}
    with busy(threads):
        for name, make in vocabularies.items():
            trials = GrammarTrials()
            results[name] = try_all(make(), trials)
            trials.close()
            print(name, results[name], flush=True)
    held = {
        "none refused": not any(found["refused"] for found in results.values()),
        "each answer valid": not any(found["invalid"] for found in results.values()),
    }
    report({"vocabularies": results, "busy_threads": threads, "held": held}, output)
    return not all(held.values())


if __name__ == "__main__":
    raise SystemExit(main())
