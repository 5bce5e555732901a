"""Capture: the same bytes whatever interrupts or divides it; what it will not do, it says before it starts."""

from __future__ import annotations

import json
import resource
import shutil
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from eyas.data.capture.capture import Capture
from eyas.data.capture.shard import read_rows
from eyas.data.store import FeatureStore
from eyas.errors import DataError, RequestError, StoreError
from eyas.text.chats import Chat, Message, exchange, write_chats

from ... import tiny
from ...pairs import tokenizer
from ..store.conftest import captured, prepare


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    captured(folder)
    return folder


def test_a_store_is_its_shards_and_a_manifest_that_names_them(whole: Path) -> None:
    store = FeatureStore.open(whole)
    assert {shard.file for shard in store.manifest.shards} | {"manifest.json", "capture.json"} == set(contents(whole))
    assert list(store.verify()) == []
    assert store.settings.taps == (1, 2, 4)
    assert store.settings.splits["train"].dropped == 1
    assert store.manifest.versions["torch"]
    for split, facts in store.settings.splits.items():
        shards = [shard for shard in store.manifest.shards if shard.split == split]
        assert facts.size == tuple(map(sum, zip(*(shard.size for shard in shards), strict=True)))


def test_any_shards_missing_are_made_again_the_same(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "store")
    store = tmp_path / "store"
    (store / "manifest.json").unlink()
    (store / "train-00001.safetensors").unlink()
    (store / ".train-00000.safetensors.tmp").mkdir()  # what a killed process was at
    (store / ".train-00000.safetensors.tmp" / "train-00000.safetensors").write_bytes(b"torn")
    short = store / "validation-00000.safetensors"
    short.write_bytes(short.read_bytes()[:-5])
    before = (store / "train-00000.safetensors").stat().st_mtime_ns
    with pytest.raises(StoreError, match="its capture never finished; run it again"):
        FeatureStore.open(store)
    prepared = prepare(store)
    assert {plan.file for plan in prepared.missing()} == {"train-00001.safetensors", short.name}
    with prepared.begun():
        assert prepared.run() is not None
    assert contents(store) == contents(whole)
    assert (store / "train-00000.safetensors").stat().st_mtime_ns == before


def test_processes_share_the_shards_and_need_not_be_as_many_again(whole: Path, tmp_path: Path) -> None:
    others = [prepare(tmp_path, rank=rank, world=3) for rank in range(3)]
    for rank in (2, 0):
        with others[rank].begun():
            assert others[rank].run() is None
    assert not (tmp_path / "manifest.json").exists()
    pair = [prepare(tmp_path, rank=rank, world=2) for rank in range(2)]
    with pair[0].begun(), pair[1].begun():  # at once
        results = [process.run() for process in pair]
    assert [result is not None for result in results] == [False, True]
    assert contents(tmp_path) == contents(whole)


def test_a_folder_that_is_something_else(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "store")
    other = prepare(tmp_path / "store", states="bf16", longest=20)
    with pytest.raises(
        StoreError, match=r"layout.states was 'fp8', is 'bf16' \(`states=`\); longest was 100, is 20 \(`max_"
    ):
        other.begun().__enter__()
    (tmp_path / "notes").write_text("mine")
    with pytest.raises(StoreError, match="holds other files"):
        prepare(tmp_path).begun().__enter__()
    assert (tmp_path / "notes").exists()
    with prepare(tmp_path / "x").begun(), pytest.raises(StoreError, match="another process is capturing into"):
        prepare(tmp_path / "x").begun().__enter__()


