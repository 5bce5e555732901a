"""The chunked loss against a token-by-token oracle: which rows count, and what they are compared with."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from eyas.data.features import FeatureBatch, TopTokens
from eyas.errors import DataError
from eyas.train.loss import draft_loss
from eyas.train.loss.config import LossConfig
from eyas.train.loss.draft_loss import (
    TokenLoss,
    TokenScores,
    accept_lengths,
    dpace_weights,
    draft_metrics,
    teacher_of,
)
from eyas.train.loss.ttt import ChainRows, chain_rows

B = 2
S = 9
H = 5
V = 12
STEPS = 3
IDS = torch.tensor([1, 3, 4, 7, 8, 11])


class Case(NamedTuple):
    batch: FeatureBatch
    head: Tensor  # [V, H] the target's
    own: nn.Linear  # the drafter's
    rows: ChainRows
    states: list[Tensor]  # [., H] of each step

    def scores(self, config: LossConfig, batch: FeatureBatch | None = None) -> TokenScores:
        teacher = teacher_of(batch or self.batch, lambda x: x @ self.head.T, IDS, V)
        parameters = tuple(p for p in self.own.parameters() if p.requires_grad)
        return TokenLoss(teacher, self.own, parameters, IDS, V, config)(self.states, self.rows)


def case(mask: Tensor | None = None) -> Case:
    torch.manual_seed(1)
    if mask is None:
        mask = torch.zeros(B, S, dtype=torch.bool)
        mask[0, 3:6] = mask[0, 8:] = mask[1, 1:4] = True
    batch = FeatureBatch(
        torch.zeros(B, S, dtype=torch.int64), mask, torch.zeros(B, S, 1, H), torch.randn(B, S, H).double()
    )
    rows = chain_rows(mask, STEPS)
    states = [torch.randn(count, H).double().requires_grad_() for count in rows.counts]
    return Case(batch, torch.randn(V, H).double(), nn.Linear(H, len(IDS)).double(), rows, states)


def smoothed(chance: float, alpha: float) -> float:
    return (1 - alpha) * chance + alpha


def oracle(case: Case, config: LossConfig) -> tuple[Tensor, dict[str, float]]:
    """Loss and metric sums, one token and one step at a time, every row's place looked up."""
    assert case.batch.final is not None
    found: dict[str, float] = {
        f"{name}_{step}": 0.0 for name in ("accuracy", "overlap", "count") for step in range(STEPS)
    }
    guessed: list[tuple[int, int, Tensor, Tensor, Tensor, float]] = []  # step, row of the chain, p, q, alpha, chance
    for chat in range(B):
        for token in range(S):
            for step in range(STEPS):
                row = chat * S + token - 2 - step
                if not case.batch.loss_mask[chat, token] or token - 2 - step < 0:
                    continue
                index = row if step == 0 else case.rows.indices.tolist().index(row)
                q = case.own(case.states[step][index]).softmax(-1)
                full = (case.head @ case.batch.final[chat, token - 1]).softmax(-1)
                p = full[IDS] / full[IDS].sum()
                alpha = torch.minimum(full[IDS], q).sum()
                best = int(full.argmax())
                chance = float(q.detach()[IDS.tolist().index(best)]) if best in IDS.tolist() else 0.0
                guessed.append((step, row, p, q, alpha, chance))
                found[f"accuracy_{step}"] += float(IDS[q.argmax()] == full.argmax())
                found[f"overlap_{step}"] += alpha.item()
                found[f"count_{step}"] += 1
    loss = torch.zeros((), dtype=torch.float64)
    for step, row, p, q, alpha, _ in guessed:
        cross = -(p * q.log()).sum()
        kl = (p * (p / q).log()).sum()
        if config.kl_decay is not None:
            share = math.exp(-config.kl_decay * found[f"overlap_{step}"] / found[f"count_{step}"])
            one = share * kl + (1 - share) * (1 - alpha)
        else:
            one = {"ce": cross, "kl": kl, "lk": -alpha.log()}[config.token]
        weight = config.token_weight * config.decay**step
        if config.dpace is not None:
            chain = sorted((at, smoothed(chance, config.dpace)) for at, own, *_, chance in guessed if own == row)
            weight *= sum(math.prod(s for at, s in chain if at <= last) for last, _ in chain if last >= step)
        loss = loss + weight * one
    return loss, found


