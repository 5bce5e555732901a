"""Targets with recurrent layers: speculation emits what plain decoding does, and that what `transformers` generates."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import Any

import pytest

from eyas.drafters.base import Drafter
from eyas.drafters.registry import WEIGHTLESS
from eyas.engine import Engine, Limits, Speculation
from eyas.targets import SlotCache
from eyas.targets.states import RecurrentStates
from eyas.targets.taps import choose_taps
from eyas.tree import parse_tree
from eyas.types import Completion, Request, SamplingParams

from .. import tiny

NAMES = [*tiny.RECURRENT, *(pytest.param(name, marks=pytest.mark.slow) for name in tiny.SELDOM_RECURRENT)]
LENGTHS = (13, 1, 20, 5, 9)  # uneven, a one-token prompt, more than there are slots
TOKENS = 14


def requests(temperature: float) -> list[Request]:
    return [
        Request(tuple(prompt), SamplingParams(max_tokens=TOKENS - 2 * (i % 2), temperature=temperature, seed=i))
        for i, prompt in enumerate(tiny.prompts(*LENGTHS))
    ]


@cache
def plain(name: str, temperature: float) -> list[list[int]]:
    """Plain answers, one after the other."""
    return tokens(Engine(tiny.target(name)).generate(requests(temperature)))


def tokens(done: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in done]


def oracle(name: str, temperature: float) -> Drafter:
    sequences = [p + a for p, a in zip(tiny.prompts(*LENGTHS), plain(name, temperature), strict=True)]
    return tiny.OracleDrafter(sequences, (0, 2, tiny.LAYERS), strict=False)


@pytest.mark.parametrize("name", NAMES)
def test_plain_decoding_is_what_transformers_generates(name: str) -> None:
    model = tiny.target(name).model
    expected = [tiny.continuation(model, list(r.prompt), r.params.max_tokens) for r in requests(0.0)]
    assert plain(name, 0.0) == expected
    assert tokens(Engine(tiny.target(name), batch_size=4).generate(requests(0.0))) == expected
    assert sum(len(set(answer)) for answer in expected) > 4 * len(expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("tree", "batch"), [("chain:4", 1), ("dynamic:4,3,8", 4), ("dynamic:4,3,8,0.1", 4)])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculation_is_plain_decoding(name: str, tree: str, batch: int, temperature: float) -> None:
    speculation = Speculation(oracle(name, temperature), parse_tree(tree))
    engine = Engine(tiny.target(name), None, speculation, batch_size=batch)
    done = engine.generate(requests(temperature))
    engine.check_invariants()
    assert tokens(done) == plain(name, temperature)
    assert all(completion.stats.accept_length > 1.2 for completion in done[2:])


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "mamba2"])
def test_a_wrong_state_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What commits another node's state than the last accepted one's emits other tokens."""
    expected, commit = plain(name, 0.0), RecurrentStates.commit

    def roots_only(states: RecurrentStates, rows: range, paths: Any) -> None:
        commit(states, rows, [path if isinstance(path, range) else path[:1] for path in paths])  # prompts are ranges

    monkeypatch.setattr(RecurrentStates, "commit", roots_only)
    speculation = Speculation(oracle(name, 0.0), parse_tree("chain:4"))
    assert tokens(Engine(tiny.target(name), None, speculation).generate(requests(0.0))) != expected


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2", "jamba"])
@pytest.mark.parametrize("tree", [None, "dynamic:3,3,8"])
def test_preempted_and_read_again_in_pieces(name: str, tree: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are read in pieces while others decode; twice all that was read is lost, and read again."""
    expected, commit, calls = plain(name, 0.8), SlotCache.commit, []

    def interrupted(*args: Any) -> None:
        calls.append(args)
        if len(calls) in (9, 17):
            raise KeyboardInterrupt
        commit(*args)

    limits = Limits(max_running=3, prefill_chunk=5, prefix_tokens=1000)
    speculation = None if tree is None else Speculation(oracle(name, 0.8), parse_tree(tree))
    engine = Engine(tiny.target(name), None, speculation, limits=limits, prefill_chunk=3)
    monkeypatch.setattr(SlotCache, "commit", interrupted)
    for request in requests(0.8):
        engine.submit(request)
    done: dict[int, list[int]] = {}
    while not engine.idle:
        with suppress(KeyboardInterrupt):
            done |= {chunk.index: chunk.completion.token_ids for chunk in engine.step() if chunk.completion}
        engine.check_invariants()
    assert [done[index] for index in range(len(expected))] == expected
    assert engine.state().preempted_total > 2
    assert engine.state().prefix_limit == 0  # prefixes would need the states of earlier positions


@pytest.mark.parametrize("method", ["ngram", "suffix", "lookahead"])
def test_methods_without_weights(method: str) -> None:
    target = tiny.target("qwen3_next")
    drafter = WEIGHTLESS[method](target)
    speculation = Speculation(drafter, parse_tree(drafter.default_tree or "chain:4"))
    done = Engine(target, None, speculation, batch_size=3).generate(requests(0.0))
    assert tokens(done) == plain("qwen3_next", 0.0)


@pytest.mark.parametrize("name", ["qwen3_next", "bamba"])
def test_eagle3_reads_taps_of_attention_layers(name: str) -> None:
    target = tiny.target(name)
    taps = choose_taps(target.config)
    speculation = Speculation(tiny.eagle3_drafter(taps), parse_tree("dynamic:4,3,8"))
    assert tokens(Engine(target, None, speculation, batch_size=4).generate(requests(0.8))) == plain(name, 0.8)
