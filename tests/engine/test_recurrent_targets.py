"""Targets with recurrent layers: speculation emits what plain decoding does, and that what `transformers` generates."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from eyas.drafters.base import Drafter
from eyas.drafters.loading import drafter_of
from eyas.drafters.weightless import METHODS as WEIGHTLESS
from eyas.engine import Engine, Limits, Speculation
from eyas.engine.default_tree import tree_for
from eyas.engine.prefix_cache import PrefixCache
from eyas.errors import RequestError
from eyas.targets import SlotCache, Target
from eyas.targets.native.library import kernels
from eyas.targets.states import RecurrentStates, SlotStates, StateCopies
from eyas.targets.taps import choose_taps
from eyas.tree import parse_tree
from eyas.types import Completion, Request, SamplingParams

from .. import tiny

NAMES = [*tiny.RECURRENT, *(pytest.param(name, marks=pytest.mark.slow) for name in tiny.SELDOM_RECURRENT)]
LENGTHS = (13, 1, 20, 5, 9)  # uneven, a one-token prompt, more than there are slots
TOKENS = 14
SHAPES = [("chain:4", 1), ("dynamic:4,3,8", 4), ("dynamic:4,3,8,0.1", 4)]


def requests(temperature: float) -> list[Request]:
    return [
        Request(tuple(prompt), SamplingParams(max_tokens=TOKENS - 2 * (i % 2), temperature=temperature, seed=i))
        for i, prompt in enumerate(tiny.prompts(*LENGTHS))
    ]


def target_of(name: str, kind: str) -> Target:
    return tiny.as_loaded(name, kind) if kind else tiny.target(name)


@cache
def plain(name: str, temperature: float, kind: str = "") -> list[list[int]]:
    """Plain answers, one after the other; of a `kind` of weights on native kernels, or of PyTorch's float32."""
    return tokens(Engine(target_of(name, kind)).generate(requests(temperature)))


def tokens(done: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in done]


def oracle(name: str, temperature: float, kind: str = "") -> Drafter:
    sequences = [p + a for p, a in zip(tiny.prompts(*LENGTHS), plain(name, temperature, kind), strict=True)]
    return tiny.OracleDrafter(sequences, (0, 2, tiny.LAYERS), strict=False)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", NAMES)
def test_plain_decoding_is_what_transformers_generates(name: str) -> None:
    model = tiny.target(name).model
    expected = [tiny.continuation(model, list(r.prompt), r.params.max_tokens) for r in requests(0.0)]
    assert plain(name, 0.0) == expected
    assert tokens(Engine(tiny.target(name), batch_size=4).generate(requests(0.0))) == expected
    assert sum(len(set(answer)) for answer in expected) > 4 * len(expected)


@pytest.mark.every(3)
@pytest.mark.skipif(kernels() is None, reason="there are no native passes")
@pytest.mark.parametrize("name", [*tiny.NATIVE_RECURRENT, "falcon_h1", "nemotron_h"])
def test_native_decoding_is_what_transformers_generates(name: str) -> None:
    model = tiny.as_loaded(name, "float32").model
    expected = [tiny.continuation(model, list(r.prompt), r.params.max_tokens) for r in requests(0.0)]
    assert plain(name, 0.0, "float32") == expected


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("name", "shape", "temperature"),
    [
        *tiny.sample([*tiny.RECURRENT], SHAPES, [0.0, 0.8]),
        *tiny.every_other([*tiny.SELDOM_RECURRENT], SHAPES, [0.0, 0.8], seldom=tiny.SELDOM_RECURRENT),
    ],
)
def test_speculation_is_plain_decoding(name: str, shape: tuple[str, int], temperature: float) -> None:
    tree, batch = shape
    speculation = Speculation(oracle(name, temperature), parse_tree(tree))
    engine = Engine(tiny.target(name), None, speculation, batch_size=batch)
    done = engine.generate(requests(temperature))
    engine.check_invariants()
    assert tokens(done) == plain(name, temperature)
    assert all(completion.stats.accept_length > 1.2 for completion in done[2:])


ROUNDS = [(0.0, "dynamic:4,3,8", 4), (0.8, "dynamic:4,3,8,0.1", 3), (0.8, "chain:4", 1), (0.8, "dynamic:4,3,8", 8)]
PRECISE = [
    *((name, kind) for name in tiny.NATIVE_RECURRENT for kind in ("float32", "bfloat16", "int8")),
    ("falcon_h1", "bfloat16"),
    ("nemotron_h", "int8"),
    ("jamba", "bfloat16"),
    *(pytest.param(name, kind, marks=pytest.mark.slow) for name, kind in (("mamba2", "int8"), ("mamba2", "bfloat16"))),
    pytest.param("jamba", "int8", marks=pytest.mark.slow),
]


