"""How each text differs from the average: in what the drafter offers, how much of it is accepted, and in its progress.

The tokens that a draft *promises* are the sum of its nodes' values, the acceptance rates of such nodes over all texts.
A text's *offers* are predicted tokens per forecast token: a drafter is less confident in some texts than in others. Its
*calibration* is accepted tokens per predicted token. Forecasts are multiplied by both, node values by the calibration.

Forecasts can't say whether a text is worth a trial, because they come from other texts. That is decided by a Beta
distribution of the probability that the drafter guesses the text's next token (`Explorer.while_plain`).

All three start from the averages of the latest texts.

A text's *progress* is the tokens that its rounds have emitted on average. A node in a text that gets ahead is worth
less than one in the others, which it makes wait (`Texts.weights`). R rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from eyas.tree.acceptance import Array

_TOKENS = 5.0
"""The weight, in tokens, of the prior for a text's offers and calibration."""
_DRAFTS = 2.0
"""The weight, in drafts, of the prior for a text's share of guessed tokens. Low, because texts differ a lot."""
_EARLIER = 1.0
"""The weight of the typical text in the prior for a new one, where each earlier text counts as one."""
_FIRST = 4
"""How many texts have to be drafted for before they say what to expect of another one. With 0, 1 and 8, the first six
answers of a recorded pair take 15% and 3% longer, and 2% less."""
_EARLIER_FADE = 0.9
"""The factor by which the weight of a text decays with each one that ends after it."""
_GUESSED = 0.5
"""The share of guessed tokens in a typical text."""
SHARES: Array = (np.arange(32) + 0.5) / 32
"""[S] the shares of guessed tokens for which the probability is known."""
_LOGS: Array = np.stack((np.log(SHARES), np.log1p(-SHARES)))
_FADE = 1.0 - 1.0 / 64.0
"""The factor by which a text's own results decay with each round, since it may become easier or harder."""
_PROGRESS = 1.0 / 128.0
"""The weight of a round in the running mean of a text's tokens. In simulation, where multiplications bind, three texts
beside one that copies keep 0.89 of their speed, and elsewhere sixteen that copy in turn 0.98. With 1/32 it is 0.92 and
0.97, without weights 0.60 and 1."""


_TYPICAL: Array = np.array((1.0, 1.0, 1.0, 1.0, 1.0, _GUESSED))


class Yield(NamedTuple):
    """How a text compares with the average of all texts."""

    offers: float
    """Promised tokens per forecast one."""
    calibration: float
    """Accepted tokens per predicted one."""

    @property
    def accepted(self) -> float:
        """Accepted tokens per forecast one."""
        return self.offers * self.calibration


@dataclass(slots=True)
class Evidence:
    """What the rounds of a text have shown so far."""

    forecast: float = 0.0
    """The tokens that drafts in an average text would have predicted."""
    predicted: float = 0.0
    """The sum of its nodes' values."""
    accepted: float = 0.0
    """Accepted tokens."""
    drafts: float = 0.0
    guessed: float = 0.0
    """The drafts of which at least one token was accepted."""

    def fade(self) -> None:
        """Account for a round: what earlier ones showed decays."""
        self.forecast *= _FADE
        self.predicted *= _FADE
        self.accepted *= _FADE
        self.drafts *= _FADE
        self.guessed *= _FADE

    def learn(self, forecast: float, predicted: float, accepted: float) -> None:
        """Account for a draft."""
        self.fade()
        self.forecast += forecast
        self.predicted += predicted
        self.accepted += accepted
        self.drafts += 1.0
        self.guessed += accepted > 0

    @property
    def share(self) -> Array:
        """[6] its three pairs of sums, scaled so that a text counts as at most 1, however long it was."""
        offers = np.array((self.forecast, self.predicted)) / (self.forecast + _TOKENS)
        calibration = np.array((self.predicted, self.accepted)) / (self.predicted + _TOKENS)
        drafts = np.array((self.drafts, self.guessed)) / (self.drafts + _DRAFTS)
        return np.concatenate((offers, calibration, drafts))


