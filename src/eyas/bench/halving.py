"""Successive halving: many settings on few prompts, ever fewer settings on ever more prompts.

Every rung is a measurement of its own, everything in it interleaved. Only the last, on all prompts, gives the figures
of the finalists; what an earlier rung said is used to drop settings, and reported as what it is.
"""

from __future__ import annotations

from math import ceil
from typing import NamedTuple

FACTOR = 3
"""A rung keeps one setting in three, and gives each three times the prompts."""


class Rung(NamedTuple):
    """How many settings are measured on how many groups of prompts."""

    settings: int
    groups: int


def rungs(settings: int, groups: int, *, coarse: int, finalists: int) -> list[Rung]:
    """The plan: from all `settings` on `coarse` groups down to `finalists` on all `groups`."""
    plan = []
    left, prompts = settings, min(coarse, groups)
    while left > finalists:
        plan.append(Rung(left, prompts))
        left = max(finalists, ceil(left / FACTOR))
        prompts = min(prompts * FACTOR, groups)
    return [*plan, Rung(left, groups)]
