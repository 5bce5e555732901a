"""Token losses against their definitions, and hand-made gradients against numerical ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from eyas.train.loss.config import LossConfig
from eyas.train.loss.draft_loss import TeacherOutput, score_guesses

M = 5
K = 3
VD = 7
IDS = torch.tensor([1, 3, 4, 7, 8, 11, 12])
CONFIGS: list[dict[str, Any]] = [{"token": "ce"}, {"token": "kl"}, {"token": "lk"}, {"token": "lk", "kl_decay": 2.0}]


def setup() -> tuple[Tensor, TeacherOutput, Tensor]:
    torch.manual_seed(2)
    logits = torch.randn(M, K, VD, dtype=torch.float64) * 2
    p = torch.randn(M, VD, dtype=torch.float64).softmax(-1)
    covered = torch.tensor([1.0, 0.9, 0.5, 0.2, 0.7], dtype=torch.float64)
    return (
        logits,
        TeacherOutput(p, covered, torch.tensor([1, 3, 0, 12, 8])),
        torch.tensor([0.9, 0.5, 0.1], dtype=torch.float64),
    )


def defined(logits: Tensor, lesson: TeacherOutput, config: LossConfig, share: Tensor) -> Tensor:
    q = logits.softmax(-1)
    p = lesson.p.unsqueeze(1)
    cross = -(p * q.log()).sum(-1)
    entropy = -(p * p.log()).sum(-1)
    alpha = torch.minimum(p * lesson.covered[:, None, None], q).sum(-1)
    if config.token == "lk":
        mixed = share * (cross - entropy) + (1 - share) * (1 - alpha)
        return -alpha.log() if config.kl_decay is None else mixed
    return cross if config.token == "ce" else cross - entropy


@pytest.mark.parametrize("settings", CONFIGS)
def test_losses_and_gradients_are_those_of_the_definition(settings: dict[str, Any]) -> None:
    config = LossConfig(**settings)
    logits, lesson, share = setup()
    logits.requires_grad_()
    expected = defined(logits, lesson, config, share)
    found = score_guesses(logits.detach(), lesson, IDS, config, share if config.kl_decay else None, grad=True)
    torch.testing.assert_close(found.loss, expected, rtol=1e-10, atol=1e-10)
    assert found.grad is not None
    torch.testing.assert_close(found.grad, torch.autograd.grad(expected.sum(), logits)[0], rtol=1e-8, atol=1e-10)
    without = score_guesses(logits.detach(), lesson, IDS, config, share if config.kl_decay else None, grad=False)
    assert without.grad is None
    torch.testing.assert_close(without.loss, found.loss)
    torch.testing.assert_close(without.overlap, found.overlap)


def test_the_first_choice_and_the_overlap() -> None:
    logits, lesson, _ = setup()
    found = score_guesses(logits, lesson, IDS, LossConfig(), None, grad=False)
    q = logits.softmax(-1)
    for token in range(M):
        for step in range(K):
            assert found.right[token, step] == (IDS[q[token, step].argmax()] == lesson.best[token])
            full = lesson.p[token] * lesson.covered[token]
            assert found.overlap[token, step].item() == pytest.approx(torch.minimum(full, q[token, step]).sum().item())


def test_a_perfect_drafter() -> None:
    """KL is 0, and so is -log alpha; uncovered mass counts as rejected whatever the drafter does."""
    _, lesson, _ = setup()
    perfect = lesson.p.log().unsqueeze(1)
    kl = score_guesses(perfect, lesson, IDS, LossConfig(token="kl"), None, grad=True)
    assert kl.loss.abs().max() < 1e-12
    assert kl.grad is not None
    assert kl.grad.abs().max() < 1e-12
    lk = score_guesses(perfect, lesson, IDS, LossConfig(token="lk"), None, grad=True)
    torch.testing.assert_close(lk.loss[:, 0], -lesson.covered.log())


def test_no_chance_at_all_is_dear_but_finite() -> None:
    lesson = TeacherOutput(torch.tensor([[1.0, 0.0]]), torch.zeros(1), torch.zeros(1, dtype=torch.int64))
    found = score_guesses(torch.zeros(1, 1, 2), lesson, IDS, LossConfig(token="lk"), None, grad=True)
    assert found.loss.item() == pytest.approx(27.63, abs=0.01)
    assert found.grad is not None
    assert found.grad.isfinite().all()
