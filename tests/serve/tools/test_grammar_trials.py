"""Grammars that hang or kill whoever compiles them are refused, and nobody else's wait for them."""

from __future__ import annotations

import asyncio
import json
import secrets
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from eyas.errors import QueueFullError, RequestError
from eyas.serve.tools import grammar_trials
from eyas.serve.tools.grammar_trials import GrammarChild, GrammarTrials
from eyas.types import GrammarSpec
from eyas.verify.grammar import grammar_source

from ... import pairs
from ...vocabularies import byte_level

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
    trials.compile(pairs.tokenizer(), GOOD)
    with pytest.raises(RequestError, match="breaks the compiler"):
        trials.compile(pairs.tokenizer(), DEEP)
    began = time.monotonic()
    with pytest.raises(RequestError, match="longer than 2 seconds"):
        trials.compile(pairs.tokenizer(), ENDLESS)
    assert time.monotonic() - began < 30
    trials.compile(pairs.tokenizer(), GrammarSpec("regex", "a+"))


def test_bad_grammars_are_told_as_ever(trials: GrammarTrials) -> None:
    with pytest.raises(RequestError, match="unclosed"):
        trials.compile(pairs.tokenizer(), GrammarSpec("regex", "(a"))
    with pytest.raises(RequestError, match="can't be read"):
        trials.compile(pairs.tokenizer(), GrammarSpec("json_schema", "{"))


def test_what_has_passed_isnt_tried_again(trials: GrammarTrials) -> None:
    trials.compile(pairs.tokenizer(), GOOD)
    trials.close()
    trials.compile(pairs.tokenizer(), GOOD)
    assert not any(child.running for child in trials._children)


def test_a_vocabulary_that_can_not_be_read_leaves_no_child_with_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer to the vocabulary would pass for that to the next grammar."""

    def broken(_tokenizer: Any) -> None:
        raise ValueError("no such model")

    child = GrammarChild()
    with monkeypatch.context() as patch:
        patch.setattr(grammar_trials, "vocabulary_of", broken)
        with pytest.raises(ValueError, match="no such model"):
            child.compile(pairs.tokenizer(), grammar_source(GOOD), 2.0)
    assert not child.running
    with pytest.raises(RequestError, match="breaks the compiler"):
        child.compile(pairs.tokenizer(), grammar_source(DEEP), 2.0)
    child.close()


class Child:
    """Compiles nothing; grammars with `slow` in them wait for `go`."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.compiled: list[str] = []

    def compile(self, tokenizer: Any, source: str, seconds: float) -> None:  # noqa: ARG002
        self.compiled.append(source)
        assert "slow" not in source or self.go.wait(30)

    def close(self) -> None:
        """There is no process."""


def in_time(trials: GrammarTrials, work: Callable[[Child], Coroutine[Any, Any, None]]) -> None:
    """Run it with a stand-in for both children, whose slow grammars end with it."""
    child = Child()

    async def run() -> None:
        try:
            await asyncio.wait_for(work(child), 20)
        finally:
            child.go.set()
            await asyncio.gather(*trials._waiting.values())

    for _ in trials._children:
        trials._free.get()
        trials._free.put(child)  # type: ignore[arg-type]
    asyncio.run(run())


def grammar(text: str) -> GrammarSpec:
    """One that nobody has compiled before."""
    return GrammarSpec("regex", f"{text}{secrets.token_hex(8)}")


def test_nobody_waits_for_anothers_grammars(trials: GrammarTrials) -> None:
    known = grammar("known")
    trials.compile(pairs.tokenizer(), known)

    async def ask(child: Child) -> None:
        slow = [asyncio.ensure_future(trials.check(pairs.tokenizer(), grammar("slow"), "hostile")) for _ in range(5)]
        while not child.compiled:
            await asyncio.sleep(0.001)
        await trials.check(pairs.tokenizer(), known, "hostile")
        await trials.check(pairs.tokenizer(), grammar("new"), "polite")
        assert len(child.compiled) == 2  # one slow grammar is being compiled, the client's others wait for it
        assert not any(each.done() for each in slow)
        child.go.set()
        await asyncio.gather(*slow)
        assert len(child.compiled) == 6

    in_time(trials, ask)


def test_only_so_many_grammars_of_a_client_wait(trials: GrammarTrials) -> None:
    async def ask(child: Child) -> None:
        slow = [asyncio.ensure_future(trials.check(pairs.tokenizer(), grammar("slow"), "one")) for _ in range(16)]
        while len(trials._waiting) < 16:
            await asyncio.sleep(0.001)
        with pytest.raises(QueueFullError, match="16 of this client's grammars") as caught:
            await trials.check(pairs.tokenizer(), grammar("more"), "one")
        assert caught.value.retry_after == 2.0
        await trials.check(pairs.tokenizer(), grammar("more"), "other")
        child.go.set()
        await asyncio.gather(*slow)
        await trials.check(pairs.tokenizer(), grammar("more"), "one")

    in_time(trials, ask)


def test_requests_for_one_grammar_wait_for_it_together(trials: GrammarTrials) -> None:
    spec = grammar("slow")

    async def ask(child: Child) -> None:
        asked = [asyncio.ensure_future(trials.check(pairs.tokenizer(), spec, "one")) for _ in range(40)]
        while not child.compiled:
            await asyncio.sleep(0.001)
        asked[0].cancel()  # a client that leaves takes nothing from the others
        child.go.set()
        assert await asyncio.gather(*asked[1:]) == [None] * 39
        assert len(child.compiled) == 1

    in_time(trials, ask)


def test_large_vocabularies_refuse_no_ordinary_grammar() -> None:
    """Seven milliseconds a token were the trial's own list of legal tokens."""
    schema = '{"type": "object", "properties": {"tags": {"type": "array", "items": {"type": "string"}}}}'
    child = GrammarChild()
    try:
        child.compile(byte_level(151_936), grammar_source(GrammarSpec("json_schema", schema)), 5.0)
    finally:
        child.close()


def test_a_busy_machine_refuses_no_grammar() -> None:
    """The limit is processor time: a child that waits for its turn has used none."""
    child = GrammarChild()
    child.compile(pairs.tokenizer(), grammar_source(GOOD), 1.0)
    assert child._process is not None
    child._process.send_signal(signal.SIGSTOP)
    turn = threading.Timer(1.5, child._process.send_signal, [signal.SIGCONT])
    turn.start()
    try:
        child.compile(pairs.tokenizer(), grammar_source(grammar("late")), 1.0)
    finally:
        turn.join()
        child.close()
