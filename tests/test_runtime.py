"""What a process keeps: few compiled kernels, huge pages."""

from __future__ import annotations

import os
import subprocess
import sys
import time
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


@pytest.mark.slow
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
from eyas.runtime import keep_freed_memory, mapped_zeros, use_huge_pages

def huge(tensor):
    begin = end = 0
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if mapping := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = (int(part, 16) for part in mapping.groups())
        if line.startswith("AnonHugePages:") and begin <= tensor.data_ptr() < end:
            return int(line.split()[1]) // 1024

keep_freed_memory()
size, dtype, cpu = (2**18,), torch.float32, torch.device("cpu")  # 1 MiB: less than a huge page
in_heap = [torch.full(size, float(n)) for n in range(32)]
mapped = [mapped_zeros(size, dtype, cpu).fill_(float(n)) for n in range(32)]
unwritten = [mapped_zeros(size, dtype, cpu) for _ in range(8)]  # in front of the others: addresses fall
sparse = mapped_zeros((2**22,), dtype, cpu, huge=False).fill_(1.0)
done = use_huge_pages()
for weights in (in_heap, mapped):
    assert all(bool((weight == n).all()) for n, weight in enumerate(weights))
print(done, huge(in_heap[16]), huge(mapped[16]), huge(sparse))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_was_loaded_moves_into_huge_pages_where_the_system_can() -> None:
    """The heap, and buffers in mappings of their own, behind unused ones; but none that wants small ones."""
    for _ in range(3):  # while others fill the memory, the system may be short of huge pages for a moment
        found = subprocess.run([sys.executable, "-c", HUGE], capture_output=True, text=True, check=True).stdout.split()
        if found[0] == "False":
            pytest.skip("this system has no huge pages on demand")
        in_heap, mapped, sparse = map(int, found[1:])
        if min(in_heap, mapped) >= 24:
            break
    assert min(in_heap, mapped) >= 24  # MiB of 32: the ends of a mapping fill no page
    assert sparse == 0


FREED = """
import re
from pathlib import Path
from eyas.runtime import keep_freed_memory, return_freed_memory

def resident():
    return int(re.findall(r"^VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)[0]) // 1024

keep_freed_memory()
pieces = [b"x" * 1024 * (1 + n % 3) for n in range(2**15)]
del pieces
kept = resident()
return_freed_memory()
print(kept, resident())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_freed_memory_is_returned_when_it_is_asked_for() -> None:
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True).stdout.split()
    assert int(done[0]) - int(done[1]) >= 32


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux counts what its processors have done")
def test_the_work_of_others_is_seen() -> None:
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        assert any(runtime.cores_of_others(1.0) > 0.3 for _ in range(20))  # it may wait for a core
    finally:
        other.kill()
        other.wait()


def test_our_own_work_is_not_that_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    own = iter([5.0, 5.4])
    worked = iter([100.0, 100.5])
    monkeypatch.setattr(time, "process_time", lambda: next(own))
    monkeypatch.setattr(runtime, "_worked", lambda _: next(worked))
    began = time.monotonic()
    seen = runtime.cores_of_others(0.05)
    assert 0.1 / (time.monotonic() - began) <= seen + 1e-9 <= 0.1 / 0.05 + 2e-9


def test_only_the_cores_that_are_ours_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container sees what the whole machine does."""
    rest = "0 0 0 0 0 0 0"
    stat = f"cpu 9999 {rest}\ncpu0 200 0 0 700 0 0 0 0 0 0\ncpu1 5000 {rest}\ncpu10 7000 {rest}\nintr 1 2\n"
    monkeypatch.setattr(runtime.Path, "read_text", lambda *_, **__: stat)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert runtime._worked(True) == 200 / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(
    ("most", "cores", "others", "best"),
    [(2, 2, 0.0, 2), (2, 2, 0.4, 2), (2, 2, 0.7, 1), (2, 2, 1.3, 1), (2, 2, 2.0, 1), (1, 8, 0.0, 1), (4, 4, 2.2, 2),
     (4, 16, 8.0, 4), (8, 2, 0.2, 8), (8, 2, 1.0, 1), (16, 16, 0.9, 15)],
)  # fmt: skip
def test_threads_that_wait_for_each_other_leave_cores_to_others(
    most: int, cores: int, others: float, best: int
) -> None:
    assert runtime.usable_threads(others, cores, most) == best


class Busy:
    """Others that take so many cores from one look to the next."""

    def __init__(self, *others: float | None) -> None:
        self._others = list(others)
        self.seconds = 1.0

    def look(self) -> float | None:
        return self._others.pop(0)


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    yield
    torch.set_num_threads(before)


def followed(cores: runtime.SpareCores, looks: int) -> list[int]:
    """Torch's threads after each look."""
    found = []
    for _ in range(looks):
        cores.follow()
        found.append(torch.get_num_threads())
    return found


@pytest.mark.usefixtures("two_threads")
def test_the_number_of_threads_follows_others_both_ways(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    busy = Busy(0.0, 1.0, 1.0, None, 0.1, 1.0)
    monkeypatch.setattr(runtime, "CoreWatch", lambda **_: busy)
    with runtime.SpareCores("training", torch.device("cpu")) as cores:
        assert followed(cores, 6) == [2, 1, 1, 1, 2, 1]
        busy.seconds = 0.1  # too short a time to tell: nobody looks
        assert followed(cores, 1) == [1]
    assert torch.get_num_threads() == 2
    assert caplog.messages == [
        "other processes use 1.0 of 2 cores: training continues with 1 of 2 threads until they stop"
    ]


@pytest.mark.usefixtures("two_threads")
def test_beside_an_accelerator_threads_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "CoreWatch", lambda **_: Busy(2.0))
    with runtime.SpareCores("training", torch.device("meta")) as cores:
        assert followed(cores, 1) == [2]


def test_on_a_gpu_attention_keeps_off_kernels_that_plan_for_each_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = runtime.inference(torch.backends.cuda.cudnn_sdp_enabled)
    assert plans()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert not plans()
    assert torch.backends.cuda.cudnn_sdp_enabled()
