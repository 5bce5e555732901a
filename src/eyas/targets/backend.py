"""What runs a target's passes: the model's own modules, native code on a CPU, or CUDA graphs of the modules.

All three give the same results for the same tokens. This file has all that an engine must know about their differences.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from eyas.targets.native.library import kernels
from eyas.targets.shapes import USES
from eyas.targets.threads import single_threaded_torch


class Backend(Protocol):
    """What runs the passes of a target."""

    @property
    def name(self) -> str:
        """`modules`, `native` or `graphs`."""

    @property
    def records(self) -> bool:
        """Whether passes of a shape are recorded once, at a cost, and then replayed."""

    @property
    def warmup(self) -> int:
        """How many first passes of a shape don't take the time of later ones."""

    def running(self) -> AbstractContextManager[None]:
        """The context that passes run in, which sets how many threads torch uses."""


@dataclass(frozen=True)
class ModulesBackend:
    """The modules of transformers."""

    single_threaded: bool = False
    """Whether torch runs on one thread, because its work is so small that threads would only wait for each other."""
    name = "modules"
    records = False
    warmup = 0

    def running(self) -> AbstractContextManager[None]:
        return single_threaded_torch() if self.single_threaded else nullcontext()


class NativeBackend:
    """Native code on a CPU; torch does the little that is left on one thread."""

    name = "native"
    records = False
    warmup = 0

    def running(self) -> AbstractContextManager[None]:
        return single_threaded_torch()


class GraphsBackend:
    """The modules, recorded as CUDA graphs in recurring shapes."""

    name = "graphs"
    records = True
    warmup = USES

    def running(self) -> AbstractContextManager[None]:
        return nullcontext()


def kernels_in_use() -> str | None:
    """The name of the native kernels that this process may use, for passes or for parts of rounds; None = none."""
    found = kernels()
    return None if found is None else found.name
