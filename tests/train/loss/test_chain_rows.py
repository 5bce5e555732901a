"""Which rows a step computes, against the definition read row by row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.train.loss.draft_loss import accept_lengths
from eyas.train.loss.ttt import ChainRows, PositionSampling, chain_rows

MASKS = st.integers(1, 12).flatmap(
    lambda width: st.lists(st.lists(st.booleans(), min_size=width, max_size=width), min_size=1, max_size=3)
)


@given(MASKS, st.integers(1, 5))
def test_a_step_computes_the_rows_a_loss_still_reads(mask: list[list[bool]], steps: int) -> None:
    width = len(mask[0])
    rows = chain_rows(torch.tensor(mask), steps)
    assert rows.counts[0] == len(mask) * width
    assert len(rows.counts) == steps
    for step in range(1, steps):
        needed = {
            chat * width + row
            for chat in range(len(mask))
            for row in range(width)
            if any(row + 2 + j < width and mask[chat][row + 2 + j] for j in range(step, steps))
        }
        assert set(rows.indices[: rows.counts[step]].tolist()) == needed
        assert len(needed) == rows.counts[step]


@given(MASKS, st.integers(1, 5))
def test_every_answer_token_finds_its_guesses(mask: list[list[bool]], steps: int) -> None:
    width = len(mask[0])
    rows = chain_rows(torch.tensor(mask), steps)
    tokens = [(chat, at) for chat, line in enumerate(mask) for at in range(1, width) if line[at]]
    assert rows.answers.tolist() == [chat * width + at - 1 for chat, at in tokens]
    for step in range(steps):
        for (chat, at), guess in zip(tokens, rows.guesses[step].tolist(), strict=True):
            row = at - 2 - step
            if row < 0:
                assert guess == -1
            else:
                assert guess < rows.counts[step]
                found = guess if step == 0 else int(rows.indices[guess])
                assert found == chat * width + row


def chains(rows: ChainRows, step: int) -> set[int]:
    """The rows that are scored at a step."""
    return {int(answer) - 1 - step for answer, at in zip(rows.answers, rows.guesses[step], strict=True) if at >= 0}


def test_sampled_steps_have_their_share_of_whole_chains() -> None:
    mask = torch.zeros(2, 400, dtype=torch.bool)
    mask[0, 20:390] = mask[1, 5:150] = mask[1, 200:399] = True
    steps = 6
    ratio = 0.7
    least = 0.3
    rows = chain_rows(mask, steps, PositionSampling(ratio, least, (3, 1)))
    assert rows.shares is not None
    assert chains(rows, 0) == chains(chain_rows(mask, steps), 0)
    flat = mask.flatten().tolist()
    for step in range(1, steps):
        here = chains(rows, step)
        whole = {row for row in range(800) if row % 400 + 2 + step < 400 and all(flat[row + 2 : row + 3 + step])}
        assert here <= whole & chains(rows, step - 1)
        assert len(here) == round(max(ratio**step, least) * len(whole))
        assert rows.shares[step] == pytest.approx(len(here) / len(whole))
        assert set(rows.indices[: rows.counts[step]].tolist()) == here
    again, other = (chain_rows(mask, steps, PositionSampling(ratio, least, key)) for key in ((3, 1), (3, 2)))
    assert torch.equal(again.guesses, rows.guesses)
    assert not torch.equal(other.guesses, rows.guesses)


def test_the_accept_length_of_sampled_chains_is_right_on_average() -> None:
    mask = torch.zeros(1, 60, dtype=torch.bool)
    mask[0, 5:40] = mask[0, 45:58] = True
    every = chain_rows(mask, 4)
    right = torch.rand(len(every.answers), 4, generator=torch.Generator().manual_seed(0)) < 0.7
    found = [
        accept_lengths(chain_rows(mask, 4, PositionSampling(0.6, 0.2, (key,))), right).sum().item()
        for key in range(400)
    ]
    exact = accept_lengths(every, right).sum().item()
    assert len(set(found)) > 10
    assert sum(found) / len(found) == pytest.approx(exact, rel=0.01)
