"""Penalties against `transformers`, a hand-written oracle, and plain decoding."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from eyas.tree import parse_tree
from eyas.types import SamplingParams
from eyas.verify import SeededWalk

from .emulation import CPU, PROMPT, TableModel, admit_all, generate

VOCAB = 12
ANSWER = st.lists(st.integers(0, VOCAB - 1), max_size=8)


def logits_of(seed: int) -> torch.Tensor:
    return 3 * torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed))


@given(st.floats(0.2, 4.0), ANSWER, st.integers(0, 2**31), st.booleans())
def test_repetition_equals_transformers(penalty: float, answer: list[int], seed: int, committed: bool) -> None:
    sampler = admit_all([SamplingParams(repetition_penalty=penalty)], VOCAB)
    path = sampler.path(range(1))
    if committed:
        sampler.commit(range(1), torch.tensor([[*answer, -1]]), torch.tensor([len(answer)]))
    else:
        for token in answer:
            path.advance(torch.tensor([token]))
    history = torch.tensor([[*PROMPT, *answer]])
    expected = RepetitionPenaltyLogitsProcessor(penalty)(history, logits_of(seed))
    assert torch.equal(path.warped(logits_of(seed)), expected)


@given(st.floats(-2, 2), st.floats(-2, 2), ANSWER, st.integers(0, 2**31))
def test_presence_and_frequency_by_hand(presence: float, frequency: float, answer: list[int], seed: int) -> None:
    params = SamplingParams(presence_penalty=presence, frequency_penalty=frequency)
    path = admit_all([params], VOCAB).path(range(1))
    for token in answer:
        path.advance(torch.tensor([token]))
    raw = logits_of(seed)[0].tolist()
    expected = [raw[token] - frequency * answer.count(token) - presence * (token in answer) for token in range(VOCAB)]
    assert path.warped(logits_of(seed))[0].tolist() == pytest.approx(expected, abs=1e-5)


def test_the_order_is_bias_repetition_counts() -> None:
    params = SamplingParams(logit_bias={1: 1.0}, repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    path = admit_all([params], 4).path(range(1))
    for token in (1, 1):
        path.advance(torch.tensor([token]))
    assert path.warped(torch.tensor([[1.0, 3.0, -1.0, 4.0]])).tolist() == [[1.0, 4 / 2 - 1.0, -2.0, 2.0]]


def test_min_tokens_hold_back_the_stop_ids() -> None:
    params = [SamplingParams(min_tokens=2, stop_token_ids=(5,)), SamplingParams(stop_token_ids=(5,))]
    sampler = admit_all(params, VOCAB)  # its eos is 0
    logits = torch.zeros(2, VOCAB)
    for committed in (0, 1, 2):
        warped = sampler.path(range(2)).warped(logits)
        banned = [token for token in range(VOCAB) if warped[0, token] == -math.inf]
        assert banned == ([0, 5] if committed < 2 else [])
        assert torch.equal(warped[1], logits[1])
        sampler.commit(range(2), torch.tensor([[3], [3]]), torch.tensor([1, 1]))
    path = admit_all(params, VOCAB).path(range(2))
    for _ in range(2):
        assert path.warped(logits)[0, 5] == -math.inf
        path.advance(torch.tensor([3, 3]))
    assert torch.equal(path.warped(logits), logits)


def test_ignore_eos_leaves_eos_free() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=(5,), ignore_eos=True)
    warped = admit_all([params], VOCAB).path(range(1)).warped(torch.zeros(1, VOCAB))
    assert (warped[0] == -math.inf).nonzero().flatten().tolist() == [5]


MIXED = [
    SamplingParams(repetition_penalty=1.5),
    SamplingParams(temperature=1.0, seed=1, frequency_penalty=0.7),
    SamplingParams(temperature=0.7, seed=2, presence_penalty=1.0, repetition_penalty=0.8, top_k=5),
    SamplingParams(temperature=1.3, seed=3, min_tokens=6, top_p=0.8),
    SamplingParams(),
    SamplingParams(temperature=0.9, seed=4, logit_bias={3: -4.0, 5: 2.0}, min_p=0.05),
]


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**20), st.sampled_from(["chain:3", "dynamic:3,3,8", "dynamic:4,2,5"]), st.booleans())
def test_speculation_sees_only_its_own_path(seed: int, tree: str, coupled: bool) -> None:
    """With every penalty on, ragged acceptance and mixed rows: equal to decoding one token at a time."""
    target = TableModel.random(VOCAB, seed)
    params = [each.model_copy(update={"seed": each.seed + seed}) for each in MIXED]
    plain, _ = generate(admit_all(params, VOCAB), SeededWalk(), target, 16)
    drafter = target.disagreeing(seed + 1)
    fast, accept_length = generate(
        admit_all(params, VOCAB), SeededWalk(), target, 16, drafter, parse_tree(tree), coupled
    )
    assert torch.equal(plain, fast)
    assert accept_length > 1.0


def test_tables_wait_for_a_request_that_needs_them() -> None:
    sampler = admit_all([SamplingParams(temperature=1.0), SamplingParams(min_tokens=0)], VOCAB)
    sampler.path(range(2)).sample(torch.zeros(2, VOCAB))
    sampler.commit(range(2), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, dtype=torch.int64))
    tables = (sampler.state.bias, sampler.state.stops, sampler.state.prompt, sampler.state.counts)
    assert tables == (None, None, None, None)
    sampler.admit(1, SamplingParams(frequency_penalty=1.0), PROMPT, ())
    path = sampler.path(range(2))
    path.advance(torch.tensor([1, 2], device=CPU))
    assert path.warped(torch.zeros(2, VOCAB)).nonzero().tolist() == [[1, 2]]
