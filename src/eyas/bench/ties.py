"""Telling a floating-point tie from a bug, where two runs of one request part.

Two correct runs may choose differently only where the target itself can hardly tell two tokens apart. So the common
prefix is run again, plainly, and *both* tokens must score within a whisker of the best score: the gap, in logits,
must not exceed `RELATIVE[dtype]` times the greatest logit there. A token that a broken rule let through, or that
another run merely found a little better, misses that by orders of magnitude. Tokens a filter ruled out never tie.

The whiskers are a few units in the last place of a logit (bfloat16, float16, where logits themselves are rounded),
or what sums taken in another order add up to over tens of layers (float32).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from eyas.target import Target
from eyas.tree import DraftTree
from eyas.types import SamplingParams
from eyas.verify import Sampler

RELATIVE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Near-tie threshold for each dtype, relative to the greatest absolute logit."""


@dataclass(frozen=True)
class Divergence:
    """Where two runs of a row parted; the first place only, what follows is another text."""

    row: str
    turn: int
    position: int
    """Index in the answer."""
    plain: int | None
    """The token of plain decoding; None = its answer ended here."""
    speculative: int | None
    gap: float | None
    """In logits: how far the lower-scoring of the two tokens lies below the best; None if there is no such token."""
    tolerance: float | None

    @property
    def tie(self) -> bool:
        """Is it excused by rounding?"""
        return self.gap is not None and self.tolerance is not None and self.gap <= self.tolerance


class Scores(NamedTuple):
    """What the sampler chooses by at one position, and what a logit's rounding is relative to."""

    values: Tensor  # [V] scores, noise included, in units of logits; -inf = ruled out
    scale: float


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """The first index at which two answers differ, their ends included."""
    for index, (a, b) in enumerate(zip(plain, other, strict=False)):
        if a != b:
            return index
    return None if len(plain) == len(other) else min(len(plain), len(other))


@torch.inference_mode()
def scores_after(
    target: Target, params: SamplingParams, prompt: Sequence[int], answer: Sequence[int], eos_ids: Sequence[int]
) -> Scores:
    """Scores of the token that follows `prompt` and `answer`, from a plain forward of both."""
    rows = range(1)
    target.resize(1)
    tokens = [*prompt, *answer]
    for _ in target.prefill(rows, [tokens], ()):
        pass
    root = torch.tensor(tokens[-1:], device=target.device)
    logits = target.verify(rows, root, DraftTree.empty(1, target.device), ()).logits.rows
    sampler = Sampler(1, target.vocab_size, target.device)
    sampler.admit(0, params, prompt, eos_ids)
    if answer:
        emitted = torch.tensor([list(answer)], device=target.device)
        sampler.commit(rows, emitted, torch.tensor([len(answer)], device=target.device))
    path = sampler.path(rows)
    scores = path.scores(path.warped(logits))[0]
    if path.needs.noise:
        scores = scores * params.temperature
    return Scores(scores, float(logits.float().abs().max()))


def judge(
    scores: Scores, plain: int | None, other: int | None, dtype: torch.dtype
) -> tuple[float | None, float | None]:
    """Gap and tolerance of two tokens that were chosen at the same place."""
    if plain is None or other is None:
        return None, None
    values = scores.values
    gap = float(values.max() - torch.minimum(values[plain], values[other]))
    return gap, RELATIVE[dtype] * max(scores.scale, torch.finfo(torch.float32).tiny)
