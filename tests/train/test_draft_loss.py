"""The loss against a token-by-token oracle: which rows count, and what they are compared with."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from eyas.train import draft_loss
from eyas.train.draft_loss import Scores, accept_lengths, score, teach

B, S, H, V, STEPS = 2, 9, 5, 12, 3
IDS = torch.tensor([1, 3, 4, 7, 8, 11])


def setup() -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:
    torch.manual_seed(1)
    head, draft_head = torch.randn(V, H), torch.randn(len(IDS), H)
    final, states = torch.randn(B, S, H), [torch.randn(B, S, H, requires_grad=True) for _ in range(STEPS)]
    mask = torch.zeros(B, S, dtype=torch.bool)
    mask[0, 3:6] = mask[0, 8:] = mask[1, 1:4] = True
    return head, draft_head, final, mask, states


@pytest.mark.parametrize("elements", [2**24, 24])
def test_scores_match_the_oracle(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_loss, "CHUNK_ELEMENTS", elements)  # the second is small enough to recompute chunks
    head, draft_head, final, mask, states = setup()
    teacher = teach(lambda x: x @ head.T, final, mask, IDS, V)
    for step in range(STEPS):
        found = score(lambda x: x @ draft_head.T, states[step], teacher, step, IDS)
        loss, right, overlap = torch.zeros(()), [], []
        for b in range(B):
            for row in range(S):
                predicted = row + 2 + step
                if predicted >= S or not mask[b, predicted]:
                    continue
                full = (final[b, row + 1 + step] @ head.T).softmax(-1)
                q = (states[step][b, row] @ draft_head.T).softmax(-1)
                loss = loss - (full[IDS] / full[IDS].sum() * q.log()).sum()
                overlap.append(torch.minimum(full[IDS], q).sum().item())
                right.append(bool(IDS[q.argmax()] == full.argmax()))
        torch.testing.assert_close(found.loss, loss)
        assert sorted(found.right.tolist()) == sorted(right)
        assert sorted(found.overlap.tolist()) == pytest.approx(sorted(overlap), abs=1e-6)
        ours = torch.autograd.grad(found.loss, states[step], retain_graph=True)[0]
        torch.testing.assert_close(ours, torch.autograd.grad(loss, states[step])[0])


def test_the_first_answer_token_is_trained_and_position_one_never_is() -> None:
    head, draft_head, final, mask, states = setup()
    teacher = teach(lambda x: x @ head.T, final, mask, IDS, V)
    found = score(lambda x: x @ draft_head.T, states[0], teacher, 0, IDS)
    predicted = set(zip(teacher.chat[found.rows].tolist(), (teacher.position[found.rows] + 1).tolist(), strict=True))
    assert predicted == {(0, 3), (0, 4), (0, 5), (0, 8), (1, 2), (1, 3)}  # (1, 1) has no pair before it


def test_a_batch_without_answers_scores_nothing() -> None:
    head, draft_head, final, mask, states = setup()
    teacher = teach(lambda x: x @ head.T, final, mask & False, IDS, V)
    found = score(lambda x: x @ draft_head.T, states[0], teacher, 0, IDS)
    assert found.loss.item() == 0
    assert len(accept_lengths(teacher, [found])) == 0


def test_accept_length_counts_unbroken_runs() -> None:
    """Answer tokens 2..6 of one chat; rows 0..4 start chains of up to three guesses."""
    mask = torch.zeros(1, 7, dtype=torch.bool)
    mask[0, 2:] = True
    teacher = teach(lambda x: x, torch.zeros(1, 7, V), mask, IDS, V)
    right = {0: [1, 1, 0, 1, 1], 1: [1, 0, 1, 1, 0], 2: [1, 1, 1, 0, 0]}  # step -> row 0..4
    scores = []
    for step, by_row in right.items():
        rows = (teacher.position >= 1 + step).nonzero().squeeze(1)
        own = teacher.position[rows] - 1 - step
        scores.append(Scores(rows, torch.zeros(()), torch.tensor(by_row)[own].bool(), torch.zeros(len(rows))))
    # row 0 runs 3, row 1 stops after 1, row 2 at once, row 3 has two tokens left, both right, row 4 one
    assert accept_lengths(teacher, scores).tolist() == [4, 2, 1, 3, 2]


def test_uniform_models_overlap_by_the_covered_mass() -> None:
    mask = torch.zeros(1, 4, dtype=torch.bool)
    mask[0, 2:] = True
    teacher = teach(lambda x: x, torch.zeros(1, 4, V), mask, IDS, V)
    found = score(lambda x: x, torch.zeros(1, 4, len(IDS)), teacher, 0, IDS)
    assert found.overlap.tolist() == pytest.approx([0.5, 0.5])
    assert found.loss.item() == pytest.approx(2 * math.log(len(IDS)))
