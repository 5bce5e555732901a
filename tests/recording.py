"""CUDA graphs emulated on a CPU: a computation's operations, recorded once and replayed on the same tensors.

As with a graph, a replay reads and writes the same memory, Python isn't run again, and an operation that reads a value
from the device or copies one to it can't be recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from eyas.targets.graphs import CudaRecorder, Outputs, Record, Recording

ASKING = {"_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "masked_select", "unique_dim", "_unique2"}
COPYING = {"lift_fresh"}
"""Called by `torch.tensor`: a copy from host memory, which also waits for the device."""


class RecordedOperations(TorchDispatchMode):
    """Records the operations of a block."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Callable[..., Any], Any, Any, list[tuple[int, Tensor]]]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.__name__.split(".")[0] in ASKING | COPYING:
            raise RuntimeError(f"operation not permitted when stream is capturing: {function}")
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        fresh = [
            (number, leaf)
            for number, leaf in enumerate(tree_leaves(out))
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in given
        ]
        self._steps.append((function, args, kwargs, fresh))
        return out

    def launch(self, kernel: Callable[[], object]) -> None:
        """Run and record what isn't an operation of PyTorch: a kernel that writes to tensors."""
        with _disable_current_modes():
            kernel()
        self._steps.append((kernel, (), {}, []))

    def replay(self) -> None:
        """Run all operations again, each writing its result into the recorded tensor."""
        for function, args, kwargs, fresh in self._steps:
            out = tree_leaves(function(*args, **kwargs))
            for number, kept in fresh:
                kept.copy_(out[number])


def record(compute: Callable[[], Outputs]) -> Recording:
    """Record a computation as `eyas.targets.graphs.CudaRecorder` does on a GPU, without native attention and noise.

    These aren't PyTorch operations, so a replay wouldn't run them.
    """
    names = ("eyas.targets.attention.native_attention", "eyas.verify.path.native_gumbel")
    with patch(names[0], return_value=None), patch(names[1], return_value=None), RecordedOperations() as operations:
        outputs = compute()
    return Recording(operations.replay, outputs)


def recorder(device: torch.device) -> Record:
    """The recorder for a device."""
    return CudaRecorder(device) if device.type == "cuda" else record


def refuse(compute: Callable[[], Outputs]) -> Recording:  # noqa: ARG001
    """Refuse to record anything."""
    raise RuntimeError("nothing is recorded here")
