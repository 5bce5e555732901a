"""Slots: admission, independence of rows, moving, committing."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.errors import RequestError
from eyas.types import SamplingParams
from eyas.verify import Sampler, SeededWalk

from .emulation import CPU, PROMPT, TableModel, admit_all, generate

VOCAB = 20
TOKEN = st.integers(0, VOCAB - 1)
ANY = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 7, 100]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.4]),
    frequency_penalty=st.sampled_from([0.0, -0.4]),
    logit_bias=st.dictionaries(TOKEN, st.sampled_from([-math.inf, -1.0, 3.0]), max_size=3),
    min_tokens=st.sampled_from([0, 3]),
    bad_words_ids=st.lists(st.lists(TOKEN, min_size=1, max_size=3).map(tuple), max_size=6).map(tuple),
    stop_token_ids=st.tuples(TOKEN),
    seed=st.integers(0, 2**63 - 1),
)


@given(st.lists(ANY, min_size=2, max_size=5), st.integers(0, 2**31))
def test_a_row_does_not_depend_on_its_neighbors(params: list[SamplingParams], seed: int) -> None:
    rows = len(params)
    generator = torch.Generator().manual_seed(seed)
    together = admit_all(params, VOCAB)
    alone = [admit_all([each], VOCAB) for each in params]
    for _ in range(2):
        path = together.path(range(rows), steps=2)
        paths = [each.path(range(1)) for each in alone]
        for _ in range(2):
            logits = 2 * torch.randn(rows, VOCAB, generator=generator)
            warped = path.warped(logits)
            tokens = path.sample(logits)
            for row, single in enumerate(paths):
                assert torch.equal(warped[row : row + 1], single.warped(logits[row : row + 1]))
                assert torch.equal(tokens[row : row + 1], single.sample(logits[row : row + 1]))
                single.advance(tokens[row : row + 1])
            path.advance(tokens)
        counts = torch.randint(1, 3, (rows,), generator=generator)
        emitted = torch.randint(VOCAB, (rows, 2), generator=generator)
        together.commit(range(rows), emitted, counts)
        for row, each in enumerate(alone):
            each.commit(range(1), emitted[row : row + 1], counts[row : row + 1])


@given(st.integers(0, 2**31), st.booleans())
def test_greedy_is_the_argmax_of_the_raw_logits(seed: int, ties: bool) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(seed)).bfloat16()
    logits = logits.round() if ties else logits
    # the last row makes the batch take every step
    busy = SamplingParams(
        temperature=0.5,
        top_k=3,
        top_p=0.5,
        min_p=0.1,
        repetition_penalty=2.0,
        presence_penalty=1.0,
        min_tokens=9,
    )
    filters = SamplingParams(top_k=3, top_p=0.5, min_p=0.1)
    for params in ([SamplingParams()] * 3, [SamplingParams(), filters, busy]):
        tokens = admit_all(params, VOCAB).path(range(3)).sample(logits)
        assert torch.equal(tokens[:2], logits.argmax(dim=-1)[:2])


def test_very_low_temperatures_are_greedy() -> None:
    assert admit_all([SamplingParams(temperature=1e-6)], VOCAB).needs(range(1)).plain
    cold = admit_all([SamplingParams(temperature=2e-5)], VOCAB).path(range(1))
    logits = 1000 * torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    assert torch.equal(cold.sample(logits), logits.argmax(dim=-1))


def test_seeds_and_positions_change_the_sample() -> None:
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in range(64)]
    path = admit_all(params, VOCAB).path(range(64))
    flat = torch.zeros(64, VOCAB)
    first = path.sample(flat)
    assert torch.equal(first, path.sample(flat))
    path.advance(first)
    assert len(set(first.tolist())) > 10
    assert not torch.equal(first, path.sample(flat))


def test_noise_made_ahead_is_the_noise_made_one_by_one() -> None:
    params = [SamplingParams(temperature=1.0, seed=5)] * 2
    ahead = admit_all(params, VOCAB).path(range(2), steps=5)
    single = admit_all(params, VOCAB).path(range(2))
    logits = torch.zeros(2, VOCAB)
    for step in range(7):
        if step not in (1, 5):  # sampling may skip a step
            assert torch.equal(ahead.sample(logits), single.sample(logits))
        for path in (ahead, single):
            path.advance(torch.tensor([0, 0]))


def test_moving_a_slot_moves_its_request() -> None:
    target = TableModel.random(VOCAB, seed=3)
    params = SamplingParams(
        temperature=1.0,
        seed=9,
        frequency_penalty=0.5,
        repetition_penalty=1.2,
        logit_bias={4: 1.0},
        min_tokens=4,
    )
    expected, _ = generate(admit_all([params], VOCAB), SeededWalk(), target, 8)
    sampler = admit_all([SamplingParams(), params], VOCAB)
    sampler.move(1, 0)
    sampler.admit(1, SamplingParams(temperature=0.5), PROMPT, ())
    moved, _ = generate(sampler, SeededWalk(), target, 8)
    assert torch.equal(moved[0], expected[0])


def test_a_slot_used_again_forgets_its_past() -> None:
    first = SamplingParams(frequency_penalty=2.0, repetition_penalty=3.0, logit_bias={4: 9.0}, min_tokens=5)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    for second in (
        SamplingParams(min_tokens=1),
        SamplingParams(repetition_penalty=1.1, presence_penalty=0.3),
    ):
        sampler = admit_all([first.model_copy(update={"stop_token_ids": (6,)})], VOCAB)
        sampler.commit(range(1), torch.tensor([[7, 8]]), torch.tensor([2]))
        sampler.admit(0, second, [9], (0,))
        fresh = Sampler(1, VOCAB, CPU)
        fresh.admit(0, second, [9], (0,))
        for position in range(2):
            assert torch.equal(sampler.path(range(1)).warped(logits), fresh.path(range(1)).warped(logits)), position
            for each in (sampler, fresh):
                each.commit(range(1), torch.tensor([[position]]), torch.tensor([1]))


@pytest.mark.parametrize(
    ("params", "prompt", "message"),
    [
        (SamplingParams(), (1, VOCAB), f"prompt has token id {VOCAB}"),
        (SamplingParams(), (-1, 2), "prompt has token id -1"),
        (SamplingParams(), (), "the prompt is empty"),
        (SamplingParams(stop_token_ids=(99,)), PROMPT, "stop_token_ids has token id 99"),
        (SamplingParams(logit_bias={-3: 1.0}), PROMPT, "logit_bias has token id -3"),
        (SamplingParams(logit_bias={3: math.inf}), PROMPT, "logit_bias of token 3 is inf"),
        (SamplingParams(logit_bias={3: math.nan}), PROMPT, "logit_bias of token 3 is nan"),
        (SamplingParams(logit_bias=dict.fromkeys(range(VOCAB), -math.inf)), PROMPT, "rule out every token"),
        (SamplingParams(stop_token_ids=tuple(range(1, VOCAB)), min_tokens=1), PROMPT, "rule out every token"),
        (SamplingParams(bad_words_ids=tuple((0, token) for token in range(VOCAB))), PROMPT, "rule out every token"),
        (SamplingParams(bad_words_ids=((1, VOCAB),)), PROMPT, "outside the target's vocabulary"),
    ],
)
def test_what_cannot_be_sampled_is_refused(params: SamplingParams, prompt: tuple[int, ...], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Sampler(1, VOCAB, CPU).admit(0, params, prompt, (0,))


def test_an_eos_id_outside_the_vocabulary_is_no_error() -> None:
    Sampler(1, VOCAB, CPU).admit(0, SamplingParams(min_tokens=1), PROMPT, (0, VOCAB + 7))
