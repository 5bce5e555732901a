"""Mappings of their own: zeros like any other, given back when they are freed."""

from __future__ import annotations

import re
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas import runtime
from eyas.runtime import WeightMemory, keep_freed_memory, mapped_copy, mapped_zeros

CPU = torch.device("cpu")


def resident() -> int:
    """Resident memory of this process in MiB."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(re.findall(r"^VmRSS:\s+(\d+)", status, re.MULTILINE)[0]) // 1024


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("size", [(0, 3), (2, 5), (3, 70_000, 5)])
def test_they_are_zeros(size: tuple[int, ...], dtype: torch.dtype) -> None:
    made = mapped_zeros(size, dtype, CPU)
    assert (made.shape, made.dtype, made.is_contiguous()) == (size, dtype, True)
    assert not made.any()
    assert (made + 1).all()
    made[:] = 1
    assert made.all()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_is_freed_goes_back_to_the_system() -> None:
    before = resident()
    made = mapped_zeros((64, 1 << 20), torch.float32, CPU)  # 256 MiB
    assert resident() - before < 64
    view = made.fill_(1.0)[1:]
    assert resident() - before > 200
    del made
    assert view.sum() == 63 << 20
    del view
    assert resident() - before < 64


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_copies_that_come_and_go_leave_no_holes() -> None:
    keep_freed_memory()
    source = torch.arange(3 * (1 << 20)).float().view(3, -1)[:, 1:]
    before = resident()
    copies = [mapped_copy(source) for _ in range(20)]  # 12 MiB each
    assert all(torch.equal(one, source) and one.is_contiguous() for one in copies[::5])
    between = [torch.ones(1000) for _ in range(20)]
    assert resident() - before > 200
    del copies
    assert resident() - before < 40
    assert len(between) == 20


def test_lack_of_memory_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="memory"):
        mapped_zeros((1 << 50,), torch.float32, CPU)


def test_too_many_mappings_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError

    monkeypatch.setattr("eyas.runtime.mmap.mmap", refuse)
    assert not mapped_zeros((1 << 20,), torch.float32, CPU).any()
    memory = WeightMemory()
    for _ in range(2):
        assert not memory.zeros((1 << 20,), torch.float32, CPU).any()


def test_weights_lie_side_by_side_and_apart() -> None:
    memory = WeightMemory()
    sizes = [(3, 5), (0, 4), (7, 1001), (1 << 25,), ()]  # the fourth is larger than a mapping
    made = [memory.zeros(size, dtype, CPU) for size in sizes for dtype in (torch.uint8, torch.float32)]
    assert not any(weight.any() for weight in made)
    for n, weight in enumerate(made):
        weight.fill_(n)
    assert [weight.shape for weight in made[::2]] == sizes
    assert all((weight == n).all() for n, weight in enumerate(made))
    assert all(weight.data_ptr() % WeightMemory.ALIGNMENT == 0 for weight in made if weight.numel())
    one, other = made[:2]
    assert other.data_ptr() - one.data_ptr() == WeightMemory.ALIGNMENT


@pytest.mark.parametrize(("milliseconds", "kept"), [((9, 0.1, 0.3), True), ((0.1, 9, 20), False)])
def test_weights_are_in_small_pages_once_huge_ones_come_slowly(
    monkeypatch: pytest.MonkeyPatch, milliseconds: tuple[float, ...], kept: bool
) -> None:
    """The first huge page may be fast, because it's only the small pages in front of an aligned one, or slow once."""
    asked = list[bool]()
    mapping = runtime._mapping

    def recorded(nbytes: int, huge: bool) -> Any:
        asked.append(huge)
        return mapping(nbytes, huge)

    times = accumulate(second for after in milliseconds * 3 for second in (1.0, after / 1000))
    monkeypatch.setattr(runtime, "_mapping", recorded)
    monkeypatch.setattr("eyas.runtime.time.perf_counter", lambda: next(times))
    memory = WeightMemory()
    weights = [memory.zeros((WeightMemory.CHUNK,), torch.uint8, CPU) for _ in range(3)]
    assert asked == [True, kept, kept]
    assert not any(weight.any() for weight in weights)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_weights_goes_back_when_all_of_a_mapping_are_freed() -> None:
    memory = WeightMemory()
    before = resident()
    weights = [memory.zeros((10 << 20,), torch.uint8, CPU).fill_(1) for _ in range(24)]  # six to a mapping
    assert resident() - before > 200
    del weights[1:18]
    assert weights[0].all()
    assert 100 < resident() - before < 140  # the first mapping, the last one, and their pages' ends
    del weights
    assert resident() - before < 70  # the next weight may go into the last one
