"""Options of `eyas data capture` about another engine: a vLLM server, started here, that writes the hidden states."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from typer import Option

from eyas.assets import named_target
from eyas.cli.common.aliases import option_name
from eyas.cli.common.engine_program import EngineProgram
from eyas.cli.common.options import EngineArguments, EngineCommand
from eyas.errors import EndpointError, StoreError, UsageError
from eyas.urls import AnyPath

if TYPE_CHECKING:
    from eyas.data.capture.capture import Capture
    from eyas.data.capture.connector import ConnectorStates
    from eyas.data.capture.workers import CaptureWorker
    from eyas.data.store.manifest import CaptureSettings

_WHOLE = 10**9
"""More lines than a log has."""


@dataclass(frozen=True)
class StateEngineOptions:
    """Who runs the target, and how another engine is started."""

    PANEL: ClassVar = "Another engine"
    engine: Annotated[
        Literal["eyas", "vllm"],
        Option(help="vllm: a server of vLLM's that writes its hidden states; with --on, one for each worker."),
    ] = "eyas"
    engine_command: EngineCommand = None
    engine_option: EngineArguments = field(default_factory=list)

    def check(self, model: str, *, shared: bool) -> None:
        """Raise UsageError for options that would be ignored, or if vLLM isn't here or lacks the connector.

        `shared`: with --on, when vLLM may be on other machines only.
        """
        import os

        from eyas.interop.serving.hidden_states import connector_refusal, installed_connector

        if self.engine == "eyas":
            given = [name for name in ("engine_command", "engine_option") if getattr(self, name)]
            if given:
                raise UsageError(f"{', '.join(map(option_name, given))} would be ignored: say whose with --engine vllm")
            return
        if "WORLD_SIZE" in os.environ:
            raise UsageError("--engine vllm takes the GPUs for one server: leave out torchrun, or use --on ray")
        if shared:
            return
        self.program.line(model, 0)
        found = installed_connector()
        if self.engine_command is None and found is not None and not found[1]:
            raise UsageError(connector_refusal(found[0]))

    def check_target(self, model: str) -> None:
        """Raise UsageError for a target that the server can't read."""
        from eyas.targets.adapters import find_adapter

        adapter = find_adapter(model)
        if adapter is not None:
            raise UsageError(
                f"--engine vllm runs whole models, and there is a {adapter}: merge it, and give the result"
            )

    @property
    def program(self) -> EngineProgram:
        """The engine's program."""
        return EngineProgram(self.engine, self.engine_command, tuple(self.engine_option))

    def server(self, model: str, device: str | None, prepared: Capture) -> StateServer:
        """The server for a capture. Raises UsageError for rows that it can't run."""
        longest = max(len(row.tokens) for rows in prepared.rows.values() for row in rows)
        context = prepared.context
        if context is not None and longest >= context:
            raise UsageError(
                f"a row has {longest:,} tokens, as many as the target's context, and vLLM adds one: give --max-length "
                f"{context - 1}, or leave out --engine"
            )
        return StateServer(self.program, model, device or "cpu", longest)


@dataclass(frozen=True)
class StateServer:
    """How the server is started, on whatever machine."""

    program: EngineProgram
    model: str
    device: str
    """Where what vLLM leaves to eyas is computed: the final norm, the head, encoding."""
    longest: int
    """The most tokens of a row."""

    @contextmanager
    def states(self, settings: CaptureSettings) -> Iterator[ConnectorStates]:
        """The states of a server that runs in the block.

        Raises EndpointError if it can't be started, and UnsupportedModelError for a target whose final states can't
        be computed from what it writes.
        """
        from eyas.data.capture.connector import ConnectorStates, boundaries
        from eyas.interop.serving.hidden_states import connector_arguments, explained
        from eyas.targets.fingerprint import embedding_head_fingerprint
        from eyas.targets.loading import load_embedding_and_head
        from eyas.targets.trace import FinalNorm

        wanted = settings.target
        target = load_embedding_and_head(self.model, dtype=wanted.dtype, device=self.device)
        if embedding_head_fingerprint(target.model, target.layers) != wanted.ends:
            raise StoreError(f"{self.model} isn't the same model here as where the command runs: {wanted.name}")
        final_norm, written = FinalNorm(target), boundaries(settings.layout, wanted.layers)
        with TemporaryDirectory(prefix="eyas-states-") as folder:
            arguments = connector_arguments(written, Path(folder), wanted.dtype, self.longest)
            server = self.program.server(self.model, arguments)

            def explain(message: str) -> str:
                known = explained(server.log_tail(_WHOLE))
                return f"{message}; its output ends with: {server.log_tail()}" if known is None else known

            try:
                try:
                    server.start()
                except EndpointError as error:
                    raise EndpointError(explained(server.log_tail(_WHOLE)) or str(error)) from error
                with ConnectorStates(server.url, named_target(self.model), final_norm, written, explain) as states:
                    yield states
            finally:
                server.__exit__()


@dataclass(frozen=True)
class StateWorkerMaker:
    """What a worker with a server of its own is made of, on its machine."""

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
