"""The protocol of decoders in kernels of our own, which run a target's passes instead of its modules.

There are two: `native/decoder.py` on a CPU and `triton/decoder.py` on a GPU. `passes.py` says which tokens a pass runs.

Shapes: R rows (a contiguous range of slots), Q columns of a pass, N tree nodes, T tokens of a pass (R x Q, or fewer in
a ragged pass), A taps, Ht hidden size, V vocabulary. A node index counts the root as 0 and node i as i + 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from eyas.targets.attention import RaggedLayout
from eyas.targets.slots import SlotCache
from eyas.targets.states import SlotStates
from eyas.tree import DraftTree, NodeLogits


class RecordedTree(NamedTuple):
    """A tree of a recorded pass: what the kernels read of a `DraftTree`, in buffers that each replay fills."""

    ancestors: Tensor  # [R, Q, Q]
    depth: Tensor  # [R, Q]


class PassColumns(NamedTuple):
    """The columns that a pass stages behind each row's committed ones."""

    rows: range
    end: int
    """Number of cache columns that the pass reads, staged ones included."""
    lengths: Tensor | None  # [R] number of committed columns, on the device; None = as the cache says
    tokens: Tensor  # [R, Q]
    tree: DraftTree | RecordedTree | None
    """The root and its nodes in these columns; None = a sequence, in which each token follows the one before it."""
    layout: RaggedLayout | None = None
    """Which columns have a token, if not all do: only these are run."""

    def committed(self, cache: SlotCache) -> Tensor:
        """[R] the number of committed columns, on the device."""
        return cache.device_lengths(self.rows) if self.lengths is None else self.lengths


class KernelDecoder(Protocol):
    """A decoder's layers, final norm and head in kernels of our own."""

    @property
    def name(self) -> str:
        """What the kernels are called in messages and logs."""

    def run_columns(self, cache: SlotCache, columns: PassColumns, taps: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Stage `columns`; return taps [T, A, Ht], and before them final states [T, Ht].

        For a tree, instead of final states, whatever `logits` takes [T, ...].
        """

    def logits(self, out: Tensor, index: Tensor, finish: Callable[[Any], Any] | None) -> NodeLogits:
        """The logits by node `index` [R, 1 + N] of a tree's pass that returned `out` [T, ...].

        `finish` is what the model applies to its head's output; None = nothing.
        """

    def logits_of_states(self, final: Tensor, index: Tensor, finish: Callable[[Any], Any] | None) -> NodeLogits:
        """As `logits`, of final states [T, Ht]."""

    def allocate_states(self, slots: int) -> SlotStates | None:
        """The recurrent states of empty slots; None if no layer is recurrent."""
