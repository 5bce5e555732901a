"""Training-time test against decoding: row t of all steps is the chain of guesses from t."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eyas.drafters.loading import drafter_of
from eyas.drafters.network import DraftNetwork
from eyas.drafters.window.window import Window
from eyas.train.loss.ttt import ChainRows, chain_rows, unrolled

from ... import tiny
from .chains import HIDDEN, NETWORKS, VOCAB, chain, network

STEPS = 4


def ragged(made: DraftNetwork) -> tuple[Tensor, Tensor, Tensor]:
    """Three chats of 13, 9 and 6 tokens with answers here and there."""
    torch.manual_seed(1)
    tokens = torch.randint(VOCAB, (3, 13))
    taps = torch.randn(3, 13, made.config.tap_count, HIDDEN, dtype=made.dtype)
    mask = torch.zeros(3, 13, dtype=torch.bool)
    mask[0, 4:7] = mask[0, 10:] = mask[1, 2:9] = mask[2, 5] = True
    for chat, length in enumerate((13, 9, 6)):
        tokens[chat, length:] = 0
        taps[chat, length:] = 0.0
    return tokens, taps, mask


def guesses(rows: ChainRows, step: int, width: int) -> list[tuple[int, int]]:
    """(chat, row) of a step's states that a loss reads."""
    starts = rows.answers - 1 - step
    return [divmod(int(s), width) for s, g in zip(starts, rows.guesses[step], strict=True) if g >= 0]


@pytest.mark.every(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_row_is_the_chain_decoding_would_make(name: str, dtype: torch.dtype) -> None:
    made = network(name, dtype)
    tokens, taps, mask = ragged(made)
    rows = chain_rows(mask, STEPS)
    states = list(unrolled(made, tokens, taps, rows))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-11
    compared = 0
    for step, (fed, normed) in enumerate(states):
        at = rows.guesses[step][rows.guesses[step] >= 0]
        for (chat, row), index in zip(guesses(rows, step, 13), at.tolist(), strict=True):
            expected = chain(made, tokens[chat : chat + 1], taps[chat : chat + 1], row, step + 1)[step]
            for ours, theirs in zip((fed[index], normed[index]), expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
            compared += 1
    assert compared == sum((mask[:, 2 + step :]).sum().item() for step in range(STEPS))


WINDOWED = ("eagle3", "eagle3.1", "mla", "eagle1", "mtp")


def in_a_window(name: str, pairs: int, dtype: torch.dtype = torch.float64) -> DraftNetwork:
    made = network(name, dtype)
    made.config = made.config.model_copy(update={"draft_window": pairs})
    return made


def kept(tokens: Tensor, taps: Tensor, row: int, window: Window) -> tuple[Tensor, Tensor, int]:
    """A chat [1, S] without the pairs that the window of `row` leaves out, and what is then the index of the row."""
    dropped = window.dropped(row + 1)
    pairs = [i for i in range(taps.shape[1]) if i < window.sinks or i >= window.sinks + dropped]
    following = [i + 1 for i in pairs if i + 1 < tokens.shape[1]]
    return tokens[:, [0, *following]], taps[:, pairs], row - dropped


@pytest.mark.every(2)
@pytest.mark.parametrize(("name", "pairs"), tiny.sample(WINDOWED, [1, 4, 8]))
def test_in_a_window_every_row_is_the_chain_decoding_would_make(name: str, pairs: int) -> None:
    """Decoding reads nothing but the pairs of the window, from position 0 on."""
    made = in_a_window(name, pairs)
    torch.manual_seed(2)
    tokens = torch.randint(VOCAB, (1, 40))
    mask = torch.ones(1, 40, dtype=torch.bool)
    taps = torch.randn(1, 40, made.config.tap_count, HIDDEN, dtype=made.dtype)
    rows = chain_rows(mask, STEPS)
    window = Window(pairs)
    for step, (fed, normed) in enumerate(unrolled(made, tokens, taps, rows)):
        at = rows.guesses[step][rows.guesses[step] >= 0]
        for (_, row), index in zip(guesses(rows, step, 40), at.tolist(), strict=True):
            ids, states, last = kept(tokens, taps, row, window)
            expected = chain(made, ids, states, last, step + 1)[step]
            for ours, theirs in zip((fed[index], normed[index]), expected, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)  # angles are float32's


def test_two_layers_in_a_window_are_trained_as_the_drafter_decodes() -> None:
    made = in_a_window("two layers", 8, torch.float32)
    torch.manual_seed(2)
    tokens = torch.randint(VOCAB, (1, 40))
    taps = torch.randn(1, 40, 3, HIDDEN)
    states = next(unrolled(made, tokens, taps, chain_rows(torch.ones(1, 40, dtype=torch.bool), 1)))[1]
    drafter = drafter_of(made.eval().requires_grad_(False), (1, 2, 4))
    drafter.pairs.resize(1)
    for row in range(39):
        drafter.observe(range(1), tokens[:, row + 1 : row + 2], taps[:, row : row + 1], [1])
        torch.testing.assert_close(drafter.pairs.normed[0], states[row].detach(), rtol=1e-3, atol=1e-3)


@pytest.mark.every(2)
@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_flow_through_the_whole_chain(name: str) -> None:
    """Gradients of all parameters, by way of the drafter's own guesses, are those of the chains written out."""
    made = network(name)
    tokens, taps, mask = ragged(made)
    rows = chain_rows(mask, STEPS)
    states = list(unrolled(made, tokens, taps, rows))
    ours = torch.zeros((), dtype=torch.float64)
    theirs = torch.zeros((), dtype=torch.float64)
    for step, (_, normed) in enumerate(states):
        at = rows.guesses[step][rows.guesses[step] >= 0]
        for (chat, row), index in zip(guesses(rows, step, 13), at.tolist(), strict=True):
            ours = ours + normed[index].sin().sum() * (1 + step)
            expected = chain(made, tokens[chat : chat + 1], taps[chat : chat + 1], row, step + 1)[step]
            theirs = theirs + expected[1].sin().sum() * (1 + step)
    body = [p for name, p in made.named_parameters() if not name.startswith("lm_head")]
    pairs = zip(*(torch.autograd.grad(total, body) for total in (ours, theirs)), strict=True)
    for mine, other in pairs:
        torch.testing.assert_close(mine, other, rtol=1e-8, atol=1e-9)
        assert mine.abs().sum() > 0


def test_later_steps_compute_only_what_a_loss_reads() -> None:
    made = network("eagle3")
    tokens, taps, mask = ragged(made)
    rows = chain_rows(mask, STEPS)
    counts = [len(normed) for _, normed in unrolled(made, tokens, taps, rows)]
    assert counts == [39, 18, 14, 10]
    nothing = chain_rows(torch.zeros_like(mask), STEPS)
    assert [len(normed) for _, normed in unrolled(made, tokens, taps, nothing)] == [39]
