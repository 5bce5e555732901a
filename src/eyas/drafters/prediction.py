"""Suffix decoding for requests that say something of their answers, by a prediction or a grammar; a server's default.

A prediction is a text that the answer may repeat, such as the file being edited. A grammar forces parts of an answer,
such as the keys of a JSON schema, and what is written in such a form often recurs. Other requests are decoded as
without a drafter, so it costs nothing in a server without another one.
"""

from __future__ import annotations

from functools import partial

import torch

from eyas.drafters.history import LookupDrafter, TokenPairs
from eyas.drafters.weightless.suffix import SuffixDrafter, SuffixHistory, SuffixLimits
from eyas.tree.draft_tree import Proposal


class PredictionDrafter(LookupDrafter):
    """Proposes how the longest match of the last tokens continues, in the prediction or in the sequence itself."""

    max_fanout = SuffixDrafter.max_fanout
    default_tree = "auto"
    needs_hint = True
    pairs: TokenPairs[SuffixHistory]

    def __init__(self, device: torch.device) -> None:
        """Draft for a target on `device`."""
        super().__init__(TokenPairs(partial(SuffixHistory, SuffixLimits())), device)

    def propose(self, slot: int, depth: int, fanout: int) -> Proposal:
        return self.pairs[slot].following(depth, min(fanout, self.max_fanout)).proposal
