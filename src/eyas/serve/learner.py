"""The protocol of the feature `learn` for the server and its verb: a drafter that learns from served requests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from eyas.drafters.base import Drafter
from eyas.drafters.options import DrafterOptions
from eyas.serve.observe.observer import Observer
from eyas.targets import Target

if TYPE_CHECKING:
    from prometheus_client.registry import Collector


class Learner(Observer, ABC):
    """The part of a server that learns. It observes the engine, and wraps and swaps its drafter."""

    @abstractmethod
    def wrap(self, options: DrafterOptions, model: str) -> Callable[[Target, Drafter], Drafter]:
        """The wrapper for the drafter that these options made. It raises UsageError for drafters that can't learn."""

    @abstractmethod
    def start(self, drafter: Drafter) -> None:
        """Begin; `drafter` is the engine's, which `wrap` made."""

    @abstractmethod
    def close(self) -> None:
        """End, and write what was collected."""

    @abstractmethod
    def overview(self) -> dict[str, Any]:
        """What the playground shows. Reads the disk."""

    @abstractmethod
    def series(self, model_name: str) -> Collector:
        """Its series for Prometheus."""
