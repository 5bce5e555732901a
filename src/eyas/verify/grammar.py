"""Grammars compiled for a tokenizer by llguidance, within limits.

Grammars come from users and may be hostile: their length and nesting are bounded, llguidance limits the cost of
parsing, and the first masks are computed here, so a grammar that can't run is refused before its request is queued.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from typing import Any

import numpy as np

from eyas.errors import RequestError, UsageError
from eyas.types import GrammarSpec

MAX_CHARACTERS = 1 << 16
"""The longest grammar that is accepted."""
MAX_DEPTH = 64
"""The deepest nesting of brackets: parsers recurse, and a stack overflow would end the process."""
WHITESPACE = r"[ \t\r\n]"
"""What may separate the tokens of JSON output by default: one whitespace character.

With more allowed, small models emit blanks until their answer is cut off.
"""
LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 10_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
"""llguidance's own limits, or lower ones; a step of a reasonable grammar needs a twentieth of them."""
_TRIED_TOKENS = 3
"""Tokens to try a grammar with: an object with too many properties reaches a limit only after its first brace."""
JSON_KINDS = ("json_schema", "json_object")
"""The kinds of grammars that accept a whitespace pattern."""
_MAX_CACHED = 64
"""Compiled grammars in the cache, so that checking and running a request compile it only once."""
_cache: OrderedDict[tuple[Any, GrammarSpec], Grammar] = OrderedDict()
_lock = Lock()


@dataclass(frozen=True)
class Grammar:
    """A compiled grammar. Its matcher stays in the initial state: sequences take copies of it."""

    matcher: Any  # llguidance.LLMatcher
    vocabulary: Any  # llguidance.LLTokenizer

    @property
    def exhausted(self) -> bool:
        """Whether it has reached a limit: copies of its matcher share an automaton that only grows."""
        matcher = self.matcher.deep_copy()
        matcher.compute_bitmask()
        failed: bool = matcher.is_error()
        return failed


def compile_grammar(tokenizer: Any, spec: GrammarSpec) -> Grammar:
    """Compile `spec` for a fast Hugging Face tokenizer, or take it from the cache.

    Raises RequestError if the grammar is invalid, and UsageError if this model's output can't be constrained.
    """
    if tokenizer is None:
        raise RequestError("a grammar needs a tokenizer: the target was loaded without one")
    grammar = cached_grammar(tokenizer, spec)
    if grammar is None:
        grammar = _compile(tokenizer, spec)
        with _lock:
            _cache[tokenizer, spec] = grammar
            if len(_cache) > _MAX_CACHED:
                _cache.popitem(last=False)
    return grammar


def cached_grammar(tokenizer: Any, spec: GrammarSpec) -> Grammar | None:
    """The compiled `spec` from the cache; None if it isn't there or has reached a limit."""
    key = tokenizer, spec
    with _lock:
        grammar = _cache.get(key)
        if grammar is not None:
            _cache.move_to_end(key)
    return None if grammar is None or grammar.exhausted else grammar


def grammar_source(spec: GrammarSpec) -> str:
    """The grammar in llguidance's own syntax. Raises RequestError if it is malformed, too long or nested too deeply."""
    _check_size(spec.text)
    _check_size(spec.whitespace or "")
    if spec.whitespace is not None and spec.kind not in JSON_KINDS:
        raise RequestError(f"a whitespace pattern is for JSON only, not for a grammar of kind {spec.kind}")
    try:
        source = _SOURCES[spec.kind](spec)
    except ValueError as error:  # json.JSONDecodeError among them
        raise RequestError(f"the {spec.kind} grammar can't be read: {error}") from error
    return _with_preface(spec.preface, source) if spec.preface else source


def _with_preface(preface: str, source: str) -> str:
    """The grammar `preface`, with a grammar in llguidance's own syntax, Lark or JSON, as its rule `@answer`."""
    (answer,) = json.loads(source)["grammars"] if source.startswith("{") else [{"lark_grammar": source}]
    return json.dumps({"grammars": [{"lark_grammar": preface}, {**answer, "name": "answer"}]})


def _compile(tokenizer: Any, spec: GrammarSpec) -> Grammar:
    vocabulary = vocabulary_of(tokenizer)
    library = _library()
    source = grammar_source(spec)
    matcher = library.LLMatcher(vocabulary, source, log_level=0, limits=library.LLParserLimits(**LIMITS))
    trial = matcher.deep_copy()
    for _ in range(_TRIED_TOKENS):
        allowed = np.frombuffer(trial.compute_bitmask(), dtype=np.uint8)
        if not trial.is_error() and not trial.is_stopped():
            trial.consume_token(int(np.unpackbits(allowed, bitorder="little").argmax()))
        if trial.is_error():
            raise RequestError(f"the {spec.kind} grammar can't be used: {first_lines(trial.get_error())}")
    return Grammar(matcher, vocabulary)


