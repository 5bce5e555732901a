"""Another engine's program as options describe it, and the servers that are started with it to do a verb's work."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eyas.errors import UsageError

if TYPE_CHECKING:
    from eyas.bench.serving.servers import ServerProcess

READY = 1800.0
"""Seconds in which a server has to be ready; large models load for long."""


@dataclass(frozen=True)
class EngineProgram:
    """Which engine it is, and the options --engine-command and --engine-option."""

    engine: str
    command: str | None = None
    options: tuple[str, ...] = ()

    def server(self, model: str, arguments: Sequence[str] = ()) -> ServerProcess:
        """A server of `model` for this process alone, not started yet; it is killed with it."""
        from eyas.bench.serving.servers import ServerProcess

        return ServerProcess(
            self.engine, lambda port: self.line(model, port, arguments), ready_seconds=READY, bound=True
        )

    def line(self, model: str, port: int, arguments: Sequence[str] = ()) -> list[str]:
        """What starts a server with these arguments. Raises UsageError if the engine isn't installed."""
        named = None if self.command is None else shlex.split(self.command)
        if named is not None and (not named or shutil.which(named[0]) is None):
            raise UsageError(f"--engine-command: there is no program {' '.join(named)!r} on this machine")
        from eyas.assets import named_target
        from eyas.interop.serving.commands import invocation
        from eyas.interop.serving.engines import ENGINES

        engine = ENGINES[self.engine]
        program = engine.find() if named is None else named
        if program is None:
            raise UsageError(f"{engine.title} isn't installed here: --engine-command says where it is on all machines")
        address = ["--host", "127.0.0.1", "--port", str(port)]
        start = invocation(engine.consumers[0], named_target(model), None, program)
        return [*start, *address, *arguments, *self.options]
