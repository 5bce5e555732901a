"""Grammars are compiled, or refused with a reason; and what they allow is what they say."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.errors import RequestError, UsageError
from eyas.types import GrammarSpec, Request, SamplingParams
from eyas.verify import compile_grammar, grammar_of
from eyas.verify.constraint import Constraint, end_tokens
from eyas.verify.grammar import tokenizer_json, vocabulary_of

from .. import pairs

pytest.importorskip("llguidance")


def tokens(text: str) -> list[int]:
    ids: list[int] = pairs.tokenizer()(text, add_special_tokens=False)["input_ids"]
    return ids


def constraint(spec: GrammarSpec) -> Constraint:
    grammar = compile_grammar(pairs.tokenizer(), spec)
    return Constraint(grammar, [pairs.tokenizer().eos_token_id])


def test_padding_and_truncation_leave_the_vocabulary_alone() -> None:
    """A grammar's forced tokens would be cut off, or followed by padding."""
    cut = copy.deepcopy(pairs.tokenizer())
    cut.backend_tokenizer.enable_truncation(2)
    cut.backend_tokenizer.enable_padding(length=9)
    assert json.loads(tokenizer_json(cut)) == json.loads(tokenizer_json(pairs.tokenizer()))
    text = "Natalia sold 48/2 clips in May."
    assert vocabulary_of(cut).tokenize_str(text) == tokens(text)
    assert cut.backend_tokenizer.truncation is not None


CHOICES = ["yes", 'n"o', "é\n", "yes, sir"]
SPECS: dict[str, tuple[GrammarSpec, list[str], list[str]]] = {
    "schema": (
        GrammarSpec("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'),
        ['{"a": 1}', '{ "a"\n:\t-20 , "more":\r[ null ] }'],
        ['{"a": "x"}', "{}", "[1]", '{"a":  1}', '{\n\t"a": 1}', ' {"a": 1}', '{"a": 1} '],
    ),
    "wider": (
        GrammarSpec("json_object", whitespace="[ \n]{1,3}"),
        ['{"a":1}', '{\n  "a":   1 }'],
        ['{\n   "a": 1}', '{\t"a": 1}'],
    ),
    "no space": (GrammarSpec("json_object", whitespace=""), ['{"a":[1,2]}'], ['{"a": [1,2]}', '{"a":[1, 2]}']),
    "object": (GrammarSpec("json_object"), ["{}", '{"x": {"y": [1.5e3, "\\n", "é"]}}'], ["[]", '"x"', "{x}"]),
    "regex": (GrammarSpec("regex", r"(/[a-z]+)+|\d{2}"), ["/usr/lib", "12"], ["usr", "1", "/usr/"]),
    "choice": (GrammarSpec("choice", json.dumps(CHOICES)), CHOICES, ["ye", "no"]),
    "lark": (GrammarSpec("lark", 'start: "a" pair*\npair: "(" pair* ")"\n'), ["a", "a(()())()"], ["", "a(", "a)"]),
}


@pytest.mark.parametrize("name", SPECS)
def test_what_is_accepted(name: str) -> None:
    spec, good, bad = SPECS[name]
    end = pairs.tokenizer().eos_token_id
    for text in good:
        ids = [*tokens(text), end]
        assert constraint(spec).consume(ids) == len(ids), text
    for text in bad:
        followed = constraint(spec)
        ids = [*tokens(text), end]
        assert followed.consume(ids) < len(ids), text
        assert followed.error


def test_what_follows_the_end_is_not_looked_at() -> None:
    followed = constraint(GrammarSpec("choice", '["a"]'))
    end = pairs.tokenizer().eos_token_id
    assert followed.consume([*tokens("a"), end, 7, end]) == len(tokens("a")) + 3
    assert followed.error is None


def test_choices_are_many() -> None:
    """One automaton: thousands of alternatives cost nothing to follow."""
    choices = [f"{i:04d}" for i in range(3000)]
    followed = constraint(GrammarSpec("choice", json.dumps(choices)))
    assert followed.consume(tokens("2987")) == len(tokens("2987"))


@given(st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=6), min_size=1, max_size=4))
@settings(max_examples=50)
def test_any_text_can_be_a_choice(choices: list[str]) -> None:
    spec = GrammarSpec("choice", json.dumps(choices))
    for choice in choices:
        ids = [*tokens(choice), pairs.tokenizer().eos_token_id]
        assert constraint(spec).consume(ids) == len(ids)


