"""Drafts from what a request says of its answer: a prediction, such as the file being edited, and a grammar.

A grammar forces parts of an answer, such as the keys of a JSON schema. Requests with neither are decoded as without a
drafter, so it costs nothing in a server without another drafter.
"""

from __future__ import annotations

from functools import partial

import torch

from eyas.drafters.history import LookupDrafter, TokenPairs
from eyas.drafters.weightless.suffix import SuffixDrafter, SuffixHistory, SuffixLimits
from eyas.tree.draft_tree import Proposal


class PredictionDrafter(LookupDrafter):
    """Proposes how a request's prediction continues after the longest match of the answer's last tokens.

    As in every lookup, tokens that a grammar forces come first.
    """

    max_fanout = SuffixDrafter.max_fanout
    default_tree = "auto"
    needs_hint = True
    pairs: TokenPairs[SuffixHistory]

    def __init__(self, device: torch.device) -> None:
        """Draft for a target on `device`."""
        super().__init__(TokenPairs(partial(SuffixHistory, SuffixLimits())), device)

    def propose(self, slot: int, depth: int, fanout: int) -> Proposal:
        return self.pairs[slot].predicted(depth, min(fanout, self.max_fanout)).proposal
