"""A reading: one way to understand a drafter's files. All readings of a drafter share its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from eyas.drafters.checkpoint import Checkpoint
from eyas.drafters.config import DrafterConfig
from eyas.drafters.kind import Kind
from eyas.drafters.loading import check_fit
from eyas.drafters.network import DraftNetwork
from eyas.targets import Target


@dataclass(frozen=True)
class Reading:
    """What a network is made of, and the boundaries it is shown."""

    kind: Kind
    config: DrafterConfig
    tensors: Mapping[str, Tensor] = field(repr=False)
    """As `DraftNetwork.state_dict` names them, the vocabulary map included."""
    taps: tuple[int, ...]

    @classmethod
    def of(cls, checkpoint: Checkpoint, target: Target) -> Reading:
        """As eyas reads the files. Raises CheckpointError, DrafterMismatchError."""
        config = checkpoint.config
        check_fit(config, target, str(checkpoint.raw.path))
        tensors = checkpoint.network(target).state_dict()
        return cls(checkpoint.kind, config, tensors, config.taps_of(target.num_layers))

    def on(self, target: Target) -> Reading:
        """With its tensors where the target computes, in the type it computes in."""
        moved = {
            name: tensor.to(target.device, target.dtype if tensor.is_floating_point() else None)
            for name, tensor in self.tensors.items()
        }
        return replace(self, tensors=moved)

    def network(self, target: Target) -> DraftNetwork:
        """The network, borrowing from `target` what it shares."""
        return self.kind.blank(self.config).fill(self.tensors, target).to(target.device)

    def changed(
        self,
        config: Mapping[str, Any] | None = None,
        tensors: Mapping[str, Tensor | None] | None = None,
        taps: tuple[int, ...] | None = None,
    ) -> Reading:
        """With other fields, tensors (None takes one away) or taps."""
        merged = {**self.tensors, **(tensors or {})}
        return replace(
            self,
            config=self.config.model_copy(update=dict(config or {})),
            tensors={name: tensor for name, tensor in merged.items() if tensor is not None},
            taps=self.taps if taps is None else taps,
        )


# One way in which a reading may be wrong, and what would put it right.


@dataclass(frozen=True)
class Change:
    """From one reading to another; it can be repeated on the same files in another type."""

    aspect: str
    """What is read otherwise; a reading is changed in one aspect once."""
    name: str
    """How it is read instead."""
    repair: str
    """What to change in the files."""
    apply: Callable[[Reading], Reading]
    written: bool = True
    """Can a drafter's files say so?"""


Aspect = Callable[[Reading, Target], Iterator[Change]]
"""The other ways to read one thing, given the present one."""
