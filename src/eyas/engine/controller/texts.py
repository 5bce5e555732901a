"""How much each text yields: how sure the drafter is in it, and how much of that comes true.

A text's yield follows from its own drafts, from what the latest texts yielded, and from what is usual.
R rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from eyas.tree.acceptance import Array

_TYPICAL = 5.0
"""The forecast tokens of a text after which what it was offered weighs as much as what others were, and the offered
tokens after which what it accepted does."""
_USUAL, _USUAL_FADE = 60.0, 1.0 - 1.0 / 500.0
"""The same for what all texts are offered, as forecasts may be consistently too high or low; and how that decays."""
_RECENT, _RECENT_FADE = 1.0, 0.8
"""The weight of what is usual, in texts, next to what the latest ones yielded, where a new text is concerned; and how
the weight of a text decays with each one that ends after it."""
_HOPE = 0.25
"""The spread of texts' yields, as a share: a new text gets the benefit of the doubt."""
_YIELD_FADE = 1.0 - 1.0 / 64.0
"""The factor by which a text's own results decay with each draft."""


class Yield(NamedTuple):
    """How a text compares with all others."""

    offers: float
    """What the drafter offers, by the values of its nodes, per forecast token."""
    calibration: float
    """Accepted tokens per offered one."""

    @property
    def accepted(self) -> float:
        """Accepted tokens per forecast one."""
        return self.offers * self.calibration


@dataclass(slots=True)
class Evidence:
    """What the drafts of an answer have shown so far: sums in tokens, which decay."""

    forecast: float = 0.0
    """What they would have brought if the text were like all others."""
    offered: float = 0.0
    """The values of their nodes: what they would have brought if nodes were worth what they are worth elsewhere."""
    accepted: float = 0.0
    shown: float = 0.0
    """`forecast` without decay: how much is known."""

    def learn(self, forecast: float, offered: float, accepted: float) -> None:
        """Account for a draft; what earlier ones showed decays."""
        self.forecast = self.forecast * _YIELD_FADE + forecast
        self.offered = self.offered * _YIELD_FADE + offered
        self.accepted = self.accepted * _YIELD_FADE + accepted
        self.shown += forecast

    def compared(self, prior: Yield) -> Yield:
        """Its yield, by its own results and by what was expected of it."""
        return Yield(
            (self.offered + _TYPICAL * prior.offers) / (self.forecast + _TYPICAL),
            (self.accepted + _TYPICAL * prior.calibration) / (self.offered + _TYPICAL),
        )

    @property
    def shares(self) -> Array:
        """[4] its forecast and offered tokens, and its offered and accepted ones, scaled to its weight among texts.

        That is 1 if it is known well, however long it was.
        """
        offers = np.array((self.forecast, self.offered)) / (self.forecast + _TYPICAL)
        return np.append(offers, np.array((self.offered, self.accepted)) / (self.offered + _TYPICAL))


class Texts:
    """What the texts being written yield, and what is expected of new ones."""

    def __init__(self) -> None:
        self._evidence: dict[int, Evidence] = {}
        self._assumed: dict[int, Yield] = {}
        self.sums: Array = np.zeros(2)
        """All texts' forecast and offered tokens, which decay: the state, which callers may change in place."""
        self._ended: Array = np.zeros(4)
        """The sum of the latest texts' `shares`."""

    def follow(self, texts: Sequence[int]) -> None:
        """The texts being written from now on; all others have ended."""
        current = set(texts)
        for text, evidence in self._evidence.items():
            if text not in current and evidence.forecast:
                self._ended = _RECENT_FADE * self._ended + evidence.shares
        self._evidence = {text: self._evidence.get(text) or Evidence() for text in texts}

    def assumed(self, text: int) -> Yield:
        """What forecasts assume of a text."""
        return self._assumed.get(text) or self._prior

    def calibrations(self, texts: Sequence[int]) -> tuple[float, ...]:
        """Accepted tokens per offered one in each text, as forecasts assume."""
        return tuple(self.assumed(text).calibration for text in texts)

    @property
    def drift(self) -> float:
        """What the texts being written yield now, compared with what the last forecast assumed."""
        prior, assumed = self._prior, sum(self.assumed(text).accepted for text in self._evidence)
        return sum(text.compared(prior).accepted for text in self._evidence.values()) / assumed if assumed else 1.0

    @property
    def _usual_offers(self) -> float:
        """What all texts are offered: the shape that promises the most is often one whose forecast is too high."""
        forecast, offered = self.sums.tolist()
        return float((offered + _USUAL) / (forecast + _USUAL))

    @property
    def _prior(self) -> Yield:
        """What a new text is expected to yield: texts of which hardly anything is guessed seldom come alone."""
        forecast, offered, nodes, accepted = self._ended.tolist()
        offers = (offered + _RECENT * self._usual_offers) / (forecast + _RECENT)
        return Yield(offers, (accepted + _RECENT) / (nodes + _RECENT))

    @property
    def hope(self) -> float:
        """The factor by which the texts may well yield more than expected, until results are in."""
        unknown = [_TYPICAL / (text.shown + _TYPICAL) for text in self._evidence.values()]
        count = max(1, len(unknown))
        return 1.0 + _HOPE * sum(unknown) / (count * math.sqrt(count))  # many texts differ less from the average

    @property
    def usual(self) -> float:
        """The factor by which texts usually yield more than is expected of new ones, because the latest yielded less.

        At least 1.
        """
        return max(1.0, self._usual_offers / self._prior.accepted)

    def judge(
        self,
        promised: float,
        texts: Sequence[int],
        offered: Sequence[float] | None,
        kept: Sequence[int],
        drafting: Sequence[bool] | None,
    ) -> None:
        """Compare what a round of all `texts` [R] `promised` with what each was `offered`, and the tokens it `kept`.

        Where it isn't known what was offered (None), it counts as what was kept.
        """
        offered = kept if offered is None else offered
        forecast = promised / sum(self.assumed(text).accepted for text in texts)
        among = [row for row in range(len(texts)) if drafting is None or drafting[row]]
        for row in among:
            self._evidence.setdefault(texts[row], Evidence()).learn(forecast, offered[row], kept[row])
        if among:
            self.sums *= _USUAL_FADE
            self.sums += forecast, sum(offered[row] for row in among) / len(among)

    def settle(self) -> None:
        """Base forecasts on what the texts being written yield now."""
        prior = self._prior
        self._assumed = {name: text.compared(prior) for name, text in self._evidence.items()}