def test_a_shard_with_a_flipped_bit_is_not_called_complete(
    whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = tmp_path / "store"
    shutil.copytree(whole, store)
    damaged = store / "train-00001.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    prepared = prepare(store)
    assert [plan.file for plan in prepared.missing()] == [damaged.name]
    assert f"{damaged} is damaged" in caplog.text
    with prepared.begun():
        assert prepared.run() is not None
    assert contents(store) == contents(whole)
    assert caplog.text.count("is damaged") == 1


def test_damage_is_found_where_it_lies(whole: Path, tmp_path: Path) -> None:
    def damaged(file: str, offset: int) -> FeatureStore:
        folder = tmp_path / f"{file}{offset}"
        shutil.copytree(whole, folder)
        data = bytearray((folder / file).read_bytes())
        data[offset] ^= 1
        (folder / file).write_bytes(data)
        return FeatureStore.open(folder)

    at_end = damaged("train-00001.safetensors", -1)
    (message,) = at_end.verify()
    assert "train-00001.safetensors is damaged; delete the file and capture again" in message
    last = sum(shard.rows for shard in at_end.manifest.shards[:2]) - 1
    with pytest.raises(StoreError, match=r"train-00001.safetensors is damaged: the checksum of row"):
        [at_end.read(number) for number in range(last + 1)]
    header = int.from_bytes((whole / "train-00000.safetensors").read_bytes()[:8], "little")
    layout = at_end.layout
    shard = at_end.manifest.shards[0]
    offsets = json.loads((whole / shard.file).read_bytes()[8 : 8 + header])
    with pytest.raises(StoreError, match="the tokens of train differ from those captured"):
        damaged(shard.file, 8 + header + offsets["tokens"]["data_offsets"][0]).rows("train")
    with pytest.raises(StoreError, match=r"can't read|the tensors in .* differ"):
        damaged(shard.file, 12).read(0)
    assert layout.shard_bytes(shard.size) == shard.bytes


def test_shards_cut_short_or_gone(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "store")
    file = tmp_path / "store" / "train-00001.safetensors"
    size = file.stat().st_size
    with file.open("r+b") as out:
        out.truncate(size - 100)
    with pytest.raises(StoreError, match=rf"train-00001.safetensors has {size - 100:,} bytes, not {size:,}.*cut short"):
        FeatureStore.open(file.parent)
    file.unlink()
    with pytest.raises(StoreError, match=r"train-00001.safetensors is missing.*capture again"):
        FeatureStore.open(file.parent)
    with pytest.raises(StoreError, match=r"no manifest.json: it is not a feature store"):
        FeatureStore.open(tmp_path)
    (file.parent / "manifest.json").write_text('{"settings": 3}')
    with pytest.raises(StoreError, match=r"manifest.json can't be read by this version of eyas \(settings"):
        FeatureStore.open(file.parent)


def test_a_disk_that_is_too_small_is_refused_with_what_would_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = prepare(tmp_path / "store", states="bf16", final="all")
    free = 2**20 + prepared.total_bytes // 2 + 2000
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(0, 0, free))
    needed = f"needs {prepared.total_bytes:,} bytes"
    with pytest.raises(StoreError, match=needed + r".*`states=fp8` `final=answers` \(.* of the 29 rows") as refusal:
        prepared.begun().__enter__()
    assert "`states=bf16` `final=answers`" not in str(refusal.value)
    assert not list((tmp_path / "store").glob("*.safetensors"))


