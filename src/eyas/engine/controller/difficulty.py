"""How hard a text is to guess compared with others: the power to which the values of its steps are raised.

If copies suddenly stop being right in a text, a few steps show it. Each answer has a distribution over exponents (1 =
like all others, 2 = every step has the square of its average value). It is updated by Bayes' rule with each accepted or
rejected step, and starts from the distributions of the latest answers.

Shapes: E exponents, R rows, n steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from eyas.tree.acceptance import GROUPS, Array, GradedStep, Indices
from eyas.tree.draft_tree import Source
from eyas.tree.values import ValueTable

_EXPONENTS: Array = 2.0 ** np.arange(-2.0, 5.01, 0.5)
"""[E] from a quarter, where a step of 0.5 is worth 0.84, to 32, where one of 0.9 is worth 0.03."""
_PRIOR: Array = np.exp(-2.0 * np.abs(np.log2(_EXPONENTS)))
"""[E] the distribution before anything is known, not normalized."""
_ROUNDS = 1.0 - 1.0 / 16.0
"""The factor by which evidence decays with each round of a text. Short, because a copied passage can end abruptly."""
_ANSWERS = 0.8
"""The factor by which an answer's weight decays with each one that ends after it."""
_PATH = math.log(2.0)
"""A distribution is summarized by one exponent: the one that gives the same value to a path whose average value is
1/2."""


class Difficulty:
    """The exponents of the answers that are being written."""

    def __init__(self) -> None:
        self._ended: Array = _PRIOR / _PRIOR.sum()
        """[E] the distribution for a new answer, not normalized: those of the latest answers, mixed with the prior."""
        self._evidence: dict[int, Array] = {}
        """Answer -> [E] log-likelihoods."""

    def follow(self, texts: Sequence[int]) -> None:
        """Set the answers being written from now on; all others have ended."""
        current = set(texts)
        for text in [text for text in self._evidence if text not in current]:
            mixed = 0.1 * _PRIOR / _PRIOR.sum() + 0.9 * self._posterior(text)
            self._ended = _ANSWERS * self._ended + mixed
            del self._evidence[text]

    def learn(
        self, texts: Sequence[int], graded: Sequence[Sequence[GradedStep]], values: ValueTable, groups: Indices
    ) -> None:
        """Account for a round of `texts` [R] and the steps graded in it; `values` holds the average values of steps."""
        for text, steps, group in zip(texts, graded, groups.tolist(), strict=True):
            if not steps:
                continue
            own = group + GROUPS * Source.LOOKUP
            worth = np.array([values.of_step(min(step.logprob, 0.0), step.later, own) for step in steps])  # [n]
            raised = np.multiply.outer(np.minimum(worth, -1e-3), _EXPONENTS)  # [n, E]
            accepted = np.array([[step.accepted] for step in steps])
            log_likelihoods = np.where(accepted, raised, np.log1p(-np.exp(raised))).sum(0)
            self._evidence[text] = self._evidence.get(text, 0.0) * _ROUNDS + log_likelihoods

    def _posterior(self, text: int) -> Array:
        evidence = self._evidence.get(text, np.zeros(1))
        weights: Array = self._ended * np.exp(evidence - evidence.max())
        weights /= weights.sum()
        return weights

    def exponents(self, texts: Sequence[int]) -> tuple[float, ...]:
        """[R] each text's exponent, rounded to a quarter octave because every different one needs a tree of its own."""
        made = []
        for text in texts:
            counts_as = -math.log(float(self._posterior(text) @ np.exp(-_PATH * _EXPONENTS))) / _PATH
            made.append(2.0 ** (round(4.0 * math.log2(counts_as)) / 4.0))
        return tuple(made)
