"""The drafter's ranking uses the sampler's own noise."""

from __future__ import annotations

import torch

from eyas.types import SamplingParams

from .emulation import PROMPT, admit_all

VOCAB = 30
PARAMS = [SamplingParams(), SamplingParams(temperature=0.7, seed=3), SamplingParams(temperature=1.0, seed=4)]


def logits_of(width: int) -> torch.Tensor:
    return 2 * torch.randn(3, width, VOCAB, generator=torch.Generator().manual_seed(0))


def test_a_perfect_drafter_proposes_what_will_be_sampled() -> None:
    sampler = admit_all(PARAMS, VOCAB)
    sampler.commit(range(3), torch.zeros(3, 4, dtype=torch.int64), torch.tensor([1, 4, 2]))
    coupling = sampler.coupling(range(3), enabled=True)
    path = sampler.path(range(3))
    logits = logits_of(4)
    for step in range(4):
        tokens = path.sample(logits[:, step])
        assert torch.equal(coupling.rank(logits, step, None)[:, step].argmax(-1), tokens)
        path.advance(tokens)


def test_values() -> None:
    logits = logits_of(2)
    for enabled in (True, False):
        rank = admit_all(PARAMS, VOCAB).coupling(range(3), enabled).rank(logits, 1, None)
        assert torch.allclose(rank.exp().sum(-1), torch.ones(3, 2))
        assert torch.equal(rank[0], logits[0].log_softmax(-1))
    assert torch.equal(rank[1], (logits[1] / 0.7).log_softmax(-1))
    assert torch.equal(rank[2], logits[2].log_softmax(-1))


def test_a_draft_vocabulary_gets_the_noise_of_its_target_ids() -> None:
    sampler = admit_all(PARAMS, VOCAB)
    ids = torch.tensor([29, 3, 4, 17])
    coupling = sampler.coupling(range(3), enabled=True)
    logits = logits_of(1)
    whole = coupling.rank(logits, 2, None)[..., ids].log_softmax(-1)
    assert torch.allclose(coupling.rank(logits[..., ids], 2, ids), whole, atol=1e-5)


def test_positions_follow_commits_and_prompts() -> None:
    sampler = admit_all(PARAMS, VOCAB)
    logits = logits_of(1)
    two_ahead = sampler.coupling(range(3), enabled=True).rank(logits, 2, None)
    sampler.commit(range(3), torch.zeros(3, 2, dtype=torch.int64), torch.full((3,), 2))
    assert torch.equal(sampler.coupling(range(3), enabled=True).rank(logits, 0, None), two_ahead)
    sampler.admit(1, PARAMS[1], [*PROMPT, 5, 6], ())
    assert torch.equal(sampler.coupling(range(3), enabled=True).rank(logits, 0, None), two_ahead)
