"""Readings, which are interpretations of a drafter's files, and the changes that lead from one to another."""

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
    """One interpretation of a drafter's files; readings of one drafter share unchanged tensors."""

    kind: Kind
    config: DrafterConfig
    tensors: Mapping[str, Tensor] = field(repr=False)
    """Native name -> tensor, including the vocabulary map."""
    taps: tuple[int, ...]
    """The target's boundaries whose states the drafter reads (aux hidden states)."""

    @classmethod
    def of(cls, checkpoint: Checkpoint, target: Target) -> Reading:
        """The reading with which eyas loads the files. Raises CheckpointError, DrafterMismatchError."""
        config = checkpoint.config
        check_fit(config, target, str(checkpoint.raw.path))
        tensors = checkpoint.network(target).state_dict()
        return cls(checkpoint.kind, config, tensors, config.taps_of(target.num_layers))

    def on(self, target: Target) -> Reading:
        """The same reading with its tensors on the target's device and in its dtype."""
        moved = {
            name: tensor.to(target.device, target.dtype if tensor.is_floating_point() else None)
            for name, tensor in self.tensors.items()
        }
        return replace(self, tensors=moved)

    def network(self, target: Target) -> DraftNetwork:
        """The draft network of this reading; an embedding or head that isn't in the files is `target`'s."""
        return self.kind.blank(self.config).fill(self.tensors, target).to(target.device)

    def changed(
        self,
        config: Mapping[str, Any] | None = None,
        tensors: Mapping[str, Tensor | None] | None = None,
        taps: tuple[int, ...] | None = None,
    ) -> Reading:
        """The reading with other config fields, tensors (None removes one) or taps."""
        merged = {**self.tensors, **(tensors or {})}
        return replace(
            self,
            config=self.config.model_copy(update=dict(config or {})),
            tensors={name: tensor for name, tensor in merged.items() if tensor is not None},
            taps=self.taps if taps is None else taps,
        )


@dataclass(frozen=True)
class Change:
    """A change of a reading that may correct it; it also applies to the same files in another dtype."""

    aspect: str
    """The aspect that is read differently; the search changes each aspect at most once."""
    name: str
    """How the aspect is read instead, for the report."""
    repair: str
    """How to change the files to repair them, for the report."""
    apply: Callable[[Reading], Reading]
    written: bool = True
    """Whether a drafter's files can express the change."""


Aspect = Callable[[Reading, Target], Iterator[Change]]
"""A function that yields all changes of a reading in one aspect."""
