"""Files behind URLs: fsspec's file systems in memory and on this disk; what is missing or out of reach is said."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from eyas import urls
from eyas.errors import DataError, OutputError, UsageError
from eyas.files import write_text, writing
from eyas.urls import UrlPath, deliver, fetch, is_url, located, mirror


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]


def test_what_is_a_url() -> None:
    for text in ("s3://bucket/store", "s3:/bucket/store", "memory://a", "hf://datasets/x", "file:///tmp"):
        assert is_url(text), text
        assert is_url(Path(text)), text
    for text in ("store", "/tmp/s3:/x", "C:/store", "./a:b", "a:b"):
        assert not is_url(text), text
    assert str(located(Path("memory://bucket/store/"))) == "memory://bucket/store"
    assert located("file:///tmp/store") == located(Path("file:///tmp/store")) == Path("/tmp/store")
    assert mirror(Path("memory://bucket/a.jsonl")) == Path("remote/memory/bucket/a.jsonl")
    assert mirror(Path("memory://../../a.jsonl")) == Path("remote/memory/a.jsonl")
    assert mirror(Path("a.jsonl")) == Path("a.jsonl")


def test_files_appear_whole_or_not_at_all() -> None:
    folder = located("memory://bucket/store")
    assert isinstance(folder, UrlPath)
    assert not folder.exists()
    write_text(folder / "a.json", "one")
    with writing(folder / "b", "wb") as file:
        file.write(b"two")
        assert not (folder / "b").exists()
    with pytest.raises(TypeError), writing(folder / "b", "wb") as file:
        file.write("text")
    assert (folder / "b").read_bytes() == b"two"
    assert (folder / "a.json").stat().st_size == 3
    assert folder.is_dir()
    assert not folder.is_file()
    assert folder.files() == ["a.json", "b"]
    assert pickle.loads(pickle.dumps(folder)).files() == ["a.json", "b"]
    with pytest.raises(FileNotFoundError):
        (folder / "c").stat()


def test_a_folder_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    local = mirror("memory://bucket/out")
    (local / "part").mkdir(parents=True)
    for name, text in (("manifest.json", "{}"), ("part/x", "xx"), ("z", "z"), (".journal", "no")):
        (local / name).write_text(text)
    order: list[str] = []
    upload = urls._upload
    monkeypatch.setattr(urls, "_upload", lambda target, file: (order.append(file.name), upload(target, file))[1])
    deliver(Path("memory://bucket/out"))
    assert order == ["x", "z", "manifest.json"]  # what says that all is there comes last
    there = located("memory://bucket/out")
    assert isinstance(there, UrlPath)
    assert there.files() == ["manifest.json", "part/x", "z"]
    (local / "z").unlink()
    (local / "part" / "x").write_text("cut short")
    assert fetch(Path("memory://bucket/out")) == local
    assert ((local / "z").read_text(), (local / "part" / "x").read_text()) == ("z", "xx")
    assert fetch("memory://bucket/out/z").read_text() == "z"
    deliver("elsewhere")  # a local path is where it is


def test_what_cannot_be_reached_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="there is nothing at memory://bucket/none"):
        fetch("memory://bucket/none")
    with pytest.raises(UsageError, match=r"abc://x can't be opened: Protocol not known: abc"):
        located("abc://x")
    mirror("memory://bucket/full").parent.mkdir(parents=True)
    mirror("memory://bucket/full").write_text("x")

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("no credentials")

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "put_file", refuse)
    with pytest.raises(
        OutputError, match=r"can't write memory://bucket/full: no credentials\. All of it lies in remote"
    ):
        deliver("memory://bucket/full")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    fsspec.registry  # noqa: B018  # is filled on first use
    with pytest.raises(UsageError, match=r"s3://bucket/store can't be opened: .*s3fs"):
        located("s3://bucket/store")