@lru_cache(maxsize=1)
def executor() -> Any:
    """llguidance's thread pool, which computes masks without holding Python's lock."""
    return _library().LLExecutor()


@lru_cache(maxsize=1)
def slow_mask_executor() -> Any:
    """A pool of one thread for slow masks, so that other masks don't queue behind them."""
    return _library().LLExecutor(num_threads=1)


@lru_cache(maxsize=4)
def vocabulary_of(tokenizer: Any) -> Any:
    """llguidance's trie of a tokenizer's vocabulary; building one takes about a second for a large tokenizer.

    Raises UsageError for a slow tokenizer.
    """
    return _library().LLTokenizer(tokenizer_json(tokenizer), eos_token=tokenizer.eos_token_id)


def tokenizer_json(tokenizer: Any) -> str:
    """A fast tokenizer as its `tokenizer.json`, without padding and truncation. Raises UsageError for a slow one.

    `llguidance.hf.from_tokenizer` copies the tokenizer for this, which takes another second.
    """
    from transformers import PreTrainedTokenizerFast

    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise UsageError(f"constrained output needs a fast tokenizer, but this model has {type(tokenizer).__name__}")
    backend = tokenizer.backend_tokenizer
    text: str = backend.to_str()
    if backend.padding is None and backend.truncation is None:
        return text
    return json.dumps(json.loads(text) | {"padding": None, "truncation": None}, ensure_ascii=False)


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise UsageError("constrained output needs llguidance: pip install 'eyas[serve]'") from error
    return llguidance


def _json(spec: GrammarSpec) -> str:
    if spec.kind == "json_object" and spec.text:
        raise ValueError("json_object takes no text: use json_schema for a schema")
    schema = spec.text if spec.kind == "json_schema" else '{"type": "object"}'
    if not isinstance(json.loads(schema), dict):
        raise ValueError("a schema must be a JSON object")
    pattern = WHITESPACE if spec.whitespace is None else spec.whitespace
    options = {"whitespace_flexible": bool(pattern), "whitespace_pattern": pattern or None}
    source: str = _library().LLMatcher.grammar_from_json_schema(schema, overrides=options)
    return source


def _regex(spec: GrammarSpec) -> str:
    source: str = _library().LLMatcher.grammar_from_regex(spec.text)
    return source


def _lark(spec: GrammarSpec) -> str:
    source: str = _library().LLMatcher.grammar_from_lark(spec.text)
    return source


def lark_literal(text: str) -> str:
    """`text` as a literal of a Lark grammar: a JSON string, but with DEL escaped."""
    return json.dumps(text).replace("\x7f", "\\u007f")


def lark_marker(text: str, tokenizer: Any) -> str:
    """A marker such as `<tool_call>` in a Lark grammar: a special token if the tokenizer has it, else a literal.

    llguidance treats added tokens in angle brackets as special, whether or not the tokenizer does.
    """
    number = tokenizer.get_added_vocab().get(text)
    alone = number is not None and vocabulary_of(tokenizer).is_special_token(number)
    return f"<[{number}]>" if alone else lark_literal(text)


def _choice(spec: GrammarSpec) -> str:
    choices = json.loads(spec.text)
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise ValueError("give a JSON array of at least one string, none of them empty")
    # an upper-case rule is one lexeme, matched by an automaton; alternatives of other rules are parsed in parallel
    rules = "start: CHOICE\nCHOICE: " + " | ".join(lark_literal(c) for c in choices)
    return _lark(GrammarSpec("lark", rules))


_SOURCES: dict[str, Callable[[GrammarSpec], str]] = {
    "json_schema": _json,
    "json_object": _json,
    "regex": _regex,
    "lark": _lark,
    "choice": _choice,
}


def _check_size(text: str) -> None:
    if len(text) > MAX_CHARACTERS:
        raise RequestError(f"the grammar has {len(text)} characters, but at most {MAX_CHARACTERS} are accepted")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError("the grammar has a lone surrogate, which isn't a character") from error
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth -= 1
    if deepest > MAX_DEPTH:
        raise RequestError(f"the grammar nests {deepest} brackets deep, but at most {MAX_DEPTH} are accepted")


def first_lines(message: str) -> str:
    """The beginning of llguidance's error message, on one line."""
    return " ".join(message.replace("<non-verbose/>", "").split())[:300]
