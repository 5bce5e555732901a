"""Sliding windows by layer: how far back a layer's tokens see in the cache of all of a row's pairs.

Published drafters are trained with such windows in some layers or in all. They count from one of two places: from each
guess, as vLLM decodes, or from where the draft begins, as speculators trains EAGLE-3 and DFlash.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

FULL_LAYER, SLIDING_LAYER = "full_attention", "sliding_attention"
"""Types of layers, as transformers names them: without and with a sliding window."""


class SlidingWindow(NamedTuple):
    """The window of a layer: how far back its tokens see."""

    size: int
    anchored: bool = False
    """All guesses of a draft see the same earlier positions: `size` of them before its first guess. Else a token sees
    the positions less than `size` from its own."""
    whole_draft: bool = False
    """The guesses of a draft see each other, and the last pair before them, however small the window is; anchored ones
    always do."""

    def near(self, queries: Tensor, keys: Tensor, first: Tensor | int) -> Tensor:
        """Which keys are in the window: positions of queries, keys, and the draft's first guess, broadcast."""
        if self.anchored:
            return keys >= first - self.size
        close = (queries - keys).abs() < self.size
        return close | (keys >= first - 1) if self.whole_draft else close

    def after(self, steps: int) -> int:
        """How many of the latest pairs the guess `steps` after a row's last pair sees; causal, with `whole_draft`."""
        return self.size if self.anchored else max(1, self.size - steps)
