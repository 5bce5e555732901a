"""Runs the target once over all chats and writes its states to a store, shard by shard; safe to kill at any moment.

Shards are planned before anything runs, and each is a pure function of its rows. So the work is divided by shard number
among any number of processes, which needn't communicate: each process makes those of its shards that are missing, and
the one that finds all shards finished writes the manifest.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path

from pydantic import Field

from eyas.config import StrictModel
from eyas.data.capture.shard import (
    CaptureRows,
    ShardPlan,
    StateSource,
    cut_shards,
    length_groups,
    shard_tensors,
    traced_rows,
)
from eyas.data.store.layout import FinalKind, RowTotals, ShardLayout, StateEncoding, size_of, variants
from eyas.data.store.manifest import (
    MANIFEST,
    SETTINGS,
    CapturedTarget,
    CaptureSettings,
    Manifest,
    StateEngine,
    StoredShard,
    StoredSplit,
    changed_settings,
    data_digest,
    lock_store,
    read_manifest,
    read_settings,
    rows_hash,
    shard_digest,
    write_model,
    write_shard,
)
from eyas.data.tokens.batches import padded
from eyas.data.tokens.tokenize import TokenRow
from eyas.errors import StoreError
from eyas.files import remove_leftovers
from eyas.runtime import versions
from eyas.targets import Target
from eyas.targets.fingerprint import embedding_head_fingerprint, fingerprint
from eyas.targets.taps import choose_taps, why_taps
from eyas.urls import AnyPath

_LOG = logging.getLogger("eyas")

SHARD_BYTES = 2**29
_SHARDS = 16
"""Shards that a small capture is cut into, because an interruption loses the shard in progress."""
_ESTIMATE_SHARE = 0.01
"""Maximum share of the work to spend on estimating how long it takes."""
_SPARE_BYTES = 2**20
"""Disk space reserved for the manifest and the settings."""


class CaptureConfig(StrictModel):
    """Options of `eyas data capture`: which states are stored, and in which form."""

    taps: tuple[int, ...] | None = None
    """Boundaries to tap; None: chosen from the target's architecture."""
    states: StateEncoding = "fp8"
    final: FinalKind = "answers"
    top: int | None = Field(default=None, gt=0)
    batch_tokens: int | None = Field(default=None, gt=0)
    """Tokens per batch of the target, padding included. None: 8192, or 1024 on a CPU, where more isn't faster."""
    shard_bytes: int | None = Field(default=None, gt=0)
    """Maximum bytes of data in a shard; a larger row gets a shard of its own. None: a sixteenth of the data, at least
    a batch and at most 512 MiB."""
    engine: StateEngine = "eyas"
    """What runs the target; any engine other than eyas is the capture's `source`, set before anything runs."""