@contextmanager
def files_of_at_most(count: int) -> Iterator[None]:
    """As a full disk does it: writing fails in the middle of a file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_fills_up_loses_nothing_that_was_done(whole: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    prepared = prepare(store)
    sizes = [shard.bytes for shard in FeatureStore.open(whole).manifest.shards]
    first_too_big = next(i for i in range(1, len(sizes)) if sizes[i] > max(sizes[:i]))
    with (
        files_of_at_most(sizes[first_too_big] - 1),
        prepared.begun(),
        pytest.raises(StoreError, match=r"can't write .*Earlier shards are complete; free some space and run the same"),
    ):
        prepared.run()
    kept = {name: data for name, data in contents(store).items() if name != "capture.json"}
    assert len(kept) == first_too_big
    again = prepare(store)
    with again.begun():
        again.run()
    assert contents(store) == contents(whole)


def test_progress_counts_every_token_once(tmp_path: Path) -> None:
    seen: list[int] = []
    prepared = prepare(tmp_path)
    with prepared.begun():
        assert prepared.speed() > 0
        prepared.run(seen.append)
    assert sum(seen) == sum(split.tokens for split in prepared.settings.splits.values())


def test_a_small_capture_loses_little_when_it_is_stopped(tmp_path: Path) -> None:
    """Where nobody says how large shards are, few chats are in several too, of a batch at least."""
    small = prepare(tmp_path / "a", shard_bytes=None, batch_tokens=20)
    assert len(small.plans) > 12
    assert len(prepare(tmp_path / "b", shard_bytes=None, batch_tokens=10**6).plans) == 2  # a split each
    assert prepare(tmp_path / "c", batch_tokens=None).settings.batch_tokens == 1024  # on a CPU


def test_a_capture_goes_on_with_the_sizes_that_it_began_with(tmp_path: Path) -> None:
    """Those of a version with other defaults, say."""
    before = prepare(tmp_path, shard_bytes=14_000, batch_tokens=60)
    with before.begun():
        pass
    again = prepare(tmp_path, shard_bytes=None, batch_tokens=None)
    with again.begun():
        again.run()
    assert again.settings == before.settings


def test_the_estimate_is_a_small_part_of_the_work(tmp_path: Path) -> None:
    prepared = prepare(tmp_path)
    read: list[int] = []

    class Counting:
        device = prepared.source.device

        def trace(self, tokens: Any, lengths: Any, taps: Any) -> Any:
            read.append(int(lengths.sum()))
            return target.trace(tokens, lengths, taps)

    target = prepared.source
    prepared.source = Counting()  # type: ignore[assignment]
    total = sum(plan.size.tokens for plan in prepared.plans)
    assert prepared.speed() > 0
    assert sum(read) < total / 3  # four rows of 29: a batch of theirs alone would be a fifth of this work


def test_taps(tmp_path: Path) -> None:
    assert prepare(tmp_path, taps=None).settings.taps == (1, 3, 4)
    everywhere = prepare(tmp_path, taps=(2, 5), final="all").settings
    assert everywhere.taps == (2, 5)
    assert everywhere.layout.taps == (2,)  # the final state isn't stored twice
    with pytest.raises(StoreError, match=r"boundary 5 is the final state at every position.*use `final=all`"):
        prepare(tmp_path, taps=(2, 5))
    with pytest.raises(RequestError, match="boundaries"):
        prepare(tmp_path, taps=(2, 6))


def test_rows_that_teach_nothing_are_dropped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    good = [exchange(f"c{i}", f"In May {i}?", "24 clips") for i in range(5)]
    silent = Chat(id="silent", messages=(Message(role="user", content="Hello"),))
    foreign = Chat(id="foreign", messages=good[0].messages, tokens=(1, 5, 9999), answers=((2, 3),))
    write_chats(path, [*good, silent, foreign])
    found = read_rows(tokenizer(), path, 0.0, 64, 400)
    assert [row.id for row in found.rows["train"]] == [f"c{i}" for i in range(5)]
    assert found.dropped == {"train": 2, "validation": 0}
    assert found.reasons == [
        "chat foreign: token 9999 is outside the target's vocabulary of 400: "
        "its tokens were made with another tokenizer"
    ]
    write_chats(path, [silent, foreign])
    with pytest.raises(DataError, match=r"no training chat .* \(2 were dropped; the first of them: chat foreign"):
        read_rows(tokenizer(), path, 0.0, 64, 400)


def test_chats_and_tokens_that_are_cut_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    write_chats(path, [exchange(f"c{i}", "In May?", "24 clips " * (i + 1)) for i in range(6)])
    whole = [len(row.tokens) for row in read_rows(tokenizer(), path, 0.0, None, 400).rows["train"]]
    longest = whole[3]
    found = read_rows(tokenizer(), path, 0.0, longest, 400)
    assert found.cut == {"train": 2, "validation": 0}
    assert found.lost == {"train": whole[4] + whole[5] - 2 * longest, "validation": 0}
    assert sum(found.lost.values()) == sum(whole) - sum(len(row.tokens) for row in found.rows["train"])


def test_states_that_overflow_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: Capture = prepare(tmp_path)
    trace = tiny.target().trace

    def overflowing(*arguments: Any) -> Any:
        made = trace(*arguments)
        made.taps[0, 0, 0, 0] = float("inf")
        return made

    monkeypatch.setattr(tiny.target(), "trace", overflowing)
    with prepared.begun(), pytest.raises(StoreError, match="overflow"):
        prepared.run()