REFUSED: dict[str, tuple[GrammarSpec, str]] = {
    "no JSON": (GrammarSpec("json_schema", "{"), "can't be read"),
    "no schema": (GrammarSpec("json_schema", "[]"), "JSON object"),
    "unknown type": (GrammarSpec("json_schema", '{"type": "thing"}'), "thing"),
    "unknown keyword": (GrammarSpec("json_schema", '{"type": "array", "uniqueItems": true}'), "uniqueItems"),
    "remote": (GrammarSpec("json_schema", '{"$ref": "http://127.0.0.1/x"}'), "does not fetch"),
    "nothing fits": (GrammarSpec("json_schema", '{"type": "string", "minLength": 3, "maxLength": 2}'), "Unsatisfiable"),
    "endless": (GrammarSpec("json_schema", '{"$ref": "#"}'), "can't be used"),
    "regex": (GrammarSpec("regex", "(a"), "unclosed"),
    "look-around": (GrammarSpec("regex", "(?=a)b"), "look-around"),
    "back-reference": (GrammarSpec("regex", r"(a)\1"), "backreferences"),
    "lark": (GrammarSpec("lark", "begin: /a/"), "start"),
    "no choice": (GrammarSpec("choice", "[]"), "at least one"),
    "choice of numbers": (GrammarSpec("choice", "[1]"), "array"),
    "no list of choices": (GrammarSpec("choice", '"yes"'), "array"),
    "object with text": (GrammarSpec("json_object", "{}"), "takes no text"),
    "white space of no JSON": (GrammarSpec("regex", "a", " "), "for JSON only"),
    "white space that is no expression": (GrammarSpec("json_object", whitespace="("), "unclosed"),
    "long white space": (GrammarSpec("json_object", whitespace=" " * 70_000), "70000 characters"),
    "long": (GrammarSpec("regex", "a" * 70_000), "70000 characters"),
    "deep": (GrammarSpec("json_schema", "[" * 30_000), "30000 brackets deep"),
    "deep groups": (GrammarSpec("regex", "(" * 5000 + "a" + ")" * 5000), "5000 brackets deep"),
    "surrogate": (GrammarSpec("regex", "a\ud800"), "surrogate"),
    "doubling": (
        GrammarSpec("lark", "start: A0\n" + "".join(f"A{i}: A{i + 1} A{i + 1}\n" for i in range(40)) + 'A40: "x"'),
        "too big",
    ),
    "large factor": (GrammarSpec("json_schema", '{"type": "integer", "multipleOf": 999999937}'), "fuel"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    spec, why = REFUSED[name]
    with pytest.raises(RequestError, match=re.escape(why)) as caught:
        compile_grammar(pairs.tokenizer(), spec)
    assert spec.kind in str(caught.value) or "the grammar" in str(caught.value)
    assert len(str(caught.value)) < 500


def test_limits_are_hit_while_following_not_hung() -> None:
    followed = constraint(GrammarSpec("regex", "((a{1,100}){1,100}){1,100}"))
    assert followed.consume(tokens("a" * 400)) < 400
    assert followed.error
    assert "lexer" in followed.error


def test_compiled_once() -> None:
    spec = GrammarSpec("regex", "abc")
    assert compile_grammar(pairs.tokenizer(), spec) is compile_grammar(pairs.tokenizer(), spec)


def test_a_tokenizer_is_needed() -> None:
    with pytest.raises(RequestError, match="tokenizer"):
        compile_grammar(None, GrammarSpec("json_object"))
    with pytest.raises(UsageError, match="fast tokenizer"):
        compile_grammar(object(), GrammarSpec("json_object"))


def end_ids(params: SamplingParams, eos_ids: list[int], vocab_size: int = 10_000) -> Any:
    return end_tokens(compile_grammar(pairs.tokenizer(), GrammarSpec("json_object")), params, eos_ids, vocab_size)


def test_ends() -> None:
    special = pairs.tokenizer().convert_tokens_to_ids("<|user|>")
    text = tokens("a")[0]
    assert end_ids(SamplingParams(), [1, 99_999]) == {1}
    assert end_ids(SamplingParams(stop_token_ids=(special, text)), [1]) == {1, special}
    assert end_ids(SamplingParams(stop_token_ids=(special,)), []) == {special}
    with pytest.raises(RequestError, match="end token"):
        end_ids(SamplingParams(stop_token_ids=(text,)), [])
    with pytest.raises(RequestError, match="ignore_eos"):
        end_ids(SamplingParams(ignore_eos=True), [1])
    assert grammar_of(Request((1,)), None, [], 10) is None


def test_an_object_of_too_many_properties_is_refused_at_once() -> None:
    """Not by an answer that ends with an error."""
    properties = {f"p{number}": {"type": "string"} for number in range(1200)}
    schema = json.dumps({"type": "object", "properties": properties})
    with pytest.raises(RequestError, match="the json_schema grammar can't be used: "):
        compile_grammar(pairs.tokenizer(), GrammarSpec("json_schema", schema))
