"""Losses and metrics as sums with counts, which are exact over micro-batches and processes of unequal size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class MicroBatchLoss:
    """The loss and metrics of a micro-batch, as sums."""

    loss: Tensor  # [] summed over positions
    weight: float  # the number of positions in the sum
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)  # name -> sum and count


class Means:
    """Running means of metrics, each with its own count."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))

    def add(self, metrics: Mapping[str, tuple[float, float]]) -> None:
        """Add metrics: name -> (sum, count)."""
        for name, (total, count) in metrics.items():
            before = self.sums[name]
            self.sums[name] = (before[0] + total, before[1] + count)

    def add_micro_batch(self, part: MicroBatchLoss) -> None:
        """Add a micro-batch's metrics and its loss."""
        self.add({"loss": (part.loss.item(), part.weight), **part.metrics})

    @staticmethod
    def merged(parts: Iterable[Mapping[str, tuple[float, float]]]) -> Means:
        """The joint means of several processes, from the `sums` of each."""
        joint = Means()
        for sums in parts:
            joint.add(sums)
        return joint

    def count(self, name: str) -> float:
        """The number of positions in a metric's sum."""
        return self.sums[name][1]

    def means(self) -> dict[str, float]:
        """Name -> mean, without metrics whose count is zero."""
        return {name: total / count for name, (total, count) in self.sums.items() if count}
