"""The kernels that come with a wheel: which processor gets which, and that they compute the same bits."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from eyas.machine import processor_flags, processor_model
from eyas.targets.native import builds, linears
from eyas.targets.native.builds import BUILDS, FLAGS, compile_library, compiler, prebuilt, sources_hash
from eyas.targets.native.library import KINDS, Kernels, kernels
from eyas.targets.native.linears import PackedLinear
from eyas.targets.native.packed import Kind, random_blocks

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
    best, next_best = library(tmp_path, "avx512"), library(tmp_path, "avx2")
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
    here, found = kernels(), compiler()
    if here is None or found is None:
        pytest.skip("no compiler, or no AVX2")
    compile_library(found, (*FLAGS, *build.flags), tmp_path / "kernels.so")
    if not build.needs <= processor_flags():
        return
    torch.manual_seed(0)
    made = Kernels(tmp_path / "kernels.so")
    for dtype in KINDS:
        weight = torch.randn(48, 64).mul(40).to(dtype)
        packed = [each.pack(weight) for each in (here, made)]
        assert torch.equal(*packed)
        assert torch.equal(made.unpack(packed[1], 48), weight)
    assert made.ways == here.ways or not processor_model().startswith("AMD")
    assert made.vnni == ("vnni" in " ".join(build.flags))
    x = torch.randn(33, 70)
    packed = [PackedLinear.of_blocks(random_blocks(kind, 40, 70), "", x.dtype, 70, None, False) for kind in Kind]
    expected = [each(x) for each in packed]
    monkeypatch.setattr(linears, "loaded_kernels", lambda: made)
    assert all(torch.equal(each(x), products) for each, products in zip(packed, expected, strict=True))
