"""Capture on many machines: each worker has the target and writes one shard after another to the shared folder.

Units are shards with their rows, so workers need neither the chats nor the tokenizer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from eyas.data.capture.capture import Capture, captured_target, make_shard
from eyas.data.capture.shard import StateSource
from eyas.data.store.manifest import CapturedTarget, CaptureSettings, Manifest, read_settings
from eyas.errors import StoreError
from eyas.targets import load_target
from eyas.urls import AnyPath
from eyas.work import Cluster, Key, MakeWorker, Take, Unit, UnitReport

VISIBILITY_TIMEOUT = 60.0
"""Seconds to wait until a shared folder shows what another machine wrote: network file systems have caches."""


class CaptureWorker:
    """Makes shards with its own copy of the target, or with an engine of its own that runs it."""

    def __init__(
        self,
        source: StateSource,
        folder: AnyPath,
        settings: CaptureSettings,
        target: CapturedTarget,
        version: str | None = None,
    ) -> None:
        """`target` describes what the source runs; `version` is that of the other engine, if one runs it."""
        self._source = source
        self._folder = folder
        self._settings = settings
        self._target = target
        self._version = version

    @property
    def identity(self) -> dict[str, Any]:
        return {**self._target.model_dump(mode="json"), "engine_version": self._version}

    def work(self, take: Take) -> Iterator[UnitReport]:
        """Make shards; a report has the number of tokens of the shard that are done so far."""
        while units := take(1):
            (plan, rows), done = units[0].content, 0
            for tokens in make_shard(self._source, self._folder, self._settings, plan, rows):
                done += tokens
                yield UnitReport(plan.file, done, done=False)
            yield UnitReport(plan.file, done)


@dataclass(frozen=True)
class CaptureWorkerMaker:
    """Makes a worker on the machine that it runs on."""

    model: str
    dtype: str
    device: str | None
    folder: AnyPath
    """The absolute path of the store."""
    settings: CaptureSettings

    def __call__(self) -> CaptureWorker:
        """Load the target. Raises StoreError if the store's folder isn't shared with this machine."""
        check_shared(self.folder, self.settings)
        target = load_target(self.model, dtype=self.dtype, device=self.device)
        found = captured_target(target, self.settings.target.name)
        return CaptureWorker(target, self.folder, self.settings, found)


def check_shared(folder: AnyPath, settings: CaptureSettings) -> None:
    """Raise StoreError unless the capture with these settings has begun in the folder, as seen from this machine."""
    begun = read_settings(folder)
    if begun is None or begun.identity != settings.identity:
        raise StoreError(
            f"{folder} isn't the same folder here as where the command runs: `output=` must be a folder that all "
            "machines share, under one path"
        )


def capture_on(
    cluster: Cluster,
    prepared: Capture,
    make: MakeWorker,
    workers: int | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> Manifest:
    """Have workers make all missing shards of a capture that has `begun`, and return the manifest.

    `advance` is called with the number of tokens done; it is negative for tokens that a dead worker had not stored.
    """
    missing = prepared.missing()
    waiting = iter(missing)
    done = dict[Key, int]()

    def take(number: int) -> list[Unit]:
        plans = islice(waiting, number)
        return [Unit(plan.file, (plan, prepared.rows[plan.split][plan.first : plan.stop])) for plan in plans]

    if missing:
        own = prepared.settings.engine == "eyas"  # another engine's version is known from the first worker
        expected = prepared.settings.target.model_dump(mode="json") | {"engine_version": None} if own else None
        size = min(workers or cluster.room, len(missing))
        with cluster.crew(make, workers=size, ahead=1, expected=expected) as crew:
            for report in crew.run(take):
                advance(report.value - done.get(report.key, 0))
                done[report.key] = report.value
            prepared.engine_version = crew.identity()["engine_version"]
    until = time.monotonic() + VISIBILITY_TIMEOUT
    while (manifest := prepared.finish()) is None:
        if time.monotonic() > until:
            names = ", ".join(plan.file for plan in prepared.missing()[:3])
            raise StoreError(f"workers have written {names}, which can't be seen in {prepared.folder}: is it shared?")
        time.sleep(1.0)
    return manifest
