"""How hard a text is to guess compared with others: the power to which the values of its steps are raised.

A text in which copies suddenly go wrong shows it within a few steps. Each answer has a distribution over exponents (1 =
like all others, 2 = every step is worth the square of its usual value), by Bayes' rule from the steps that came true or
didn't. It begins from what the latest answers were.

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
"""How evidence fades with each round of a text: a copied passage ends from one line to the next."""
_ANSWERS = 0.8
"""How the weight of an answer fades with each one that ends after it."""
_PATH = math.log(2.0)
"""A distribution counts as the exponent that gives the same value to paths whose usual value is 1/2."""


class Difficulty:
    """The exponents of the answers that are being written."""

    def __init__(self) -> None:
        self._ended: Array = _PRIOR / _PRIOR.sum()
        """[E] the distribution in a new answer, not normalized: the latest answers', and a little of the first one."""
        self._evidence: dict[int, Array] = {}
        """Answer -> [E] log-likelihoods."""

    def follow(self, texts: Sequence[int]) -> None:
        """The answers being written from now on; all others have ended."""
        current = set(texts)
        for text in [text for text in self._evidence if text not in current]:
            mixed = 0.1 * _PRIOR / _PRIOR.sum() + 0.9 * self._posterior(text)
            self._ended = _ANSWERS * self._ended + mixed
            del self._evidence[text]

    def learn(
        self, texts: Sequence[int], graded: Sequence[Sequence[GradedStep]], values: ValueTable, groups: Indices
    ) -> None:
        """Account for a round of `texts` [R] and the steps that were graded in it, given what steps are worth."""
        for text, steps, group in zip(texts, graded, groups.tolist(), strict=True):
            if not steps:
                continue
            own = group + GROUPS * Source.LOOKUP
            worth = np.array([values.of_step(min(step.logprob, 0.0), step.later, own) for step in steps])  # [n]
            raised = np.multiply.outer(np.minimum(worth, -1e-3), _EXPONENTS)  # [n, E]
            accepted = np.array([[step.accepted] for step in steps])
            news = np.where(accepted, raised, np.log1p(-np.exp(raised))).sum(0)
            self._evidence[text] = self._evidence.get(text, 0.0) * _ROUNDS + news

    def _posterior(self, text: int) -> Array:
        evidence = self._evidence.get(text, np.zeros(1))
        weights: Array = self._ended * np.exp(evidence - evidence.max())
        weights /= weights.sum()
        return weights

    def exponents(self, texts: Sequence[int]) -> tuple[float, ...]:
        """[R] the exponent that each text's distribution counts as; few different ones, as each needs a tree."""
        made = []
        for text in texts:
            counts_as = -math.log(float(self._posterior(text) @ np.exp(-_PATH * _EXPONENTS))) / _PATH
            made.append(2.0 ** (round(4.0 * math.log2(counts_as)) / 4.0))
        return tuple(made)
