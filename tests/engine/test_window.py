"""Engines whose drafter has a window: every token is the target's, and what is drafted doesn't depend on history."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch

from eyas.drafters.decoding import NetworkDrafter
from eyas.drafters.loading import drafter_of
from eyas.drafters.window.decoding import WindowPairs
from eyas.engine import Engine, Speculation
from eyas.targets import Target
from eyas.targets.linears import prepack_linears
from eyas.targets.native.architectures import transformers_decoder
from eyas.targets.native.library import kernels
from eyas.targets.native.linears import NativeLinear
from eyas.tree import parse_tree
from eyas.types import Completion, Limits, Request, SamplingParams

from .. import tiny

TREE = "dynamic:3,3,8"
LENGTHS = (190, 3, 120, 64)


def drafter(pairs: int = 12, kind: str = "eagle3") -> NetworkDrafter:
    made = tiny.network(kind)
    windowed = drafter_of(made, made.config.taps_of(tiny.LAYERS), pairs)
    assert isinstance(windowed.pairs, WindowPairs)
    return windowed


def requests(temperature: float, lengths: Sequence[int] = LENGTHS) -> list[Request]:
    params = [SamplingParams(max_tokens=24, temperature=temperature, seed=seed) for seed in range(len(lengths))]
    return [Request(tuple(p), one) for p, one in zip(tiny.prompts(*lengths), params, strict=True)]


def tokens(done: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [tuple(one.token_ids) for one in done]


@cache
def plain(temperature: float) -> list[tuple[int, ...]]:
    return tokens(Engine(tiny.quick_target(), None).generate(requests(temperature)))


@pytest.mark.parametrize(("kind", "temperature"), tiny.sample(("eagle3", "eagle1", "mla"), (0.9, 0.0)))
def test_seeded_output_is_the_target_s(kind: str, temperature: float) -> None:
    speculation = Speculation(drafter(kind=kind), parse_tree(TREE))
    engine = Engine(tiny.quick_target(), None, speculation, batch_size=3, prefill_chunk=32)
    assert tokens(engine.generate(requests(temperature))) == plain(temperature)


@pytest.mark.skipif(kernels() is None, reason="no compiler, or neither AVX2 nor AVX-512")
@pytest.mark.parametrize("temperature", [0.9, 0.0])
def test_seeded_output_is_the_target_s_in_bf16(temperature: float) -> None:
    """In native passes, where a token's results are the same bits in any pass."""
    model = tiny.build_model("llama", head_dim=16).to(torch.bfloat16)
    network = tiny.network("eagle3", head_dim=16).to(torch.bfloat16)
    for each in (model, network):
        prepack_linears(each, NativeLinear)
    target = Target(model, decoder=transformers_decoder(model))
    windowed = drafter_of(network, network.config.taps_of(tiny.LAYERS), 12)
    alone = tokens(Engine(target, None, batch_size=3).generate(requests(temperature)))
    done = Engine(target, None, Speculation(windowed, parse_tree(TREE)), batch_size=3).generate(requests(temperature))
    assert tokens(done) == alone
    assert all(one.stats.drafted_depth for one in done)


def test_preempted_sequences_draft_as_if_they_had_not_been() -> None:
    """Slots for fewer tokens than there are: sequences leave, and come back with what the prefix cache has kept."""
    params = SamplingParams(max_tokens=120, temperature=0.9, seed=1)
    asked = [Request(tuple(prompt), params) for prompt in tiny.prompts(60, 50, 70)]
    limits = Limits(max_running=3, max_cached_tokens=340, prefix_tokens=2000, prefill_chunk=32)
    engine = Engine(tiny.quick_target(), None, Speculation(drafter(), parse_tree(TREE)), limits=limits)
    answers = tokens(engine.generate(asked))
    engine.check_invariants()
    assert engine.state().preempted_total
    assert answers == tokens(Engine(tiny.quick_target(), None, batch_size=3).generate(asked))


def test_a_reused_prefix_gives_the_same_drafts() -> None:
    """Of a whole chat, of its prompt, and of a part of the prompt whose window is long gone from the slot."""
    (prompt,) = tiny.prompts(180)
    params = SamplingParams(max_tokens=16)

    def run(engine: Engine, ids: Sequence[int]) -> Completion:
        return engine.generate([Request(tuple(ids), params)])[0]

    cached = Engine(tiny.quick_target(), None, Speculation(drafter(24), parse_tree(TREE)), prefill_chunk=16)
    cached.cache_prefixes(4000)
    first = run(cached, prompt)
    for ids in (prompt, [*prompt, *first.token_ids, 7, 8, 9], [*prompt[:100], 5, 6, 7], [*prompt[:3], 9]):
        again = run(cached, ids)
        fresh = run(
            Engine(tiny.quick_target(), None, Speculation(drafter(24), parse_tree(TREE)), prefill_chunk=16), ids
        )
        assert again.token_ids == fresh.token_ids
        assert again.stats.accepted_histogram == fresh.stats.accepted_histogram
        # at most a block is read anew, and what hasn't been there before
        assert again.stats.reused_tokens >= min(len(ids), 100) - 33 or len(ids) < 100


def test_a_hole_is_read_anew() -> None:
    """A chat that leaves an answer in its middle, where nobody has saved what the drafter had read."""
    (prompt,) = tiny.prompts(40)
    params = SamplingParams(max_tokens=120)
    engine = Engine(tiny.quick_target(), None, Speculation(drafter(48), parse_tree(TREE)), prefill_chunk=8)
    engine.cache_prefixes(4000)
    answer = engine.generate([Request(tuple(prompt), params)])[0].token_ids
    ids = (*prompt, *answer[:50], 5)
    again = engine.generate([Request(ids, SamplingParams(max_tokens=20))])[0]
    assert again.stats.reused_tokens == 31  # the whole blocks of the first prompt
    fresh = Engine(tiny.quick_target(), None, Speculation(drafter(48), parse_tree(TREE)), prefill_chunk=8)
    expected = fresh.generate([Request(ids, SamplingParams(max_tokens=20))])[0]
    assert again.token_ids == expected.token_ids
    assert again.stats.accepted_histogram == expected.stats.accepted_histogram
    third = engine.generate([Request((*ids, *again.token_ids[:5]), SamplingParams(max_tokens=15))])[0]
    assert third.token_ids == expected.token_ids[5:]
    assert third.stats.reused_tokens > len(ids)  # what was missing is saved now