class Texts:
    """The texts that are being written."""

    def __init__(self) -> None:
        self._evidence: dict[int, Evidence] = {}
        self._assumed: dict[int, Yield] = {}
        self._earlier: Array = _EARLIER * _TYPICAL
        """The sum of the `share`s of the latest texts and of a typical one."""
        self._drafted = 0
        """How many texts were drafted for."""
        self._progress: dict[int, float] = {}
        """Running means of the tokens that a round emits, of texts that were written beside others."""

    @property
    def known(self) -> bool:
        """Whether drafts for these texts, or for several others, have shown what to expect."""
        return self._drafted >= _FIRST or all(text.drafts > 0.0 for text in self._evidence.values())

    def resume(self) -> None:
        """Account for texts that were drafted for in earlier engines."""
        self._drafted = _FIRST

    def follow(self, texts: Sequence[int]) -> None:
        """Set the texts being written from now on; all others have ended."""
        current = set(texts)
        for text, evidence in self._evidence.items():
            if text not in current:
                self._earlier += (1.0 - _EARLIER_FADE) * (_EARLIER * _TYPICAL - self._earlier) + evidence.share
        self._evidence = {text: self._evidence.get(text) or Evidence() for text in texts}
        self._progress = {text: tokens for text, tokens in self._progress.items() if text in current}

    def _yield(self, text: Evidence) -> Yield:
        forecast, predicted, offered, accepted = self._earlier[:4].tolist()
        return Yield(
            (text.predicted + _TOKENS * predicted / forecast) / (text.forecast + _TOKENS),
            (text.accepted + _TOKENS * accepted / offered) / (text.predicted + _TOKENS),
        )

    def assumed(self, text: int) -> Yield:
        """What forecasts assume of a text."""
        return self._assumed.get(text) or self._yield(Evidence())

    def settle(self) -> None:
        """Base forecasts on the latest results."""
        self._assumed = {text: self._yield(evidence) for text, evidence in self._evidence.items()}

    @property
    def drift(self) -> float:
        """Accepted tokens expected of the texts now, divided by those that the last forecast assumed."""
        assumed = sum(self.assumed(text).accepted for text in self._evidence)
        return sum(self._yield(text).accepted for text in self._evidence.values()) / assumed if assumed else 1.0

    def guessed(self) -> Array:
        """[S] the probability of each share of tokens that the drafter may guess, on average over the texts.

        The average of R Beta distributions is close to the one with its mean and its variance.
        """
        drafts, guessed = self._earlier[4:].tolist()
        prior = guessed / drafts
        mean = variance = 0.0
        rows = len(self._evidence)
        for text in self._evidence.values():
            weight = text.drafts + _DRAFTS
            share = (text.guessed + _DRAFTS * prior) / weight
            mean += share / rows
            variance += share * (1.0 - share) / (weight + 1.0) / rows**2
        weight = mean * (1.0 - mean) / variance - 1.0
        density = np.exp(np.array((mean * weight - 1.0, (1.0 - mean) * weight - 1.0)) @ _LOGS)
        probabilities: Array = density / density.sum()
        return probabilities

    def judge(
        self,
        forecast: float,
        texts: Sequence[int],
        predicted: Sequence[float] | None,
        accepted: Sequence[int],
        drafting: Sequence[bool] | None,
    ) -> None:
        """Compare what a round predicted with the tokens that each of its `texts` [R] `accepted`.

        Where the values of nodes aren't known (None), they count as what was accepted.
        """
        share = forecast / sum(self.assumed(text).accepted for text in texts)
        for row, text in enumerate(texts):
            if drafting is None or drafting[row]:
                evidence = self._evidence.setdefault(text, Evidence())
                self._drafted += evidence.drafts == 0.0
                evidence.learn(share, accepted[row] if predicted is None else predicted[row], accepted[row])

    def advance(self, texts: Sequence[int], tokens: Sequence[int]) -> None:
        """Account for the `tokens` [R] that a round has emitted for several `texts` [R]."""
        for text, count in zip(texts, tokens, strict=True):
            known = self._progress.get(text, 1.0)
            self._progress[text] = known + _PROGRESS * (count - known)

    def weights(self, texts: Sequence[int]) -> tuple[float, ...]:
        """[R] what a token of each of several texts is worth: the mean progress of all, divided by its own.

        So the product of the texts' speeds grows as fast as it can, not their sum (proportional fairness; Kelly,
        Maulloo and Tan, "Rate control for communication networks", 1998). Where passes take time in proportion to their
        tokens, a copy in one text would otherwise make the others wait twice as long while all of them together gain
        next to nothing. Rounded to half an octave, because texts that copy in turn are ahead by chance, and every
        different weight needs a tree of its own.
        """
        tokens = [self._progress.get(text, 1.0) for text in texts]
        mean = sum(tokens) / len(tokens)
        return tuple(2.0 ** (round(2.0 * math.log2(mean / own)) / 2.0) for own in tokens)

    def rest(self) -> None:
        """Account for a plain round."""
        for evidence in self._evidence.values():
            evidence.fade()
