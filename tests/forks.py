"""Python processes that start immediately: forks of one that has imported torch, transformers and eyas.

`python -m eyas` takes seconds to import them, and tests kill, signal or run many of them in parallel. Otherwise forks
are separate processes. Tests of the startup itself start a real one.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from pathlib import Path
from runpy import run_module, run_path
from types import TracebackType

_CONTEXT = get_context("forkserver")


class Fork:
    """Like `subprocess.Popen([sys.executable, *arguments])` with `-m MODULE ...`, `-c CODE ...` or `SCRIPT ...`.

    Its output goes to the files `stdout` and `stderr`, which may be the same; by default it is discarded.
    """

    def __init__(
        self,
        arguments: Sequence[object],
        env: Mapping[str, str] | None = None,
        stdout: Path | None = None,
        stderr: Path | None = None,
    ) -> None:
        _CONTEXT.set_forkserver_preload(
            [
                "transformers.models.llama.modeling_llama",
                "eyas.cli.app",
                "eyas.engine",
                "eyas.serve.run",
                "eyas.labs.sweep.sweep",
                "eyas.data.capture",
                "eyas.data.regenerate",
                "eyas.train.drafter.train",
            ]
        )
        asked = {
            "ARGUMENTS": [str(argument) for argument in arguments],
            "ENVIRONMENT": dict(os.environ if env is None else env),
            "FOLDER": os.getcwd(),
            "FILES": [os.devnull if file is None else str(file) for file in (stdout, stderr)],
        }
        # a function of the standard library: the fork may not find this module by its name
        self._process = _CONTEXT.Process(target=run_path, args=(__file__, asked, "__fork__"))
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        """As in Popen: None while it runs, negative for the signal that ended it."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self._process.is_alive():
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def __enter__(self) -> Fork:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.kill()
        self.wait()


def _run(arguments: list[str], environment: dict[str, str], folder: str, files: list[str]) -> None:
    """Become the requested process, in the fork."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), number)
    kind, *rest = arguments
    try:
        if kind == "-m":
            sys.argv = rest
            run_module(rest[0], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            sys.argv = ["-c", *rest[1:]]
            exec(compile(rest[0], "-c", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = arguments
            run_path(kind, run_name="__main__")
    finally:
        atexit._run_exitfuncs()


if __name__ == "__fork__":
    _run(*(globals()[name] for name in ("ARGUMENTS", "ENVIRONMENT", "FOLDER", "FILES")))
