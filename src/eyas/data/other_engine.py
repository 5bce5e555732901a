"""The protocol of another engine for `eyas data`: it computes hidden states and answers, here or on a cluster's
workers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from eyas.data.store.manifest import CaptureSettings
from eyas.urls import AnyPath
from eyas.work import MakeWorker

if TYPE_CHECKING:
    from eyas.data.capture.connector import ConnectorStates
    from eyas.data.regenerate.endpoint import CompletionSettings, Connection


class StateServer(Protocol):
    """How to start a server that writes its hidden states, on any machine."""

    def states(self, settings: CaptureSettings) -> AbstractContextManager[ConnectorStates]:
        """Run a server during a block, and yield its hidden states.

        Raises EndpointError if it can't be started, and UnsupportedModelError for a target whose final states can't be
        computed from what it writes.
        """

    def worker(self, folder: AnyPath, settings: CaptureSettings) -> MakeWorker:
        """What makes a capture worker with a server of its own; `folder` is the store, by its absolute path."""


class OtherEngine(Protocol):
    """Another engine's program, which starts servers on the machine that calls it."""

    def check(self, model: str) -> None:
        """Raise UsageError if it isn't installed on this machine."""

    def state_server(self, model: str, device: str, longest: int) -> StateServer:
        """Servers of the target's hidden states.

        Args:
            model: the target.
            device: where eyas computes what the engine leaves to it: the final norm, the head, the encoding.
            longest: the most tokens in a row.
        """

    def answerer(self, model: str, settings: CompletionSettings, connection: Connection) -> MakeWorker:
        """What makes a worker that answers chats with a server of its own."""


MakeOtherEngine = Callable[[str, str | None, tuple[str, ...]], OtherEngine]
"""What the feature `other_engine` is: from the engine's name, its command (None: as installed) and further options."""
