"""What a machine computes fastest in: measured by one process, the same for all."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from eyas import machine
from eyas.cache.folder import cache_directory
from eyas.machine import measured_once
from eyas.targets.native import library
from eyas.targets.native.library import kernels

HAS_KERNELS = kernels() is not None


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an empty cache directory, where an idle machine's measurements will lie."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(machine, "_machine_is_busy", lambda: False)
    return tmp_path / "eyas" / "machine"


def test_a_measurement_is_taken_once_for_all_processes_to_come(cache: Path) -> None:
    numbers = iter([[0.1, 1 / 3], [7.0, 7.0]])
    first = measured_once("speed", lambda: next(numbers))
    assert measured_once("speed", lambda: next(numbers)) == first == [0.1, 1 / 3]
    (file,) = cache.iterdir()
    assert json.loads(file.read_text(encoding="utf-8"))["processor"] == machine.processor_model()
    assert measured_once("another", lambda: 3) == 3
    file.unlink()
    assert measured_once("speed", lambda: next(numbers)) == [7.0, 7.0]


@pytest.mark.usefixtures("cache")
def test_what_was_measured_on_a_busy_machine_holds_until_it_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = iter([1, 2, 3])
    busy = [True]
    monkeypatch.setattr(machine, "_machine_is_busy", lambda: busy[0])
    assert [measured_once("speed", lambda: next(numbers)) for _ in range(2)] == [1, 1]  # all processes agree
    busy[0] = False
    assert [measured_once("speed", lambda: next(numbers)) for _ in range(2)] == [2, 2]
    busy[0] = True
    assert measured_once("speed", lambda: next(numbers)) == 2


@pytest.mark.parametrize("change", ["processor_model", "processor_flags", "torch"])
def test_another_processor_or_torch_is_measured_anew(change: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured_once("speed", lambda: 1) == 1
    if change == "torch":
        monkeypatch.setattr(torch, "__version__", "1.0")
    else:
        monkeypatch.setattr(machine, change, lambda: "another")
    assert measured_once("speed", lambda: 2) == 2
    assert len(list(cache.iterdir())) == 2


def _measured_by_itself() -> float:
    machine._machine_is_busy = lambda: False

    def own_number() -> float:
        time.sleep(0.2)
        return random.random()

    return measured_once("speed", own_number)


@pytest.mark.slow  # several processes
def test_processes_that_measure_at_once_agree(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EYAS_NATIVE", "0")  # else each would compile the kernels for its empty cache
    assert not cache.exists()
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        found = [pool.apply_async(_measured_by_itself) for _ in range(3)]
        assert len({result.get(300) for result in found}) == 1


def test_what_can_t_be_kept_is_measured_every_time(cache: Path) -> None:
    cache.parent.write_text("not a folder", encoding="utf-8")
    numbers = iter([1, 2])
    assert [measured_once("speed", lambda: next(numbers)) for _ in range(2)] == [1, 2]


@pytest.mark.skipif(sys.platform == "win32", reason="its threads count in steps of 16 ms")
def test_time_that_others_take_does_not_count() -> None:
    began = machine.clock()
    time.sleep(0.1)
    assert machine.clock() - began < 0.05


@pytest.fixture
def homeless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the cache directory of a user without a home will be, in a folder for everybody."""

    def no_home() -> Path:
        raise RuntimeError

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    return tmp_path / f"eyas-{os.getuid()}"


