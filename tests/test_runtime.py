"""What a process keeps (few compiled kernels, huge pages) and what its CPU computes in."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from eyas import runtime
from eyas.targets.linears import can_prepack

PRODUCTS = """
import re
from pathlib import Path
import torch
from eyas.runtime import keep_few_kernels

def resident():
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.findall(r"^VmRSS:\\s+(\\d+)", status, re.MULTILINE)[0]) // 1024

keep_few_kernels()
before = resident()
packed = torch.ops.mkldnn._reorder_linear_weight(torch.ones(64, 64), 1)
for tokens in range(1, 801):
    torch.ops.mkldnn._linear_pointwise(torch.ones(1, tokens, 64), packed, None, "none", [], "")
print(resident() - before)
"""


def growth(**environment: str) -> int:
    """MiB by which a process grows that multiplies 800 numbers of tokens."""
    clean = {name: value for name, value in os.environ.items() if name not in runtime.KERNELS}
    done = subprocess.run(
        [sys.executable, "-c", PRODUCTS], env=clean | environment, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.skipif(not can_prepack(torch.device("cpu"), torch.float32), reason="this torch has no oneDNN")
def test_few_kernels_are_kept_unless_the_environment_wants_more() -> None:
    assert 1.5 * growth() < growth(**dict.fromkeys(runtime.KERNELS, "1024"))


def test_the_environment_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"LRU_CACHE_CAPACITY": "7"}
    monkeypatch.setattr("eyas.runtime.os.environ", environment)
    runtime.keep_few_kernels()
    assert environment == runtime.KERNELS | {"LRU_CACHE_CAPACITY": "7"}


HUGE = """
import re
from pathlib import Path
import torch
from eyas.runtime import keep_freed_memory, use_huge_pages

def huge():
    status = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8")
    return int(re.findall(r"^AnonHugePages:\\s+(\\d+)", status, re.MULTILINE)[0]) // 1024

keep_freed_memory()
weights = [torch.full((2**18,), float(n)) for n in range(32)]
before = huge()
done = use_huge_pages()
assert all(bool((weight == n).all()) for n, weight in enumerate(weights))
print(done, before, huge())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_was_loaded_moves_into_huge_pages_where_the_system_can() -> None:
    done = subprocess.run([sys.executable, "-c", HUGE], capture_output=True, text=True, check=True).stdout.split()
    if done[0] == "False":
        pytest.skip("this system has no huge pages on demand")
    assert int(done[2]) >= int(done[1]) + 24


@pytest.fixture
def _measured_anew() -> Iterator[None]:
    for measured in (runtime.cpu_computes_in, runtime.cpu_trains_in):
        measured.cache_clear()
    yield
    for measured in (runtime.cpu_computes_in, runtime.cpu_trains_in):
        measured.cache_clear()


@pytest.mark.usefixtures("_measured_anew")
@pytest.mark.parametrize(("half", "fast"), [(0.7, True), (1.5, True), (1.6, False), (28.0, False)])
def test_half_precision_may_be_half_as_slow_again_as_float32(
    half: float, fast: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Measured once, and reported once where it is slow; float32 is never measured."""
    seconds = {torch.bfloat16: [half], torch.float32: [1.0]}
    monkeypatch.setattr(runtime, "_product_seconds", lambda dtype: seconds[dtype].pop())
    assert runtime.cpu_computes_in(torch.float32)
    assert seconds[torch.float32]
    assert [runtime.cpu_computes_in(torch.bfloat16) for _ in range(3)] == [fast] * 3
    warnings = [f"this CPU is {half:.1f} times slower in bfloat16 than in float32"] * (not fast)
    assert [record.getMessage().split(",")[0] for record in caplog.records if record.name == "eyas"] == warnings


@pytest.mark.usefixtures("_measured_anew")
@pytest.mark.parametrize(
    ("few", "many", "trains"), [(0.7, 0.6, True), (0.7, 1.9, False), (1.2, 1.0, True), (9.0, 0.5, False)]
)
def test_training_is_in_half_precision_only_where_that_is_no_slower(
    few: float, many: float, trains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few tokens wait for memory, many for arithmetic: a CPU may be fast at one and slow at the other."""
    half = {8: few, 256: many}
    monkeypatch.setattr(
        runtime, "_product_seconds", lambda dtype, count=8: half[count] if dtype == torch.bfloat16 else 1.0
    )
    assert runtime.cpu_trains_in(torch.float32)
    assert runtime.cpu_trains_in(torch.bfloat16) == trains


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_measurement_is_its_best_run_and_leaves_the_threads_as_they_were(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 9.0] * 5 + [20.0, 20.25] + [30.0, 31.0] * 2)
    monkeypatch.setattr("eyas.runtime.time.perf_counter", lambda: next(clock))
    before = torch.get_num_threads()
    assert runtime._product_seconds(dtype) == 0.25
    assert torch.get_num_threads() == before


@pytest.mark.usefixtures("_measured_anew")
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX2", reason="another CPU than the one this is about")
@pytest.mark.skipif(torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has bfloat16 kernels")
def test_a_cpu_of_plain_avx2_does_not_compute_in_bfloat16() -> None:
    assert not runtime.cpu_computes_in(torch.bfloat16)
