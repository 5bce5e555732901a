"""The filters keep exactly what `transformers`' warpers keep, row by row."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from eyas.types import SamplingParams

from .emulation import admit_all

VOCAB = 50
PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0.05, 5.0),
    top_k=st.integers(0, VOCAB + 5),
    top_p=st.floats(0.001, 1.0),
    min_p=st.floats(0.0, 1.0),
)


def logits_of(seed: int, rows: int, ties: bool) -> Tensor:
    logits = 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))
    return logits.round() if ties else logits


def by_transformers(logits: Tensor, params: SamplingParams) -> Tensor:
    steps: list[LogitsProcessor] = [TemperatureLogitsWarper(params.temperature)]
    if params.top_k:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        steps.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0.0:
        steps.append(MinPLogitsWarper(params.min_p))
    for step in steps:
        logits = step(None, logits)
    return logits


@given(st.lists(PARAMS, min_size=1, max_size=4), st.integers(0, 2**31))
def test_equals_transformers(params: list[SamplingParams], seed: int) -> None:
    logits = logits_of(seed, len(params), ties=False)
    ours = admit_all(params, VOCAB).path(range(len(params))).warped(logits)
    for row, each in enumerate(params):
        assert torch.equal(ours[row : row + 1], by_transformers(logits[row : row + 1], each))


@given(PARAMS, st.integers(0, 2**31))
def test_ties_survive_as_often_as_in_transformers(params: SamplingParams, seed: int) -> None:
    """Which of the tied tokens top-p keeps is chance there (its sort isn't stable); here the later ids."""
    logits = logits_of(seed, 1, ties=True)
    ours = admit_all([params], VOCAB).path(range(1)).warped(logits)
    theirs = by_transformers(logits, params)
    assert torch.equal(ours.sort().values, theirs.sort().values)
    for value in set(ours[0].tolist()) - {-math.inf}:
        kept = ours[0, logits[0] / params.temperature == value].isfinite().tolist()
        assert kept == sorted(kept)


@given(PARAMS, st.integers(0, 2**31))
def test_a_filtered_token_is_never_sampled(params: SamplingParams, seed: int) -> None:
    rows = 64
    logits = logits_of(seed, 1, ties=False).expand(rows, -1)
    seeds = [params.model_copy(update={"seed": seed + row}) for row in range(rows)]
    path = admit_all(seeds, VOCAB).path(range(rows))
    warped = path.warped(logits)
    assert bool(warped.gather(1, path.choose(warped).unsqueeze(1)).isfinite().all())


def test_underflowing_probabilities_stay_where_top_p_is_off() -> None:
    # softmax gives token 0 exactly zero: its neighbor's top-p must not filter it in a row without
    logits = torch.tensor([[-200.0, 0.0, 1.0]]).expand(2, -1)
    params = [SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.5)]
    warped = admit_all([*params[:1], *params[1:]], 4).path(range(2))
    kept = warped.warped(torch.nn.functional.pad(logits, (0, 1))).isfinite()
    assert kept[0].all()
    assert not kept[1, 0]


def test_top_k_keeps_ties_with_the_last() -> None:
    params = [SamplingParams(temperature=1.0, top_k=2)]
    warped = admit_all(params, 4).path(range(1)).warped(torch.tensor([[1.0, 2.0, 1.0, 0.0]]))
    assert warped.isfinite().tolist() == [[True, True, True, False]]
