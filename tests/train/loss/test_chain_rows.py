"""Which rows a step computes, against the definition read row by row."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.train.loss.ttt import chain_rows

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
