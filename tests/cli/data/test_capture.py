"""`eyas data capture` as it is run: killed, resumed, through torchrun; and what it says."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from click.testing import Result

from eyas.data.store import FeatureStore
from eyas.text.chats import exchange, write_chats

from ...forks import Fork
from ...pairs import Pair

Run = Callable[..., Result]
Options = tuple[str | Path | float, ...]

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "eyas")


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    write_chats(path, [exchange(f"c{i}", f"What is {i}+{i} in May?", f"<<{i}+{i}={2 * i}>> clips") for i in range(70)])
    return path


@pytest.fixture(scope="module")
def options(pair: Pair, chats: Path) -> Options:
    """Some fifty shards of a row or two each."""
    return (
        "data",
        "capture",
        "--model",
        pair.model,
        "--chats",
        chats,
        "--held-out-share",
        0.1,
        "--dtype",
        "float32",
        "--shard-mib",
        0.01,
        "--batch-tokens",
        64,
        "--output",
    )


@pytest.fixture(scope="module")
def whole(run: Run, options: Options, tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = tmp_path_factory.mktemp("whole") / "store"
    result = run(*options, store)
    assert result.exit_code == 0, result.output
    following = result.stderr.splitlines()[-1]
    assert following.startswith("next: eyas train eagle3 drafter.target=")
    assert following.endswith(f"drafter.store={store} drafter.output={store.parent / 'eagle3'}")
    return store


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def killed(options: Options, store: Path, wait: Callable[[int], bool]) -> bool:
    """Run until `wait` is true of the number of files there, then kill -9; False if it ended before."""
    process = Fork(["-m", "eyas", *options, store])
    while process.poll() is None:
        if wait(len(list(store.glob("*")))):
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.001)
    return process.wait() == -signal.SIGKILL


@pytest.mark.parametrize("by", [["-m", "eyas"], pytest.param(TORCHRUN, marks=pytest.mark.slow)], ids=["one", "two"])
def test_killed_and_resumed_ends_the_same(options: Options, whole: Path, tmp_path: Path, by: Sequence[str]) -> None:
    """Resumed by one process, or by two."""
    store, errors = tmp_path / "store", tmp_path / "errors"
    assert killed(options, store, lambda files: files > 20)
    assert 10 < len(contents(store)) < len(contents(whole))  # a file that is renamed may be counted twice
    resumed = Fork([*by, *options, store], stderr=errors)
    assert resumed.wait(100) == 0, errors.read_text()
    assert " shards at " in errors.read_text()  # what is left, not all
    assert contents(store) == contents(whole)


@pytest.mark.slow
def test_killed_at_ten_random_moments(options: Options, whole: Path, tmp_path: Path) -> None:
    draw = random.Random(5)
    store = tmp_path / "store"
    files = len(contents(whole))
    for _ in range(10):
        there = len(list(store.glob("*")))
        at = there + draw.randrange(0, max(1, (files - there) // 4))
        delay = draw.random() * 0.02
        killed(options, store, lambda found, at=at, delay=delay: found >= at and not time.sleep(delay))
    subprocess.run([sys.executable, *TORCHRUN, *map(str, options), store], check=True, capture_output=True)
    assert contents(store) == contents(whole)


def test_it_says_what_it_will_take_and_does_nothing(run: Run, options: Options, whole: Path, tmp_path: Path) -> None:
    result = run(*options, tmp_path / "store", "--dry-run")
    assert result.exit_code == 0, result.output
    shards = FeatureStore.open(whole).manifest.shards
    total = sum(shard.bytes for shard in shards)
    assert f"{total:,} bytes in {len(shards)} shards" in result.stderr
    assert "of the classic layout" in result.stderr
    assert "minutes at" in result.stderr
    assert "taps 1, 3, 4: the default ones, because all layers are alike" in result.stderr
    assert not (tmp_path / "store").exists()


def test_bad_options(run: Run, options: Options, whole: Path, tmp_path: Path) -> None:
    for wrong, words, code in (
        (("--taps", "two"), "write auto, or boundaries such as 2,16,29", 2),
        (("--taps", "1,99"), "boundaries between 0 and 5", 2),
        (("--taps", "5"), "use --final all", 1),
        (("--states", "int4"), "'int4' is not one of", 2),
        (("--final", "top"), "top:K such as top:64", 2),
        (("--final", "top:0"), "top:K such as top:64", 2),
    ):
        result = run(*options, tmp_path / "store", *wrong)
        assert result.exit_code == code, result.output
        assert words in result.stderr
    assert not (tmp_path / "store").exists()
    result = run(*options, whole, "--states", "bf16")
    assert result.exit_code == 1
    assert (
        "holds another capture (layout.states was 'fp8', is 'bf16' (--states)): choose another folder" in result.stderr
    )


def test_chats_beyond_the_context_are_refused_unless_they_are_to_be_cut(run: Run, pair: Pair, tmp_path: Path) -> None:
    chats, store = tmp_path / "chats.jsonl", tmp_path / "store"
    words = ("data", "capture", "--model", pair.model, "--chats", chats, "--held-out-share", 0, "--output", store)
    long, whole = (exchange(name, "Clips in May?", "clips " * count) for name, count in (("long", 300), ("whole", 60)))
    write_chats(chats, [long, whole])
    for asked in ((), ("--max-length", 257)):
        refused = run(*words, *asked)
        assert refused.exit_code == 1, refused.output
        assert "1 of the 2 chats in" in refused.stderr
        assert "more tokens than the target's context of 256, the longest " in refused.stderr
        assert "prepare them with --max-length 256" in refused.stderr
        assert "add --too-long cut" in refused.stderr
        assert not store.exists()
    cut = run(*words, "--max-length", 256)
    assert cut.exit_code == 0, cut.output
    assert "1 chats have more than 256 tokens (--max-length): the rest isn't stored" in cut.stderr
    lengths = [len(row.tokens) for row in FeatureStore.open(store).rows("train")]
    assert lengths[0] == 256 > lengths[1] > 60


def test_a_store_behind_a_url(
    run: Run, options: Options, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same files as on this disk; it goes on where it was; readers get a copy."""
    import fsspec

    monkeypatch.chdir(tmp_path)
    system = fsspec.filesystem("memory")
    try:
        result = run(*options, "memory://bucket/store")
        assert result.exit_code == 0, result.output
        assert "memory://bucket/store is complete" in result.stderr
        there = {name.removeprefix("/bucket/store/"): system.cat_file(name) for name in system.find("/bucket/store")}
        assert there == contents(whole)
        system.rm("/bucket/store/manifest.json")
        (shard,) = [name for name in system.find("/bucket/store") if name.endswith("train-00003.safetensors")]
        system.rm(shard)
        again = run(*options, "memory://bucket/store")
        assert f"1 of {len(there) - 2} shards" in again.stderr
        assert system.cat_file(shard) == there[shard.removeprefix("/bucket/store/")]
        opened = FeatureStore.open(Path("memory://bucket/store"))
        assert opened.folder == Path("remote/memory/bucket/store")
        assert contents(opened.folder) == there
        other = run(*options, "memory://bucket/store", "--states", "bf16")
        assert "memory://bucket/store holds another capture" in other.stderr
        shared = run(*options, "memory://bucket/other", "--on", "ray")
        assert "memory://bucket/other is seen by one process alone" in shared.stderr
    finally:
        system.store.clear()
        system.pseudo_dirs[:] = [""]
