"""A grammar made ready for a tokenizer: llguidance compiles it, within limits, or says what is wrong with it.

What users send is hostile until proven otherwise: texts are bounded, llguidance counts what parsing costs, and its
first mask is computed here, so whoever compiles a grammar before queueing a request learns then that it can't run.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import Any

from eyas.errors import RequestError, UsageError
from eyas.types import GrammarSpec

MOST_TEXT = 1 << 16
"""Characters of a grammar."""
MOST_DEPTH = 64
"""Brackets inside brackets: parsers of nested texts recurse, and a stack that overflows takes the process along."""
WHITESPACE = r"[ \t\r\n]{1,64}"
"""Where JSON may have white space; bounded, because models can get lost in blanks."""
LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
"""llguidance's own, or less: a step of a sane grammar needs a hundredth of them."""
_KEPT = 64
"""Compiled grammars remembered, so that checking a request and running it compile once."""
_kept: OrderedDict[tuple[Any, GrammarSpec], Grammar] = OrderedDict()
_lock = Lock()


@dataclass(frozen=True)
class Grammar:
    """A compiled grammar. Its matcher stands at the beginning and is never moved: sequences take copies."""

    matcher: Any  # llguidance.LLMatcher
    vocabulary: Any  # llguidance.LLTokenizer

    @property
    def spent(self) -> bool:
        """Has it run into a limit? Its copies share an automaton that only grows."""
        matcher = self.matcher.deep_copy()
        matcher.compute_bitmask()
        failed: bool = matcher.is_error()
        return failed


def compile_grammar(tokenizer: Any, spec: GrammarSpec) -> Grammar:
    """`spec` compiled for a fast Hugging Face tokenizer; the same objects again from memory.

    RequestError says what is wrong with the grammar; UsageError that this model can't be constrained at all.
    """
    if tokenizer is None:
        raise RequestError("a grammar needs a tokenizer: the target was loaded without one")
    key = tokenizer, spec
    with _lock:
        grammar = _kept.pop(key, None)
    if grammar is None or grammar.spent:
        grammar = _compiled(*key)
    with _lock:
        _kept[key] = grammar
        if len(_kept) > _KEPT:
            _kept.popitem(last=False)
    return grammar


def grammar_source(spec: GrammarSpec) -> str:
    """What llguidance compiles. RequestError if it can't be read, or is longer or nested deeper than is taken."""
    _check_size(spec.text)
    try:
        return _SOURCES[spec.kind](spec.text)
    except ValueError as error:  # json.JSONDecodeError among them
        raise RequestError(f"the {spec.kind} grammar can't be read: {error}") from error


def _compiled(tokenizer: Any, spec: GrammarSpec) -> Grammar:
    vocabulary = _vocabulary(tokenizer)
    library, source = _library(), grammar_source(spec)
    matcher = library.LLMatcher(vocabulary, source, log_level=0, limits=library.LLParserLimits(**LIMITS))
    first = matcher.deep_copy()
    first.compute_bitmask()
    if first.is_error():
        raise RequestError(f"the {spec.kind} grammar can't be used: {first_lines(first.get_error())}")
    return Grammar(matcher, vocabulary)


@lru_cache(maxsize=1)
def executor() -> Any:
    """llguidance's threads, which compute masks while Python is free to do something else."""
    return _library().LLExecutor()


@lru_cache(maxsize=4)
def _vocabulary(tokenizer: Any) -> Any:
    """llguidance's trie of a tokenizer: about a second for a large one."""
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UsageError(f"constrained output needs a fast tokenizer, this model has {type(tokenizer).__name__}")
    from llguidance.hf import from_tokenizer

    return from_tokenizer(tokenizer)


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise UsageError("constrained output needs llguidance: pip install 'eyas[serve]'") from error
    return llguidance


def _json_schema(text: str) -> str:
    if not isinstance(json.loads(text), dict):
        raise ValueError("a schema has to be a JSON object")
    source: str = _library().LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": WHITESPACE})
    return source


def _json_object(text: str) -> str:
    if text:
        raise ValueError("json_object takes no text: use json_schema for a schema")
    return _json_schema('{"type": "object"}')


def _regex(text: str) -> str:
    source: str = _library().LLMatcher.grammar_from_regex(text)
    return source


def _lark(text: str) -> str:
    source: str = _library().LLMatcher.grammar_from_lark(text)
    return source


def lark_literal(text: str) -> str:
    """`text` as a literal of a Lark grammar: JSON's form, but without a bare DEL."""
    return json.dumps(text).replace("\x7f", "\\u007f")


def lark_marker(text: str, tokenizer: Any) -> str:
    """A mark such as `<tool_call>` as a Lark grammar has to write it: a token of its own where it is one, else text.

    llguidance takes added tokens in angle brackets for special ones, whatever the tokenizer says.
    """
    number = tokenizer.get_added_vocab().get(text)
    alone = number is not None and _vocabulary(tokenizer).is_special_token(number)
    return f"<[{number}]>" if alone else lark_literal(text)


def _choice(text: str) -> str:
    choices = json.loads(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise ValueError("give a JSON array of at least one string, none of them empty")
    # a capitalised rule is one lexeme: an automaton, where alternatives of a rule are tried side by side
    return _lark("start: CHOICE\nCHOICE: " + " | ".join(lark_literal(c) for c in choices))


_SOURCES: dict[str, Callable[[str], str]] = {
    "json_schema": _json_schema,
    "json_object": _json_object,
    "regex": _regex,
    "lark": _lark,
    "choice": _choice,
}


def _check_size(text: str) -> None:
    if len(text) > MOST_TEXT:
        raise RequestError(f"the grammar has {len(text)} characters, at most {MOST_TEXT} are taken")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError("the grammar has a lone surrogate, which is no character") from error
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth -= 1
    if deepest > MOST_DEPTH:
        raise RequestError(f"the grammar nests {deepest} brackets deep, at most {MOST_DEPTH} are taken")


def first_lines(message: str) -> str:
    """The beginning of what llguidance says, in one line."""
    return " ".join(message.replace("<non-verbose/>", "").split())[:300]
