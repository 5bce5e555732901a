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


def object_of(required: list[str] | None = None, /, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties) if required is None else required}


def list_of(items: Any, **limits: int) -> dict[str, Any]:
    return {"type": "array", "items": items, **limits}


TEXT, WHOLE, NUMBER, YES = ({"type": kind} for kind in ("string", "integer", "number", "boolean"))
MAYBE = {"anyOf": [TEXT, {"type": "null"}]}
PLACE = object_of(street=TEXT, city=TEXT, zip={"type": "string", "pattern": "^[0-9]{5}$"})
SCHEMAS: dict[str, dict[str, Any]] = {
    "answer": object_of(answer=TEXT),
    "person": object_of(name=TEXT, age=WHOLE),
    "two strings": object_of(title=TEXT, body=TEXT),
    "tags": object_of(tags=list_of(TEXT)),
    "mood": object_of(mood={"enum": ["good", "bad", "so so"]}),
    "score": object_of(score={"type": "integer", "minimum": 0, "maximum": 100}, why=TEXT),
    "place": PLACE,
    "people": object_of(people=list_of(object_of(name=TEXT, home=PLACE), maxItems=4)),
    "optional": object_of(["a"], a=TEXT, b=TEXT, c=WHOLE, d=YES, e=NUMBER),
    "nullable": object_of(name=MAYBE, note=MAYBE),
    "date": object_of(day={"type": "string", "format": "date"}, at={"type": "string", "format": "date-time"}),
    "email": object_of(to={"type": "string", "format": "email"}, subject=TEXT),
    "short": object_of(name={"type": "string", "minLength": 1, "maxLength": 40}),
    "long": object_of(text={"type": "string", "maxLength": 2000}),
    "steps": object_of(
        steps=list_of(object_of(explanation=TEXT, output=TEXT), minItems=1, maxItems=8), final_answer=TEXT
    ),
    "tree": {
        "$ref": "#/$defs/node",
        "$defs": {"node": object_of(["value"], value=WHOLE, children=list_of({"$ref": "#/$defs/node"}, maxItems=2))},
    },
    "country": object_of(country={"enum": [f"country {number}" for number in range(250)]}),
    "shapes": object_of(
        shape={"anyOf": [object_of(kind={"const": "circle"}, r=NUMBER), object_of(kind={"const": "box"}, a=NUMBER)]}
    ),
    "many fields": object_of(**{f"field_{number}": TEXT for number in range(30)}),
    "map": {"type": "object", "additionalProperties": WHOLE, "maxProperties": 6},
}
"""Twenty schemas as they are sent for structured output."""
TOOLS: dict[str, list[dict[str, Any]]] = {
    name: [{"type": "function", "function": {"name": tool, "parameters": schema}} for tool, schema in tools.items()]
    for name, tools in {
        "weather": {"get_weather": object_of(city=TEXT, unit={"enum": ["C", "F"]})},
        "search": {"search": object_of(["query"], query=TEXT, limit=WHOLE)},
        "read": {"read_file": object_of(["path"], path=TEXT, offset=WHOLE, limit=WHOLE)},
        "write": {"write_file": object_of(path=TEXT, content=TEXT)},
        "edit": {"edit_file": object_of(["path", "old", "new"], path=TEXT, old=TEXT, new=TEXT, all=YES)},
        "shell": {"bash": object_of(["command"], command=TEXT, timeout={"type": "number", "maximum": 600000})},
        "argv": {"exec": object_of(["argv"], argv=list_of(TEXT), env={"type": "object", "additionalProperties": TEXT})},
        "nothing": {"now": object_of()},
        "mail": {"send_mail": object_of(["to", "body"], to=list_of({"type": "string", "format": "email"}), body=TEXT)},
        "todo": {"todo": object_of(items=list_of(object_of(text=TEXT, state={"enum": ["open", "done"]}), maxItems=5))},
        "sql": {"query": object_of(["sql"], sql=TEXT, parameters=list_of({"anyOf": [TEXT, NUMBER, {"type": "null"}]}))},
        "http": {"fetch": object_of(["url"], url=TEXT, method={"enum": ["GET", "POST"]}, body=MAYBE)},
        "calendar": {"book": object_of(start={"type": "string", "format": "date-time"}, people=list_of(TEXT))},
        "numbers": {"add": object_of(a=NUMBER, b=NUMBER), "divide": object_of(a=NUMBER, b=NUMBER)},
        "nested": {"create": object_of(user=object_of(name=TEXT, home=PLACE), roles=list_of({"enum": ["a", "b"]}))},
        "patch": {"apply_patch": object_of(patch=TEXT)},
        "patterns": {"issue": object_of(key={"type": "string", "pattern": "^[A-Z]{2,6}-[0-9]{1,5}$"}, text=TEXT)},
        "agent": {
            "task": object_of(description=TEXT, prompt=TEXT),
            "glob": object_of(["pattern"], pattern=TEXT, path=TEXT),
            "grep": object_of(["pattern"], pattern=TEXT, path=TEXT, glob=TEXT, context=WHOLE, multiline=YES),
            "ls": object_of(path=TEXT, ignore=list_of(TEXT)),
        },
        "many optional": {"configure": object_of([], **{f"option_{number}": MAYBE for number in range(24)})},
        "forty tools": {f"tool_{number}": object_of(text=TEXT, count=WHOLE) for number in range(40)},
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
