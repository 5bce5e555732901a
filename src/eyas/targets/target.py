"""The target: a model whose passes are run in the fastest way that trials at load have shown to be right.

Shapes: B rows and S positions of a trace.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from eyas.targets.architecture import refused_where_it_fails
from eyas.targets.passes import Passes
from eyas.targets.state_trials import check_states, find_odd_steps
from eyas.targets.trace import Trace, traced
from eyas.targets.trials import choose_passes


class Target(Passes):
    """A model that verifies draft trees.

    Raises UnsupportedModelError for models that can't.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        with refused_where_it_fails(self.model):
            choose_passes(self)
            if self.states:
                if self.native is None:
                    find_odd_steps(self)
                check_states(self)

    def trace(self, tokens: Tensor, lengths: Tensor, taps: Sequence[int]) -> Trace:
        """Teacher-force right-padded `tokens` [B, S] of `lengths` [B], without the slots."""
        return traced(self, tokens, lengths, taps)
