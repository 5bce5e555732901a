"""Hidden states and answers from another engine's server, started for one process: this one, or a worker."""

from __future__ import annotations

import shlex
import shutil
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from eyas.errors import EndpointError, StoreError, UsageError
from eyas.hub import find_files, target_as_file
from eyas.urls import AnyPath
from eyas.work import MakeWorker

if TYPE_CHECKING:
    from eyas.bench.serving.servers import ServerProcess
    from eyas.data.capture.connector import ConnectorStates
    from eyas.data.capture.workers import CaptureWorker
    from eyas.data.regenerate import Answerer, CompletionSettings, Connection, Reply
    from eyas.data.regenerate.journal import Take
    from eyas.data.regenerate.workers import AnswererWorker
    from eyas.data.store.manifest import CaptureSettings

_ALL_LINES = 10**9
"""More lines than any log has."""
READY_SECONDS = 1800.0
"""Seconds within which a server must be ready; large models take long to load."""


@dataclass(frozen=True)
class EngineProgram:
    """The engine, and the values of --engine-command and --engine-option."""

    engine: str
    command: str | None = None
    options: tuple[str, ...] = ()

    def server(self, model: str, arguments: Sequence[str] = ()) -> ServerProcess:
        """A server of `model` for this process alone, not started yet; it is killed when the process ends."""
        from eyas.bench.serving.servers import ServerProcess

        return ServerProcess(
            self.engine, lambda port: self.line(model, port, arguments), ready_seconds=READY_SECONDS, bound=True
        )

    def check(self, model: str) -> None:
        """Raise UsageError if the program isn't on this machine."""
        self.line(model, 0)

    def state_server(self, model: str, device: str, longest: int) -> StateServer:
        """Servers of the target's hidden states."""
        return StateServer(self, model, device, longest)

    def answerer(self, model: str, settings: CompletionSettings, connection: Connection) -> MakeWorker:
        """What makes a worker that answers with a server of its own."""
        return ServerAnswererMaker(self, model, settings, connection)

    def line(self, model: str, port: int, arguments: Sequence[str] = ()) -> list[str]:
        """The command that starts a server with these arguments. Raises UsageError if the engine isn't installed."""
        named = None if self.command is None else shlex.split(self.command)
        if named is not None and (not named or shutil.which(named[0]) is None):
            raise UsageError(f"`engine_command=`: there is no program {' '.join(named)!r} on this machine")
        from eyas.interop.serving.commands import invocation
        from eyas.interop.serving.engines import ENGINES

        engine = ENGINES[self.engine]
        program = engine.find() if named is None else named
        if program is None:
            raise UsageError(f"{engine.title} isn't installed here: `engine_command=` says where it is on all machines")
        address = ["--host", "127.0.0.1", "--port", str(port)]
        start = invocation(engine.consumers[0], target_as_file(model), None, program)
        return [*start, *address, *arguments, *self.options]


@dataclass(frozen=True)
class StateServer:
    """How to start the server, on any machine."""

    program: EngineProgram
    model: str
    device: str
    """The device for what vLLM leaves to eyas: the final norm, the head, encoding."""
    longest: int
    """Maximum number of tokens in a row."""

    def worker(self, folder: AnyPath, settings: CaptureSettings) -> MakeWorker:
        """What makes a capture worker with a server of its own."""
        return StateWorkerMaker(self, folder, settings)

    @contextmanager
    def states(self, settings: CaptureSettings) -> Iterator[ConnectorStates]:
        """Run a server during the block and yield its hidden states.

        Raises EndpointError if it can't be started, and UnsupportedModelError for a target whose final states can't
        be computed from what it writes.
        """
        from eyas.data.capture.connector import ConnectorStates, boundaries
        from eyas.interop.serving.hidden_states import connector_arguments, explained
        from eyas.targets.fingerprint import embedding_head_fingerprint
        from eyas.targets.loading import load_embedding_and_head
        from eyas.targets.target import FinalNorm

        wanted = settings.target
        target = load_embedding_and_head(self.model, dtype=wanted.dtype, device=self.device)
        if embedding_head_fingerprint(target.model, target.layers) != wanted.ends:
            raise StoreError(f"{self.model} isn't the same model here as on the command's machine: {wanted.name}")
        final_norm = FinalNorm(target)
        written = boundaries(settings.layout, wanted.layers)
        with TemporaryDirectory(prefix="eyas-states-") as folder:
            arguments = connector_arguments(written, Path(folder), wanted.dtype, self.longest)
            server = self.program.server(self.model, arguments)

            def explain(message: str) -> str:
                known = explained(server.log_tail(_ALL_LINES))
                return f"{message}; its output ends with: {server.log_tail()}" if known is None else known

            try:
                try:
                    server.start()
                except EndpointError as error:
                    raise EndpointError(explained(server.log_tail(_ALL_LINES)) or str(error)) from error
                with ConnectorStates(server.url, find_files(self.model).source, final_norm, written, explain) as states:
                    yield states
            finally:
                server.__exit__()


@dataclass(frozen=True)
class StateWorkerMaker:
    """Makes a capture worker with a server of its own, on the worker's machine."""

    server: StateServer
    folder: AnyPath
    """The store, by its absolute path."""
    settings: CaptureSettings

    def __call__(self) -> CaptureWorker:
        """Start the server, which lasts as long as the worker."""
        from eyas.data.capture.workers import CaptureWorker, check_shared

        check_shared(self.folder, self.settings)
        with ExitStack() as stack:
            states = stack.enter_context(self.server.states(self.settings))
            worker = CaptureWorker(states, self.folder, self.settings, self.settings.target, states.version())
            weakref.finalize(worker, stack.pop_all().close)
        return worker


class ServerAnswerer:
    """An endpoint that a worker started for itself, so its address is left out of the answers' settings."""

    def __init__(self, name: str, answerer: Answerer, stop: Callable[[], object]) -> None:
        """`name` is the engine's; `stop` ends the server, which lasts as long as this object."""
        self._name = name
        self._answerer = answerer
        weakref.finalize(self, stop)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the requests, with the engine's name in place of the address."""
        return {**self._answerer.settings, "answered_by": self._name}

    def answers(self, take: Take) -> Generator[Reply, None, None]:
        """Yield replies in order of completion."""
        return self._answerer.answers(take)


@dataclass(frozen=True)
class ServerAnswererMaker:
    """Makes a worker that answers with a server of its own."""

    program: EngineProgram
    model: str
    settings: CompletionSettings
    connection: Connection

    def __call__(self) -> AnswererWorker:
        """Start the server. Raises EndpointError if it doesn't become ready."""
        from eyas.data.regenerate import EndpointAnswerer
        from eyas.data.regenerate.workers import AnswererWorker

        server = self.program.server(self.model)
        server.__enter__()
        answerer = EndpointAnswerer(server.url, self.settings, self.connection)
        return AnswererWorker(ServerAnswerer(self.program.engine, answerer, server.__exit__))
