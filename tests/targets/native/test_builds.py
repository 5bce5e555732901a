"""The kernels that come with a wheel: which processor gets which, and that they compute the same bits."""

from __future__ import annotations

import hashlib
from pathlib import Path
from shutil import which

import pytest
import torch

from eyas.machine import processor_flags, processor_model
from eyas.targets.native import builds, linears, ops, packed_linears
from eyas.targets.native.builds import BUILDS, FLAGS, compile_library, compiler, prebuilt, sources_hash
from eyas.targets.native.library import KINDS, Kernels, kernels
from eyas.targets.native.linears import NativeLinear, as_linear
from eyas.targets.native.packed import WeightFormat, random_blocks
from eyas.targets.native.packed_linears import PackedLinear

V3 = "avx2 fma f16c bmi1 bmi2 movbe"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"


def library(folder: Path, name: str, content: bytes = b"code") -> Path:
    path = folder / f"{name}-{sources_hash()}.so"
    path.write_bytes(content + hashlib.sha256(content).digest())
    return path


@pytest.mark.parametrize(
    ("features", "model", "chosen"),
    [
        (V3, "AMD EPYC", "avx2-amd"),
        (V3, "Intel(R) Core(TM)", "avx2"),
        (f"{V3} avx_vnni", "Intel(R) Core(TM)", "avx2-vnni"),
        (V4, "Intel(R) Xeon(R)", "avx512"),
        (f"{V4} avx512_vnni", "Intel(R) Xeon(R)", "avx512-vnni"),
        (f"{V4} avx512_bf16 avx512_vnni", "AMD EPYC", "avx512-bf16-amd"),
        (f"{V4} avx512_bf16 avx512_vnni avx_vnni", "AMD EPYC", "zen5"),
        (f"{V4} avx512_bf16 avx512_vnni avx_vnni", "Intel(R) Xeon(R)", "avx512-bf16"),
        (f"{V4} avx512_bf16 avx512_vnni amx_tile amx_bf16", "Intel(R) Xeon(R)", "amx"),
        (f"{V4} avx512_bf16", "AMD EPYC", "avx512-amd"),
        ("avx2", "AMD EPYC", None),
    ],
)
def test_a_processor_gets_the_best_that_it_runs(
    features: str, model: str, chosen: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builds, "PREBUILT", tmp_path)
    for build in BUILDS:
        library(tmp_path, build.name)
    found = prebuilt(frozenset(features.split()), model)
    assert (None if found is None else found.name.rpartition("-")[0]) == chosen


def test_damaged_libraries_and_those_of_other_sources_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builds, "PREBUILT", tmp_path)
    asked = frozenset(V4.split()), "Intel"
    assert prebuilt(*asked) is None
    best = library(tmp_path, "avx512")
    next_best = library(tmp_path, "avx2")
    assert prebuilt(*asked) == best
    best.write_bytes(best.read_bytes()[:-1])
    assert prebuilt(*asked) == next_best
    next_best.rename(tmp_path / "avx2-0123456789abcdef.so")
    assert prebuilt(*asked) is None


@pytest.mark.slow
@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.name)
def test_every_build_compiles_and_computes_the_same_bits(
    build: builds.Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = kernels()
    found = compiler()
    if here is None or found is None:
        pytest.skip("no compiler, or no AVX2")
    missing = build.needs - processor_flags()
    mark = tmp_path / "as.ran"
    flags = (*FLAGS, *build.flags)
    if missing == {"avx_vnni"} and {"avx512_vnni", "avx512vl"} <= processor_flags():
        flags = (*flags, f"-B{assembler(tmp_path, mark)}/")
    compile_library(found, flags, tmp_path / "kernels.so")
    if missing and not mark.exists():
        pytest.skip(f"it compiles; this processor has no {', '.join(sorted(missing))}")
    made = Kernels(tmp_path / "kernels.so")
    assert made.vnni == any(flag.endswith("vnni") for flag in build.flags)
    assert (
        made.microkernels == here.microkernels
        or "-mavx512bf16" not in build.flags
        or not processor_model().startswith("AMD")
    )
    expected = products()
    for module in (linears, ops, packed_linears):
        monkeypatch.setattr(module, "loaded_kernels", lambda: made)
    assert all(torch.equal(found, other) for found, other in zip(products(), expected, strict=True))


def assembler(folder: Path, mark: Path) -> Path:
    """A folder with an assembler for gcc that gives AVX-VNNI's instructions the encoding that AVX-512 has for them."""
    script = folder / "as"
    change = f'sed -i "s/{{vex}} vpdp/vpdp/" "$file" && touch {mark}'
    script.write_text(f'#!/bin/sh\nfor file; do :; done\n{change} && exec {which("as")} "$@"\n')
    script.chmod(0o755)
    return folder


def products() -> list[torch.Tensor]:
    """What weights of every kind, laid out anew, are multiplied to, and what they come back as."""
    torch.manual_seed(0)
    x = torch.randn(33, 70)
    plain = torch.randn(40, 70)
    layers = [NativeLinear(as_linear(plain.to(dtype)), False) for dtype in KINDS]
    layers += [PackedLinear.of_blocks([random_blocks(kind, 40, 70)], "", x.dtype, (40, 70)) for kind in WeightFormat]
    return [made for layer in layers for made in (layer.product(x, False), layer.exact())]
