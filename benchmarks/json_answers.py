"""How much faster are answers that follow a JSON schema? Decoding by several methods, in turns, against plain decoding.

The four tasks are of the kinds that people send: data to extract, a review with a list, a long table, a tool's call.
Every answer must be the plain one's, token for token. The first turn doesn't count; the controller learns from it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from benchmarks.grammars import NUMBER, TEXT, WHOLE, list_of, object_of
from benchmarks.harness import Output, interleave, paired, report, script
from eyas.drafters.options import PREDICTION, DrafterOptions, needs_no_drafter
from eyas.engine import Engine
from eyas.options import TargetOptions
from eyas.serve.tools.structured import closed_schema
from eyas.session import Session
from eyas.text.chats import Message
from eyas.text.template import encode_chat
from eyas.types import Completion, GrammarSpec, Request, SamplingParams

PLAIN = "none"


TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "extract": (
        "Extract the data: Maria Keller, born 3 May 1984, is a freelance illustrator. She lives at Lindenweg 12, 79100 "
        "Freiburg, Germany. Answer in JSON.",
        object_of(
            full_name=TEXT,
            date_of_birth=TEXT,
            occupation=TEXT,
            employment_status={"enum": ["employed", "unemployed", "self-employed", "retired"]},
            address=object_of(street=TEXT, postal_code=TEXT, country=TEXT),
        ),
    ),
    "review": (
        "Review this: in src/app.py line 14 `eval(user_input)` runs what a user typed; in src/db.py line 88 SQL is "
        "built by concatenation; in tests/test_db.py line 3 there is an unused import. Answer in JSON.",
        object_of(
            summary=TEXT,
            severity={"enum": ["low", "medium", "high", "critical"]},
            affected_files=list_of(object_of(path=TEXT, line_number=WHOLE, suggested_change=TEXT)),
        ),
    ),
    "table": (
        "Make up a forecast for five days in Hamburg in March. Answer in JSON.",
        object_of(
            forecast=list_of(
                object_of(
                    weekday=TEXT,
                    temperature_celsius=NUMBER,
                    precipitation_probability=NUMBER,
                    wind_direction={"enum": ["north", "south", "east", "west"]},
                )
            )
        ),
    ),
    "call": (
        "Book flights for two adults from Munich to Lisbon on 2026-12-04, in business class. Answer with a JSON call.",
        object_of(
            name={"const": "search_flights"},
            arguments=object_of(
                origin_airport=TEXT,
                destination_airport=TEXT,
                departure_date=TEXT,
                number_of_passengers=WHOLE,
                cabin_class={"enum": ["economy", "business", "first"]},
            ),
        ),
    ),
}


@script
def main(
    model: str,
    *,
    methods: Annotated[Sequence[str], "what drafts; `prediction` is what a server does without a drafter"] = (
        "prediction",
        "suffix",
    ),
    draft_model: Annotated[Path | None, "for methods such as small-lm+suffix"] = None,
    tokens: Annotated[int, "the longest answer"] = 220,
    temperature: Annotated[float, "of all answers"] = 0.0,
    repeats: Annotated[int, "turns that count"] = 5,
    output: Output = None,
) -> None:
    session = Session.open(TargetOptions(model))
    engines = {PLAIN: session.engine()}
    for method in methods:
        source = None if method == PREDICTION or needs_no_drafter(method) else draft_model
        engines[method] = session.engine(session.drafter(DrafterOptions(source, method)))
    params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=3)
    rows = []
    for task, (prompt, schema) in TASKS.items():
        ids = encode_chat(session.tokenizer, [Message(role="user", content=prompt)])
        asked = Request(tuple(ids), params, grammar=GrammarSpec("json_schema", json.dumps(closed_schema(schema))))
        done = interleave({name: partial(_answer, engine, asked) for name, engine in engines.items()}, repeats)
        expected = done[PLAIN][0].token_ids
        for name, answers in done.items():
            if any(one.token_ids != expected for one in answers):
                raise SystemExit(f"{task}: {name} doesn't give plain decoding's tokens")
            ratio = paired(*([one.stats.tokens_per_second for one in side] for side in (answers, done[PLAIN])))
            length = sum(one.stats.accept_length for one in answers) / len(answers)
            rows.append(
                {"task": task, "method": name, "tokens": len(expected), "accept length": round(length, 2)} | ratio
            )
    report({"model": Path(model).name, "temperature": temperature}, output, rows)


def _answer(engine: Engine, asked: Request) -> Completion:
    [done] = engine.generate([asked])
    return done


if __name__ == "__main__":
    raise SystemExit(main())