@pytest.mark.parametrize("elements", [2**20, 1])
@pytest.mark.parametrize("trained_head", [True, False])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"token": "kl", "token_weight": 0.1},
        {"token": "lk"},
        {"token": "lk", "kl_decay": 1.0},
        {"dpace": 0.5, "decay": 1.0},
        {"token": "lk", "kl_decay": 1.0, "dpace": 0.3},
    ],
)
def test_scores_match_the_oracle(
    settings: dict[str, Any], trained_head: bool, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_loss, "CHUNK_ELEMENTS", elements)  # the second gives chunks of a token
    found = case()
    config = LossConfig(**settings)
    found.own.requires_grad_(trained_head)
    scores = found.scores(config)
    loss, sums = oracle(found, config)
    torch.testing.assert_close(scores.loss, loss, rtol=1e-6, atol=1e-6)  # decay^step is float32
    wanted = [*found.states, *(p for p in found.own.parameters() if trained_head)]
    ours, theirs = (torch.autograd.grad(total * 3, wanted) for total in (scores.loss, loss))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)
        assert mine.abs().sum() > 0
    metrics = draft_metrics(found.rows, scores.right, scores.overlap)
    for step in range(STEPS):
        for name in ("accuracy", "overlap"):
            total, count = metrics[f"{name}_{step}"]
            assert total == pytest.approx(sums[f"{name}_{step}"])
            assert count == sums[f"count_{step}"]
    with torch.no_grad():
        again = found.scores(config)
    torch.testing.assert_close(again.loss, scores.loss.detach())
    assert not again.loss.requires_grad


def test_weights_of_a_chain_by_hand() -> None:
    """Of four guesses with the chances 0.8, 0.5, 0.2 and 1, smoothed by a half; a second chain has only three."""
    mask = torch.zeros(1, 6, dtype=torch.bool)
    mask[0, 2:] = True
    rows = chain_rows(mask, 4)
    there = rows.guesses.T >= 0  # token i is guessed at step j from row i - j
    chances = torch.full(there.shape, 0.4)
    for step, chance in enumerate((0.8, 0.5, 0.2, 1.0)):
        chances[step, step] = chance
    found = dpace_weights(chances, rows, there, 0.5)
    products = (0.9, 0.9 * 0.75, 0.9 * 0.75 * 0.6, 0.9 * 0.75 * 0.6)
    for step in range(4):
        assert found[step, step].item() == pytest.approx(sum(products[step:]))
    assert found[1, 0].item() == pytest.approx(0.7 + 0.7**2 + 0.7**3)
    assert not found[~there].any()
    remaining = dpace_weights(chances, rows, there, 1.0)
    assert [remaining[step, step].item() for step in range(4)] == [4, 3, 2, 1]
    assert [remaining[1 + step, step].item() for step in range(3)] == [3, 2, 1]


def test_a_chunk_never_makes_more_logits_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """The teacher is asked for few rows at a time, and once for each."""
    monkeypatch.setattr(draft_loss, "CHUNK_ELEMENTS", 70)
    found = case()
    chunks = []
    whole = teacher_of(found.batch, lambda x: x @ found.head.T, IDS, V)
    loss = TokenLoss(
        lambda indices: chunks.append(indices.tolist()) or whole(indices), found.own, (), IDS, V, LossConfig()
    )
    loss(found.states, found.rows)
    assert [len(part) for part in chunks] == [2, 2, 2, 1]
    assert [index for part in chunks for index in part] == found.rows.answers.tolist()