@pytest.mark.every(7)
@pytest.mark.skipif(
    kernels() is None or tiny.DEVICE.type != "cpu", reason="elsewhere half precision is equal but for near-ties"
)
@pytest.mark.parametrize(("name", "kind"), PRECISE)
def test_speculation_is_plain_decoding_in_other_precisions(name: str, kind: str) -> None:
    """Alone and in batches, natively where there are such passes: every token."""
    native = name in (*tiny.NATIVE_RECURRENT, *tiny.SELDOM_NATIVE_RECURRENT)
    assert (target_of(name, kind).native is not None) == native
    for temperature, tree, batch in ROUNDS if native else ROUNDS[1:2]:  # modules are slow, and have a test of their own
        speculation = Speculation(oracle(name, temperature, kind), parse_tree(tree))
        done = Engine(target_of(name, kind), None, speculation, batch_size=batch).generate(requests(temperature))
        assert tokens(done) == plain(name, temperature, kind)
        assert sum(completion.stats.accept_length for completion in done) > 6


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("name", "kind"), [("qwen3_next", ""), ("lfm2", ""), ("mamba2", ""), ("qwen3_next", "float32"), ("lfm2", "float32")]
)
def test_a_wrong_state_is_seen(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What commits another node's state than the last accepted one's emits other tokens."""
    expected = plain(name, 0.0, kind)
    commit = SlotStates.commit

    def roots_only(states: SlotStates, rows: range, paths: Any) -> None:
        commit(states, rows, [path if isinstance(path, range) else path[:1] for path in paths])  # prompts are ranges

    monkeypatch.setattr(SlotStates, "commit", roots_only)
    speculation = Speculation(oracle(name, 0.0, kind), parse_tree("chain:4"))
    assert tokens(Engine(target_of(name, kind), None, speculation).generate(requests(0.0))) != expected


@pytest.mark.every(5)
@pytest.mark.parametrize(
    ("name", "kind", "tree"),
    [
        ("qwen3_5", "", None), ("lfm2", "", "dynamic:3,3,8"), ("jamba", "", "dynamic:3,3,8"), ("jamba", "", None),
        *((name, "bfloat16", tree) for name in tiny.NATIVE_RECURRENT for tree in (None, "dynamic:3,3,8")),
    ],
)  # fmt: skip
def test_preempted_and_read_again_in_pieces(
    name: str, kind: str, tree: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are read in pieces while others decode; twice all that was read is lost, and read again."""
    expected = plain(name, 0.8, kind)
    commit = SlotCache.commit
    calls = []

    def interrupted(*args: Any) -> None:
        calls.append(args)
        if len(calls) in (9, 17):
            raise KeyboardInterrupt
        commit(*args)

    limits = Limits(max_running=3, prefill_chunk=5, prefix_tokens=1000)
    speculation = None if tree is None else Speculation(oracle(name, 0.8, kind), parse_tree(tree))
    engine = Engine(target_of(name, kind), None, speculation, limits=limits, prefill_chunk=3)
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


def request_of(said: list[int] | tuple[int, ...], temperature: float, seed: int, limit: int = 30) -> Request:
    return Request(tuple(said), SamplingParams(max_tokens=limit, temperature=temperature, seed=seed))


@cache
def conversations(name: str, kind: str) -> list[tuple[list[Request], list[list[int]]]]:
    """Three turns of three conversations that share a beginning of 70 tokens; the last one asks all twice.

    A turn is what was said before, the plain answer to it (of an engine that keeps no prefixes), and something new.
    """
    (stem,) = tiny.prompts(70, seed=5)
    said = [stem + begun for begun in tiny.prompts(9, 30, 1, seed=6)]
    found = []
    for turn in range(3):
        asked = [request_of(one, 0.8, user + 10 * turn) for user, one in enumerate(said)]
        answers = tokens(Engine(target_of(name, kind), batch_size=3).generate(asked))
        found.append(([*asked, asked[-1]], [*answers, answers[-1]]))
        (new,) = tiny.prompts(4, seed=20 + turn)
        said = [one + answer + new for one, answer in zip(said, answers, strict=True)]
    return found


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("of", "tree"),
    [
        *tiny.sample([("lfm2", ""), *((name, "bfloat16") for name in tiny.NATIVE_RECURRENT)], ["dynamic:3,3,8", None]),
        *(
            pytest.param((name, ""), tree, marks=pytest.mark.slow)
            for name in ("qwen3_5", "mamba2") for tree in (None, "dynamic:3,3,8")
        ),
    ],
)  # fmt: skip
def test_prefixes_over_several_turns(of: tuple[str, str], tree: str | None) -> None:
    """Prompts begin with others', with their own earlier turns, or are the same; they are read in pieces.

    How states are kept is of the layers, and when is of the engine: each target always runs with a tree or without.
    """
    name, kind = of
    limits = Limits(max_running=2, prefill_chunk=40, prefix_tokens=4000)
    target = target_of(name, kind)
    drafter = drafter_of(tiny.eagle3_module().to(target.dtype), (0, 2, tiny.LAYERS))
    speculation = None if tree is None else Speculation(drafter, parse_tree(tree))
    engine = Engine(target, None, speculation, limits=limits, prefill_chunk=23)
    reused = []
    for asked, expected in conversations(name, kind):
        done = engine.generate(asked)
        engine.check_invariants()
        assert tokens(done) == expected
        reused.append([completion.stats.reused_tokens for completion in done])
    # who came first left no states where the others leave it; the third one finds those of the second
    assert reused[0] == [0, 0, 63, 63]
    assert reused[1] == [95, 127, 95, 95]
    assert reused[2] == [127, 159, 127, 127]


