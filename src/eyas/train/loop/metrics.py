"""What a micro-batch yields, as sums, so that unequal parts, steps and processes add up exactly."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class MicroBatchLoss:
    """A micro-batch's outcome as sums."""

    loss: Tensor  # [] sum over what counts
    weight: float  # how many positions count
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)  # name -> sum and count


class Means:
    """Running means of sums with counts of their own."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))

    def add(self, metrics: Mapping[str, tuple[float, float]]) -> None:
        """Add name -> (sum, count)."""
        for name, (total, count) in metrics.items():
            before = self.sums[name]
            self.sums[name] = (before[0] + total, before[1] + count)

    def add_part(self, part: MicroBatchLoss) -> None:
        """Add a micro-batch; its loss is one of the metrics."""
        self.add({"loss": (part.loss.item(), part.weight), **part.metrics})

    @staticmethod
    def merged(parts: Iterable[Mapping[str, tuple[float, float]]]) -> Means:
        """The means over the `sums` of several processes."""
        joint = Means()
        for sums in parts:
            joint.add(sums)
        return joint

    def count(self, name: str) -> float:
        """How many positions a metric was taken over."""
        return self.sums[name][1]

    def means(self) -> dict[str, float]:
        """name -> mean; a metric nothing counted for is left out."""
        return {name: total / count for name, (total, count) in self.sums.items() if count}