def test_the_first_answer_token_is_trained_and_position_one_never_is() -> None:
    rows = case().rows
    predicted = {divmod(int(p) + 1, S) for p, guess in zip(rows.answers, rows.guesses[0], strict=True) if guess >= 0}
    assert predicted == {(0, 3), (0, 4), (0, 5), (0, 8), (1, 2), (1, 3)}  # (1, 1) has no pair before it


def test_a_batch_without_answers_scores_nothing() -> None:
    found = case(torch.zeros(B, S, dtype=torch.bool))
    found = found._replace(states=found.states[:1])
    scores = found.scores(LossConfig())
    scores.loss.backward()  # type: ignore[no-untyped-call]
    assert scores.loss.item() == 0
    assert draft_metrics(found.rows, scores.right, scores.overlap)["accept_length"] == (0, 0)


def test_accept_length_counts_unbroken_runs() -> None:
    """Answer tokens 2..6 of one chat; rows 0..4 start chains of up to three guesses."""
    mask = torch.zeros(1, 7, dtype=torch.bool)
    mask[0, 2:] = True
    rows = chain_rows(mask, STEPS)
    by_row = torch.tensor([[1, 1, 0, 1, 1], [1, 0, 1, 1, 0], [1, 1, 1, 0, 0]]).bool()  # [step, row 0..4]
    right = torch.ones(5, STEPS, dtype=torch.bool)  # true where there is no guess: it must not count
    for token in range(5):
        for step in range(min(token + 1, STEPS)):
            right[token, step] = by_row[step, token - step]
    # row 0 runs 3, row 1 stops after 1, row 2 at once, row 3 has two tokens left, both right, row 4 one
    assert accept_lengths(rows, right).tolist() == [4, 2, 1, 3, 2]


def test_uniform_models_overlap_by_the_covered_mass() -> None:
    found = case()
    nn.init.zeros_(found.own.weight)
    nn.init.zeros_(found.own.bias)
    found.head.zero_()
    scores = found.scores(LossConfig())
    assert scores.overlap[0].tolist() == pytest.approx([0.5] * STEPS)
    weight = sum(0.8**step * (guesses >= 0).sum().item() for step, guesses in enumerate(found.rows.guesses))
    assert scores.loss.item() == pytest.approx(weight * math.log(len(IDS)), rel=1e-6)


def top_tokens(found: Case, count: int) -> FeatureBatch:
    assert found.batch.final is not None
    logprobs, ids = (found.batch.final @ found.head.T).log_softmax(-1).topk(count, dim=-1)
    tail = (1 - logprobs.exp().sum(-1)).clamp(min=0)
    return found.batch._replace(final=None, top=TopTokens(ids, logprobs.float(), tail.float()))


def test_all_tokens_stored_is_the_dense_teacher() -> None:
    found = case()
    dense = found.scores(LossConfig())
    stored = found.scores(LossConfig(), top_tokens(found, V))
    torch.testing.assert_close(stored.loss, dense.loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(stored.overlap, dense.overlap, rtol=1e-5, atol=1e-6)
    assert torch.equal(stored.right, dense.right)


def test_the_tail_is_spread_evenly() -> None:
    found = case()
    top = top_tokens(found, 3)
    assert top.top is not None
    lesson = teacher_of(top, lambda x: x, IDS, V)(found.rows.answers)
    for i, index in enumerate(found.rows.answers.tolist()):
        full = torch.full((V,), top.top.tail.flatten()[index].item() / (V - 3))
        full[top.top.ids.flatten(0, 1)[index]] = top.top.logprobs.flatten(0, 1)[index].exp()
        torch.testing.assert_close(lesson.p[i], full[IDS] / full[IDS].sum())
        assert lesson.covered[i].item() == pytest.approx(full[IDS].sum().item(), abs=1e-6)
        assert lesson.best[i] == full.argmax()


def test_a_batch_has_one_kind_of_teacher() -> None:
    found = case()
    for batch in (found.batch._replace(final=None), found.batch._replace(top=top_tokens(found, 2).top)):
        with pytest.raises(DataError, match="either final states or top tokens"):
            teacher_of(batch, lambda x: x, IDS, V)