def test_the_third_to_share_a_prefix_gains_by_it() -> None:
    """The second has left a copy where the first one's way parts from its own."""
    (stem,) = tiny.prompts(70, seed=5)
    asked = [request_of(stem + rest, 0.0, 0, limit=5) for rest in tiny.prompts(40, 41, 42, seed=6)]
    done = Engine(tiny.target("lfm2"), limits=Limits(prefix_tokens=4000)).generate(asked)
    assert [completion.stats.reused_tokens for completion in done] == [0, 0, 63]
    assert tokens(done) == tokens(Engine(tiny.target("lfm2")).generate(asked))


@pytest.mark.parametrize("name", ["qwen3_5", "lfm2"])
def test_a_wrong_prefix_state_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the states that belong to a prefix the same prompt gets another answer."""
    engine = Engine(tiny.target(name), limits=Limits(prefix_tokens=4000))
    asked = [request_of(prompt, 0.0, 0) for prompt in tiny.prompts(33, 34, 65, seed=7)]
    first = tokens(engine.generate(asked))
    assert tokens(engine.generate(asked)) == first
    monkeypatch.setattr(RecurrentStates, "load", lambda *_: None)
    again = engine.generate(asked)
    assert [done.stats.reused_tokens for done in again] == [31, 31, 63]
    assert tokens(again) != first


@pytest.mark.every(2)
def test_preempted_sequences_go_on_from_copied_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all don't fit the youngest leaves its slot; what it had read comes back up to its last whole block."""
    asked = [request_of(prompt, 0.8, 0, limit=100) for prompt in tiny.prompts(30, 21, 40, seed=9)]
    expected = tokens(Engine(tiny.target("qwen3_5"), batch_size=3).generate(asked))
    loaded = []
    load = PrefixCache.load
    monkeypatch.setattr(PrefixCache, "load", lambda *args: loaded.append(load(*args)) or loaded[-1])
    speculation = Speculation(tiny.eagle3_drafter((0, 2, tiny.LAYERS)), parse_tree("chain:3"))
    limits = Limits(max_running=3, max_cached_tokens=480, prefix_tokens=4000, prefill_chunk=50)
    engine = Engine(tiny.target("qwen3_5"), None, speculation, limits=limits)
    indexes = [engine.submit(request) for request in asked]
    done: dict[int, list[int]] = {}
    while not engine.idle:
        done |= {chunk.index: chunk.completion.token_ids for chunk in engine.step() if chunk.completion}
        engine.check_invariants()
    assert [done[index] for index in indexes] == expected
    assert engine.state().preempted_total > 0
    assert max(loaded) >= 63


def test_kept_states_are_bounded() -> None:
    """Of many prefixes the states of those used last are kept; what has lost its states is read again."""
    engine = Engine(tiny.target("lfm2"), limits=Limits(prefix_tokens=100_000))
    saved_states = engine._core.runner.slots.prefixes.saved_states
    assert saved_states.max_saved > 100  # tiny states, a large limit
    saved_states.max_saved = 3
    prompts = tiny.prompts(*[40] * 5, seed=8)
    asked = [request_of(prompt, 0.0, 0, limit=9) for prompt in prompts]
    first = tokens(engine.generate(asked))
    assert len(saved_states) == 3
    again = engine.generate(asked[::-1])
    assert tokens(again) == first[::-1]
    assert [done.stats.reused_tokens for done in again] == [31, 31, 31, 0, 0]
    assert engine.generate([asked[2]])[0].stats.reused_tokens == 31  # of the first three it was used last


