"""Grammars that hang or kill whoever compiles them are refused, and the next one is served."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from eyas.errors import RequestError
from eyas.serve.tools.grammar_trials import GrammarTrials
from eyas.types import GrammarSpec

from ... import pairs

pytest.importorskip("llguidance")

GOOD = GrammarSpec("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}')
ENDLESS = GrammarSpec(
    "json_schema", json.dumps({"allOf": [{"type": "string", "pattern": f".*a.{{{i}}}b.*"} for i in range(10, 30)]})
)
DEEP = GrammarSpec("lark", "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(4000)) + 'a4000: "x"\n')


@pytest.fixture
def trials() -> Iterator[GrammarTrials]:
    made = GrammarTrials(seconds=2.0)
    yield made
    made.close()


def test_hostile_grammars_break_nothing(trials: GrammarTrials) -> None:
    trials.check(pairs.tokenizer(), GOOD)
    with pytest.raises(RequestError, match="breaks the compiler"):
        trials.check(pairs.tokenizer(), DEEP)
    began = time.monotonic()
    with pytest.raises(RequestError, match="longer than 2 seconds"):
        trials.check(pairs.tokenizer(), ENDLESS)
    assert time.monotonic() - began < 30
    trials.check(pairs.tokenizer(), GrammarSpec("regex", "a+"))


def test_bad_grammars_are_told_as_ever(trials: GrammarTrials) -> None:
    with pytest.raises(RequestError, match="unclosed"):
        trials.check(pairs.tokenizer(), GrammarSpec("regex", "(a"))
    with pytest.raises(RequestError, match="can't be read"):
        trials.check(pairs.tokenizer(), GrammarSpec("json_schema", "{"))


def test_what_has_passed_isnt_tried_again(trials: GrammarTrials) -> None:
    trials.check(pairs.tokenizer(), GOOD)
    trials.close()
    trials.check(pairs.tokenizer(), GOOD)
    assert trials._child is None
