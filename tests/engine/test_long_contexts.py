"""One row of 16k tokens beside short ones: seeded output is plain decoding's, whatever the drafter sees.

Rows outgrow the memory that there is (so the youngest is preempted and read again), and the prefix cache holds the long
prompt when it is asked for once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
import torch

from eyas.drafters.loading import drafter_of
from eyas.engine import Engine, Speculation
from eyas.targets import Target
from eyas.targets.linears import prepack_linears
from eyas.targets.native.architectures import transformers_decoder
from eyas.targets.native.library import kernels
from eyas.targets.native.linears import NativeLinear
from eyas.tree import parse_tree
from eyas.types import Completion, Limits, Request, SamplingParams

from .. import tiny

LENGTHS = {"1k": 1_000, "16k": 16_200}
ROOM = {1_000: 2_160, 16_200: 16_800}
"""Tokens that there is memory for: two long rows; or, in a cache so wide that rows have pages of their own, all as
they begin, not as they end."""
ANSWER = 200
needs_kernels = pytest.mark.skipif(kernels() is None, reason="no compiler, or neither AVX2 nor AVX-512")
contexts = pytest.mark.parametrize(
    "length", [LENGTHS["1k"], pytest.param(LENGTHS["16k"], marks=pytest.mark.slow)], ids=LENGTHS
)


def small_target(length: int, native: bool) -> Target:
    model = tiny.build_model("llama", head_dim=16, max_position_embeddings=length + 1_000)
    if not native:
        return Target(model)
    prepack_linears(model, NativeLinear)
    return Target(model, decoder=transformers_decoder(model))


def requests(length: int, temperature: float) -> list[Request]:
    prompts = tiny.prompts(20, length, 250, 9)
    params = (SamplingParams(max_tokens=ANSWER, temperature=temperature, seed=seed) for seed in range(len(prompts)))
    return [Request(tuple(prompt), one) for prompt, one in zip(prompts, params, strict=True)]


def tokens(done: Sequence[Completion]) -> list[tuple[int, ...]]:
    assert not any(one.error for one in done)
    return [tuple(one.token_ids) for one in done]


@cache
def alone(length: int, native: bool, temperature: float) -> list[tuple[int, ...]]:
    """Plain decoding, one request at a time."""
    target = small_target(length, native)
    return [tokens(Engine(target, None).generate([one]))[0] for one in requests(length, temperature)]


@pytest.mark.every(3)
@contexts
@pytest.mark.parametrize(
    ("native", "window", "temperature"),
    [
        pytest.param(True, None, 0.8, marks=needs_kernels),
        pytest.param(True, 64, 0.0, marks=(needs_kernels, pytest.mark.slow)),
        pytest.param(False, 64, 0.8, marks=pytest.mark.slow),
        pytest.param(False, None, 0.0, marks=pytest.mark.slow),
    ],
)
def test_a_long_row_beside_short_ones(length: int, native: bool, window: int | None, temperature: float) -> None:
    network = tiny.network("eagle3", head_dim=16, max_position_embeddings=length + 1_000)
    if native:
        prepack_linears(network, NativeLinear)
    drafter = drafter_of(network, network.config.taps_of(tiny.LAYERS), window)
    limits = Limits(max_running=4, max_cached_tokens=ROOM[length], prefix_tokens=2 * length, prefill_chunk=512)
    engine = Engine(
        small_target(length, native), None, Speculation(drafter, parse_tree("dynamic:3,3,8")), limits=limits
    )
    asked = requests(length, temperature)
    expected = alone(length, native, temperature)
    first = engine.generate(asked)
    assert tokens(first) == expected
    assert engine.state().preempted_total
    engine.check_invariants()
    again = engine.generate(asked[1:2])
    assert tokens(again) == expected[1:2]
    assert again[0].stats.reused_tokens > length - 64
    assert sum(one.stats.drafted_depth for one in (*first, *again))


@needs_kernels
@contexts
def test_half_precision_at_length(length: int) -> None:
    """Native passes of a token are the same bits beside any other, at any position."""
    model = tiny.build_model("llama", head_dim=16, max_position_embeddings=length + 1_000).to(torch.bfloat16)
    network = tiny.network("eagle3", head_dim=16, max_position_embeddings=length + 1_000).to(torch.bfloat16)
    for each in (model, network):
        prepack_linears(each, NativeLinear)
    target = Target(model, decoder=transformers_decoder(model))
    plain = [tokens(Engine(target, None).generate([one]))[0] for one in requests(length, 0.8)]
    drafter = drafter_of(network, network.config.taps_of(tiny.LAYERS), 64)
    engine = Engine(target, None, Speculation(drafter, parse_tree("dynamic:3,3,8")), batch_size=4)
    assert tokens(engine.generate(requests(length, 0.8))) == plain