class Capture:
    """A capture whose shards are all planned in advance. Process `rank` of `world` makes every world-th shard."""

    def __init__(
        self,
        target: Target,
        found: CaptureRows,
        config: CaptureConfig,
        folder: AnyPath,
        *,
        name: str,
        chats: str,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        """`name` and `chats` identify the target and the data in the manifest."""
        self.folder = folder
        self.rows = found.rows
        self.reasons = found.reasons
        self.cut = sum(found.cut.values())
        self._rank = rank
        self._world = world
        self.settings = capture_settings(target, name, chats, found, config, read_settings(folder))
        self.why_taps = why_taps(target.config, self.settings.taps)
        """A sentence that explains the choice of taps."""
        self.context = target.max_length
        """The target's context in tokens; None: no limit is known."""
        self.source: StateSource = target
        """What computes the states in this process."""
        self.engine_version: str | None = None
        """Version of an engine other than eyas; None: unknown, because it had nothing to do."""
        self.plans = cut_shards(found.rows, self.settings.layout, self.settings.shard_bytes)
        self._whole: dict[str, bool] = {}  # of this process's shards: whether their data has the hash they declare

    @cached_property
    def total_bytes(self) -> int:
        """The exact size of all shard files together, in bytes."""
        return sum(self.settings.layout.shard_bytes(plan.size) for plan in self.plans)

    def missing(self) -> list[ShardPlan]:
        """The unfinished shards of all processes."""
        return [plan for plan in self.plans if self._digest(plan) is None]

    def own_shards(self) -> list[ShardPlan]:
        """Unfinished shards that this process makes."""
        mine = {plan.file for plan in self.plans[self._rank :: self._world]}
        return [plan for plan in self.missing() if plan.file in mine]

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Lock and prepare the folder for the block.

        Raises StoreError if it holds another capture, another process is capturing into it, or the disk is too small.
        """
        before = read_settings(self.folder)
        if before is not None and before.identity != self.settings.identity:
            changed = "; ".join(changed_settings(before, self.settings))
            raise StoreError(
                f"{self.folder} holds another capture ({changed}): choose another folder, or delete this one"
            )
        with ExitStack() as stack:
            if isinstance(self.folder, Path):  # behind a URL there are no locks, but two captures write the same bytes
                self.folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(lock_store(self.folder, alone=self._world == 1))
                remove_leftovers(self.folder)
            if before is None and self._rank == 0:
                if self._world == 1 and _used(self.folder):
                    raise StoreError(f"{self.folder} holds other files: choose an empty or a new folder")
                write_model(self.folder / SETTINGS, self.settings)
            self.check_disk()
            yield

    def check_disk(self) -> None:
        """Raise StoreError if the missing shards don't fit on the disk; the message lists what would fit.

        A folder behind a URL isn't checked, since its free space is unknown.
        """
        if not isinstance(self.folder, Path):
            return
        layout = self.settings.layout
        needed = sum(layout.shard_bytes(plan.size) for plan in self.missing())
        free = shutil.disk_usage(_existing(self.folder)).free - _SPARE_BYTES
        if needed <= free:
            return
        sizes = [facts.size for facts in self.settings.splits.values()]
        fitting = [
            f"{option} ({total:,})"
            for option, other in smaller_layouts(layout).items()
            if (total := sum(map(other.data_bytes, sizes))) <= free
        ]
        rows = sum(size.rows for size in sizes)
        fitting.append(f"{max(0, free) * rows // self.total_bytes:,} of the {rows:,} rows")
        raise StoreError(
            f"the store needs {needed:,} bytes, and {self.folder} has {max(0, free):,} free; what would fit: "
            + ", or ".join(fitting)
        )

    def speed(self, batches: int = 3) -> float:
        """Tokens per second, measured on a few batches of this process's next shard; nothing is stored.

        If there is little to capture, they are smaller than its batches, so that the estimate doesn't take long.
        """
        own = self.own_shards()
        rows = self.rows[own[0].split][own[0].first : own[0].stop]
        most = int(_ESTIMATE_SHARE * sum(plan.size.tokens for plan in own))
        groups = length_groups(rows, min(self.settings.batch_tokens, max(1, most)))
        chosen = groups[:: max(1, len(groups) // batches)][:batches]
        tried = [padded([rows[i] for i in members]) for members in chosen]
        for batch in tried[:1]:  # warm-up
            list(traced_rows(self.source, batch, self.settings.layout))
        start = time.perf_counter()
        for batch in tried:
            list(traced_rows(self.source, batch, self.settings.layout))
        return sum(int(batch.lengths.sum()) for batch in tried) / (time.perf_counter() - start)

    def run(self, advance: Callable[[int], None] = lambda _: None) -> Manifest | None:
        """Make this process's missing shards; return the manifest if all shards are then finished, else None.

        `advance` is called with the tokens of each batch done. Raises StoreError if the disk fills up; finished shards
        stay.
        """
        for plan in self.own_shards():
            rows = self.rows[plan.split][plan.first : plan.stop]
            for tokens in make_shard(self.source, self.folder, self.settings, plan, rows):
                advance(tokens)
            self._whole[plan.file] = True
        return self.finish()

    def finish(self) -> Manifest | None:
        """Write and return the manifest if every shard is finished; concurrent processes write the same manifest."""
        digests = [self._digest(plan) for plan in self.plans]
        shards = tuple(
            StoredShard(
                file=plan.file,
                split=plan.split,
                bytes=self.settings.layout.shard_bytes(plan.size),
                sha256=digest,
                **plan.size._asdict(),
            )
            for plan, digest in zip(self.plans, digests, strict=True)
            if digest is not None
        )
        if len(shards) < len(self.plans):
            return None
        with suppress(StoreError):  # there is none yet, or it is damaged
            written = read_manifest(self.folder)
            if (written.settings, written.shards) == (self.settings, shards):
                return written  # it has the versions that made the shards
        engine = {} if self.engine_version is None else {self.settings.engine: self.engine_version}
        manifest = Manifest(settings=self.settings, shards=shards, versions=versions() | engine)
        write_model(self.folder / MANIFEST, manifest)
        return manifest

    def _digest(self, plan: ShardPlan) -> str | None:
        """The hash that a finished shard declares; None if it is unfinished, or damaged and this process's to make."""
        path = self.folder / plan.file
        expected = self.settings.layout.shard_bytes(plan.size)
        digest = shard_digest(path, expected, self.settings.identity)
        if digest is None or not isinstance(path, Path) or plan not in self.plans[self._rank :: self._world]:
            return digest
        if not self._whole.get(plan.file):  # a damaged shard may have been made again
            whole = data_digest(path) == digest
            if not whole and plan.file not in self._whole:
                _LOG.warning("%s is damaged: its data doesn't have the hash it declares; it is captured again", path)
            self._whole[plan.file] = whole
        return digest if self._whole[plan.file] else None


def make_shard(
    source: StateSource, folder: AnyPath, settings: CaptureSettings, plan: ShardPlan, rows: list[TokenRow]
) -> Iterator[int]:
    """Make a shard of its rows and write it to the store's folder; yields the tokens of each batch done."""
    tensors = yield from shard_tensors(source, rows, settings.layout, settings.batch_tokens)
    write_shard(folder / plan.file, settings.layout, plan.size, tensors, settings.identity)


def captured_target(target: Target, name: str) -> CapturedTarget:
    """The description of a target that is stored with its states."""
    return CapturedTarget(
        name=name,
        fingerprint=fingerprint(target.model),
        ends=embedding_head_fingerprint(target.model, target.layers),
        dtype=str(target.dtype).removeprefix("torch."),
        layers=target.num_layers,
    )


def capture_settings(
    target: Target, name: str, chats: str, found: CaptureRows, config: CaptureConfig, begun: CaptureSettings | None
) -> CaptureSettings:
    """The settings that decide the store's bytes; sizes that `config` leaves open are taken from `begun`, if given.

    Raises RequestError for taps that the target doesn't have, and StoreError if the final state is requested as a tap
    but is not kept at every position.
    """
    taps = choose_taps(target.config) if config.taps is None else config.taps
    target.check_taps(taps)
    after = target.num_layers + 1
    if after in taps and config.final != "all":
        raise StoreError(
            f"boundary {after} is the final state at every position, which `final={config.final}` doesn't keep: "
            "use `final=all`"
        )
    layout = ShardLayout(
        hidden=target.hidden_size,
        vocab=target.vocab_size,
        taps=tuple(k for k in taps if k != after),
        states=config.states,
        final=config.final,
        top=config.top,
    )
    if begun is not None:
        batch_tokens, shard_bytes = begun.batch_tokens, begun.shard_bytes
    else:
        batch_tokens = 1024 if target.device.type == "cpu" else 8192
        shard_bytes = _shard_bytes(found.rows.values(), layout, config.batch_tokens or batch_tokens)
    splits = {}
    for split, rows in found.rows.items():
        size = size_of(rows)
        splits[split] = StoredSplit(**size._asdict(), dropped=found.dropped[split], hash=rows_hash(rows))
    return CaptureSettings(
        target=captured_target(target, name),
        engine=config.engine,
        taps=taps,
        layout=layout,
        chats=chats,
        longest=found.longest,
        batch_tokens=config.batch_tokens or batch_tokens,
        shard_bytes=config.shard_bytes or shard_bytes,
        splits=splits,
    )


def _shard_bytes(splits: Iterable[list[TokenRow]], layout: ShardLayout, batch_tokens: int) -> int:
    """Default maximum bytes of a shard; lower for few chats, so that no shard takes long."""
    total = size_of([row for rows in splits for row in rows])
    data = layout.data_bytes(total)
    return min(SHARD_BYTES, max(data // _SHARDS, data * batch_tokens // total.tokens))


def smaller_layouts(layout: ShardLayout) -> dict[str, ShardLayout]:
    """The variants of `layout` that take less space, most exact first."""
    token = RowTotals(1, 1, 1)
    return {o: other for o, other in variants(layout).items() if other.data_bytes(token) < layout.data_bytes(token)}


def _used(folder: AnyPath) -> bool:
    """Whether a folder has any contents."""
    return any(folder.iterdir()) if isinstance(folder, Path) else folder.is_dir()


def _existing(folder: Path) -> Path:
    """The folder itself, or its nearest parent that exists."""
    return folder if folder.exists() else _existing(folder.absolute().parent)
