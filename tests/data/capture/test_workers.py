"""A store made by workers: the same bytes as by one process, whoever dies; and what workers refuse."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from eyas.data.capture import workers
from eyas.data.capture.capture import captured_target
from eyas.data.capture.workers import CaptureWorker, CaptureWorkerMaker, capture_on
from eyas.data.store.manifest import CaptureSettings, Manifest
from eyas.errors import ClusterError, StoreError
from eyas.labs.cluster import worker
from eyas.targets import Target

from ... import tiny
from ...labs.cluster.fake import FakeExecutor
from ...toy.pair import TOY_TARGET
from ..store.conftest import captured, prepare


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def made(folder: Path, settings: CaptureSettings, seed: int = 0) -> CaptureWorker:
    target = Target(tiny.build_model("llama", seed=seed))
    return CaptureWorker(target, folder, settings, captured_target(target, settings.target.name))


def on_workers(folder: Path, executor: FakeExecutor, seed: int = 0) -> tuple[Manifest, list[int]]:
    prepared = prepare(folder)
    tokens = list[int]()
    with prepared.begun():
        make = partial(made, folder, prepared.settings, seed)
        return capture_on(executor, prepared, make, advance=tokens.append), tokens


@pytest.mark.parametrize("deaths", [0, 6])
def test_the_same_bytes_whoever_dies(deaths: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "EXCHANGE_SECONDS", 0.0)
    store = captured(tmp_path / "one")
    executor = FakeExecutor(seed=4, deaths=deaths)
    manifest, tokens = on_workers(tmp_path / "many", executor)
    assert executor.deaths <= deaths // 2  # they did die
    assert contents(tmp_path / "many") == contents(tmp_path / "one")
    assert manifest == store.manifest
    assert sum(tokens) == sum(split.tokens for split in manifest.settings.splits.values())
    assert deaths == 0 or min(tokens) < 0  # the bar goes back


def test_only_what_is_missing_is_made(tmp_path: Path) -> None:
    captured(tmp_path)
    before = contents(tmp_path)
    (tmp_path / "train-00001.safetensors").unlink()
    executor = FakeExecutor()
    on_workers(tmp_path, executor)
    assert executor.started == 1
    assert contents(tmp_path) == before
    executor = FakeExecutor()
    on_workers(tmp_path, executor)
    assert executor.started == 0


def test_another_target_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="computes with something else: fingerprint was"):
        on_workers(tmp_path, FakeExecutor(), seed=1)


def test_a_folder_that_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepare(tmp_path / "here")
    make = CaptureWorkerMaker(TOY_TARGET, "float32", None, tmp_path / "there", prepared.settings)
    with pytest.raises(StoreError, match="`output=` must be a folder that all machines share"):
        make()
    monkeypatch.setattr(workers, "VISIBILITY_TIMEOUT", 0.0)
    elsewhere = partial(made, tmp_path / "there", prepared.settings)
    with (
        prepared.begun(),
        pytest.raises(StoreError, match=r"train-00000\.safetensors.*can't be seen in .*is it shared"),
    ):
        capture_on(FakeExecutor(), prepared, elsewhere)


def test_a_full_disk_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise StoreError("can't write train-00000.safetensors (1 bytes): No space left on device")

    monkeypatch.setattr("eyas.data.capture.capture.write_shard", full)
    with pytest.raises(ClusterError, match=r"No space left on device \(the worker on "):
        on_workers(tmp_path, FakeExecutor())