@pytest.mark.skipif(sys.platform == "win32", reason="no owners and modes")
@pytest.mark.parametrize("made", ["by another user", "for all to write", "as a link", "as a file"])
def test_nothing_is_loaded_from_a_folder_that_somebody_else_may_have_filled(
    made: str, homeless: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if made == "as a link":
        (tmp_path / "theirs").mkdir(mode=0o700)
        homeless.symlink_to(tmp_path / "theirs")
    elif made == "as a file":
        homeless.touch()
    else:
        homeless.mkdir(mode=0o700)
        if made == "for all to write":
            homeless.chmod(0o777)
        else:
            own = os.getuid()
            monkeypatch.setattr("os.getuid", lambda: own + 1)
            homeless.rename(homeless.with_name(f"eyas-{own + 1}"))
    with pytest.raises(PermissionError, match="nothing is loaded from it: remove it, or set XDG_CACHE_HOME"):
        cache_directory()
    assert measured_once("speed", lambda: 5) == 5
    assert kernels.__wrapped__() is None
    assert ("nothing is loaded" in caplog.text) == HAS_KERNELS


def test_the_folder_of_a_user_without_a_home_is_theirs_alone(homeless: Path) -> None:
    assert cache_directory() == cache_directory() == homeless
    assert homeless.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("damage", ["", "{", "[]", "{}", "null", '{"measured": 3}', "\x00\xff", "flipped"])
def test_a_damaged_measurement_is_named_and_taken_anew(
    damage: str, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert measured_once("speed", lambda: [1, 2]) == [1, 2]
    (file,) = cache.iterdir()
    file.write_text(file.read_text().replace("1,", "7,") if damage == "flipped" else damage, encoding="latin-1")
    assert measured_once("speed", lambda: [3, 4]) == [3, 4]
    assert str(file) in caplog.text
    assert measured_once("speed", lambda: [5, 6]) == [3, 4]


@pytest.mark.skipif(not HAS_KERNELS, reason="no compiler, or neither AVX2 nor AVX-512")
def test_a_truncated_library_is_compiled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Mapping it would end the process with a bus error."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled: list[list[str]] = []

    def compile_it(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        if "-o" in command:
            if "-c" not in command:  # objects of the sources come before
                compiled.append(command)
            Path(command[command.index("-o") + 1]).write_bytes(4096 * b"whole")
        return subprocess.CompletedProcess(command, 0, b"a compiler", b"")

    monkeypatch.setattr("eyas.targets.native.library.subprocess.run", compile_it)
    path = library._compiled("c++", frozenset(), tmp_path / "native")
    assert library._compiled("c++", frozenset(), tmp_path / "native") == path
    assert len(compiled) == 1
    os.truncate(path, 5000)
    assert library._compiled("c++", frozenset(), tmp_path / "native") == path
    assert len(compiled) == 2
    assert str(path) in caplog.text
    assert path.read_bytes().startswith(4096 * b"whole")


@pytest.fixture
def _measured_anew() -> Iterator[None]:
    for measured in (machine._slowdown, machine.report_slow, machine.cpu_trains_in):
        measured.cache_clear()
    yield
    for measured in (machine._slowdown, machine.report_slow, machine.cpu_trains_in):
        measured.cache_clear()


@pytest.mark.usefixtures("_measured_anew")
@pytest.mark.parametrize(("half", "fast"), [(0.7, True), (1.5, True), (1.6, False), (28.0, False)])
def test_half_precision_may_be_half_as_slow_again_as_float32(
    half: float, fast: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Measured once; float32 is never measured. Reported, once, by who gives it up for float32."""
    seconds = {torch.bfloat16: [half], torch.float32: [1.0]}
    monkeypatch.setattr(machine, "_product_seconds", lambda dtype: seconds[dtype].pop())
    assert machine.cpu_computes_in(torch.float32)
    assert seconds[torch.float32]
    assert [machine.cpu_computes_in(torch.bfloat16) for _ in range(3)] == [fast] * 3
    assert not caplog.records
    machine.report_slow(torch.bfloat16)
    machine.report_slow(torch.bfloat16)
    warnings = [f"this CPU is {half:.1f} times slower in bfloat16 than in float32"]
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
        machine, "_product_seconds", lambda dtype, count=8: half[count] if dtype == torch.bfloat16 else 1.0
    )
    assert machine.cpu_trains_in(torch.float32)
    assert machine.cpu_trains_in(torch.bfloat16) == trains


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_measurement_is_its_best_run_and_leaves_the_threads_as_they_were(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 9.0] * 5 + [20.0, 20.25] + [30.0, 31.0] * 2)
    monkeypatch.setattr("eyas.machine.clock", lambda: next(clock))
    before = torch.get_num_threads()
    assert machine._measure_product(dtype, 8) == 0.25
    assert torch.get_num_threads() == before


@pytest.mark.usefixtures("_measured_anew")
@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX2", reason="another CPU than the one this is about")
@pytest.mark.skipif(torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has bfloat16 kernels")
def test_a_cpu_of_plain_avx2_does_not_compute_in_bfloat16() -> None:
    assert not machine.cpu_computes_in(torch.bfloat16)
