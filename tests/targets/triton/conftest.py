"""Triton's interpreter as a device; `tests/targets/test_triton.py` runs these tests in a process where it is on.

A tile's product computes each row in the same way, wherever it is in the tile. So do tensor cores. NumPy's products
don't: OpenBLAS sums a row of a matrix in an order that depends on its place.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import numpy as np
from torch.utils._python_dispatch import _get_current_dispatch_mode

from tests.recording import RecordedOperations

collect_ignore_glob = list[str]()


class _Kept:
    """Stands for a patch of the language that isn't undone."""

    def restore(self) -> None:
        """Keep it."""


def _patch_interpreter() -> None:
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    patched = set[int]()
    launch = interpreter.InterpretedFunction.run

    def dot(_builder: Any, a: Any, b: Any, d: Any, *_options: Any) -> Any:
        rows = np.flatnonzero(a.data.any(axis=1))  # the others' products are zeros
        made = np.zeros(d.data.shape, d.data.dtype)
        left, right = (part.data.astype(d.data.dtype) for part in (a, b))
        made[rows] = np.matmul(left[rows][:, None, :], right)[:, 0]
        return interpreter.TensorHandle(made + d.data, d.dtype.scalar)

    def patch_once(function: Any) -> Any:
        """Leave the language patched for a module's functions: doing so in each call takes longer than the kernels."""
        if id(function.__globals__) not in patched:
            patched.add(id(function.__globals__))
            patch(function)
        return _Kept()

    def launch_recorded(kernel: Any, *args: Any, **options: Any) -> None:
        """Launch a kernel, as part of a recorded pass where one is being recorded."""
        mode = _get_current_dispatch_mode()
        run = partial(launch, kernel, *args, **options)
        if isinstance(mode, RecordedOperations):
            mode.launch(run)
        else:
            run()

    interpreter.InterpretedFunction.run = launch_recorded
    interpreter.InterpreterBuilder.create_dot = dot
    interpreter._patch_lang = patch_once
    np.seterr(over="ignore")  # as on a device, what overflows is infinite


if os.environ.get("TRITON_INTERPRET") == "1":
    _patch_interpreter()
else:
    collect_ignore_glob.append("test_*.py")
