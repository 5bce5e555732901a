"""Puts the native kernels, compiled for every kind of x86-64 processor, into wheels for Linux.

Where there is no compiler, or the machine is another one, the wheel is pure Python: kernels are then compiled where
they run.
"""

from __future__ import annotations

import importlib.util
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsHook(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles before a wheel is put together."""

    PLUGIN_NAME = "custom"

    _folder: tempfile.TemporaryDirectory[str] | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add a library for each of `BUILDS` to the wheel; an editable install has none."""
        file = Path(self.root) / "src/eyas/targets/native/builds.py"
        spec = importlib.util.spec_from_file_location("builds", file)  # eyas itself needs torch
        assert spec is not None
        assert spec.loader is not None
        builds = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = builds  # dataclasses look there
        spec.loader.exec_module(builds)
        compiler = builds.compiler()
        here = (platform.system(), platform.machine())
        if version == "editable" or compiler is None or here != ("Linux", "x86_64"):
            return
        self._folder = tempfile.TemporaryDirectory()
        for build in builds.BUILDS:
            output = Path(self._folder.name) / f"{build.name}-{builds.sources_hash()}.so"
            builds.compile_library(compiler, (*builds.FLAGS, *build.flags), output)
            build_data["force_include"][str(output)] = f"eyas/targets/native/prebuilt/{output.name}"
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-linux_x86_64"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:  # noqa: ARG002
        """Remove what was compiled."""
        if self._folder is not None:
            self._folder.cleanup()