@pytest.mark.parametrize("method", ["ngram", "suffix", "lookahead"])
def test_methods_without_weights(method: str) -> None:
    target = tiny.as_loaded("qwen3_next", "float32")
    drafter = WEIGHTLESS[method](target)
    speculation = Speculation(drafter, tree_for(drafter, None))
    done = Engine(target, None, speculation, batch_size=3).generate(requests(0.0))
    assert tokens(done) == plain("qwen3_next", 0.0, "float32")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "dflash" else pytest.mark.slow) for kind in tiny.KINDS]
)
def test_drafters_of_every_kind(kind: str) -> None:
    drafter = tiny.drafter(kind)
    for temperature in (0.0, 0.8):
        speculation = Speculation(drafter, tree_for(drafter, None))
        done = Engine(target_of("qwen3_5", "float32"), None, speculation, batch_size=3).generate(requests(temperature))
        assert tokens(done) == plain("qwen3_5", temperature, "float32")


@pytest.mark.parametrize("name", [pytest.param("qwen3_next", marks=pytest.mark.slow), "bamba"])
def test_eagle3_reads_taps_of_attention_layers(name: str) -> None:
    target = tiny.target(name)
    taps = choose_taps(target.config)
    speculation = Speculation(tiny.eagle3_drafter(taps), parse_tree("dynamic:4,3,8"))
    assert tokens(Engine(target, None, speculation, batch_size=4).generate(requests(0.8))) == plain(name, 0.8)


def test_states_count_in_the_budget_of_cached_tokens() -> None:
    """A limit in tokens is one of memory: a slot's states, staged ones and copies count as columns."""
    asked = [request_of(prompt, 0.0, 0, limit=9) for prompt in tiny.prompts(5, 6, 7, seed=8)]
    column = 4 * 2 * 2 * 2 * 8  # bytes: two attention layers, keys and values of two heads of eight
    one = 2 * 4 * (8 * 8 * 8 + 4 * (2 * 4 * 8 + 8 * 8))  # two layers' states, and the last inputs of their convolutions
    for prefixes, copies in ((0, 2), (1000, 4)):
        beside = -(-copies * one // column)
        for limit, running in ((2 * (beside + 20), 2), (3 * (beside + 20), 3)):
            limits = Limits(max_running=3, max_cached_tokens=limit, prefix_tokens=prefixes)
            engine = Engine(tiny.target("qwen3_5"), limits=limits)
            for request in asked:
                engine.submit(request)
            engine.step()
            state = engine.state()
            assert state.running == running
            assert state.allocated_tokens <= limit
        small = Engine(tiny.target("qwen3_5"), limits=Limits(max_cached_tokens=beside + 50, prefix_tokens=prefixes))
        small.submit(request_of(asked[0].prompt, 0.0, 0, limit=45))
        with pytest.raises(RequestError, match=f"recurrent state takes as much memory as {beside} more"):
            small.submit(request_of(asked[0].prompt, 0.0, 0, limit=46))


@pytest.mark.slow
@pytest.mark.skipif(kernels() is None, reason="PyTorch's own products depend on how many tokens there are")
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", tiny.NATIVE_RECURRENT)
def test_answers_of_4096_tokens(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal to the last token, and so are the bits of the states after every 32 tokens on the way."""
    target = tiny.as_loaded(name, kind, max_position_embeddings=8192)
    prompt = tiny.prompts(20)[0]
    asked = Request(tuple(prompt), SamplingParams(max_tokens=4096, temperature=0.5, seed=3))
    keep = StateCopies.keep
    seen = dict[int, list[Tensor]]()

    def noted(copies: StateCopies, slots: Any) -> None:
        keep(copies, slots)
        seen.update({tokens: [*states.values()] for tokens, states in copies.of(0).items()})

    monkeypatch.setattr(StateCopies, "keep", noted)
    found = []
    for tree in (None, "dynamic:4,3,8"):
        seen.clear()
        drafter = (
            None if tree is None else tiny.OracleDrafter([prompt + found[0][0]], (0, 2, tiny.LAYERS), strict=False)
        )
        speculation = None if drafter is None else Speculation(drafter, parse_tree(tree or ""))
        (done,) = Engine(target, None, speculation, limits=Limits(prefix_tokens=64)).generate([asked])
        found.append((done.token_ids, dict(seen), done.stats.accept_length))
    (plain, expected, _), (speculative, states, accepted) = found
    assert len(plain) == 4096
    assert len(set(plain[-500:])) > 20  # it still wanders
    assert accepted > 2
    assert speculative == plain
    shared = expected.keys() & states.keys()
    assert len(shared) > 120
    assert all(torch.equal(a, b) for at in shared for a, b in zip(expected[at], states[at], strict=True))
