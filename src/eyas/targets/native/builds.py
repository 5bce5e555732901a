"""How the native kernels are compiled: for the machine that runs them, or into a wheel for several processors.

This file needs only Python's standard library, because wheel builds have nothing else. A library ends with a hash of
its other bytes: a truncated one would end the process with a bus error once it is mapped.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent / "kernels"
PREBUILT = Path(__file__).parent / "prebuilt"
"""Where a wheel has its libraries; a clone has none."""
FLAGS = ("-O3", "-std=c++17", "-fopenmp-simd", "-pthread", "-fPIC", "-shared", "-ffp-contract=off")
NATIVE_FLAGS = (*FLAGS, "-march=native")
"""The compiler's options for this machine."""
_HASH_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True)
class Build:
    """A library for one kind of x86 processor. All give the same bits, except for bf16 attention with `vdpbf16ps`."""

    name: str
    needs: frozenset[str]
    """Required processor features, as Linux names them."""
    amd: bool
    """Whether it prefetches weights in the way that suits AMD's caches."""
    flags: tuple[str, ...]

    def runs_on(self, features: frozenset[str], model: str) -> bool:
        """Whether a processor can run it and is from the vendor that it is tuned for."""
        return self.needs <= features and self.amd == model.startswith("AMD")


def _builds() -> tuple[Build, ...]:
    v3, v4 = "avx2 fma f16c bmi1 bmi2 movbe", "avx512f avx512bw avx512cd avx512dq avx512vl"
    bf16 = "-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"
    levels = (
        ("avx512-bf16", f"{v3} {v4} avx512_bf16 avx512_vnni", bf16),
        ("avx512-vnni", f"{v3} {v4} avx512_vnni", ("-march=x86-64-v4", "-mavx512vnni")),
        ("avx512", f"{v3} {v4}", ("-march=x86-64-v4",)),
        ("avx2-vnni", f"{v3} avx_vnni", ("-march=x86-64-v3", "-mavxvnni")),
        ("avx2", v3, ("-march=x86-64-v3",)),
    )
    makers = ((False, "", ()), (True, "-amd", ("-DEYAS_AMD",)))
    others_only = {"avx512-vnni", "avx2-vnni"}  # AMD processors with these also have more features
    amx, zen5 = ("-mamx-tile", "-mamx-bf16"), ("-mavxvnni", *makers[1][2])
    return (
        Build("amx", frozenset(f"{levels[0][1]} amx_tile amx_bf16".split()), False, (*levels[0][2], *amx)),
        Build("zen5", frozenset(f"{levels[0][1]} avx_vnni".split()), True, (*levels[0][2], *zen5)),
        *(
            Build(f"{level}{suffix}", frozenset(needs.split()), amd, (*flags, *more))
            for level, needs, flags in levels
            for amd, suffix, more in makers
            if not (amd and level in others_only)
        ),
    )


BUILDS = _builds()
"""The libraries in a wheel, best first."""


def compiler() -> str | None:
    """A C++ compiler: `$CXX`, c++ or g++."""
    return shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")


def sources_hash() -> str:
    """A hash of the kernels' sources, used in the names of libraries."""
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in sorted(SOURCES.iterdir()))).hexdigest()[:16]


def compile_library(compiler: str, flags: Sequence[str], output: Path) -> None:
    """Compile the kernels into a library, one source file per core. Raises OSError and subprocess.SubprocessError."""

    def run(*arguments: Path | str) -> None:
        subprocess.run([compiler, *flags, *map(str, arguments)], check=True, capture_output=True, timeout=900)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        slowest = ("integers", "passes")  # first
        sources = sorted(SOURCES.glob("*.cpp"), key=lambda source: source.stem not in slowest)
        objects = [Path(folder) / f"{source.stem}.o" for source in sources]
        for done in [pool.submit(run, "-c", source, "-o", made) for source, made in zip(sources, objects, strict=True)]:
            done.result()
        run(*objects, "-o", output)
    with output.open("ab") as file:
        file.write(hashlib.sha256(output.read_bytes()).digest())


def is_whole(library: Path) -> bool:
    """Whether a library's last bytes are the hash of its other bytes."""
    content = library.read_bytes()
    return hashlib.sha256(content[:-_HASH_BYTES]).digest() == content[-_HASH_BYTES:]


def prebuilt(features: frozenset[str], model: str) -> Path | None:
    """The wheel's library for a processor, if this is a wheel that has one built from these sources."""
    if not PREBUILT.is_dir():
        return None
    made_of = sources_hash()
    paths = (PREBUILT / f"{build.name}-{made_of}.so" for build in BUILDS if build.runs_on(features, model))
    return next((path for path in paths if path.is_file() and is_whole(path)), None)
