"""Files behind URLs, such as s3://bucket/store: whatever fsspec can open.

There are two ways. Code that only writes, lists and reads whole files uses a `UrlPath` like a pathlib.Path: capture
writes its shards straight to the URL. Code that appends to files, locks them or maps them into memory works on a
local `mirror` of the URL, a folder under `remote/` in the working directory, which `fetch` fills and `deliver` uploads.
"""

from __future__ import annotations

import errno
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePath
from typing import IO, Any, NamedTuple

from eyas.errors import DataError, OutputError, UsageError

MIRRORS = Path("remote")
"""The folder of all mirrors, relative to where the command runs."""
LAST = ("manifest.json", "report.json", "config.json")
"""Files that mark a folder as complete: copied after all others."""
ONE_PROCESS = ("memory",)
"""File systems that no other process sees."""


class UrlStat(NamedTuple):
    """What is known about a file behind a URL, under the names of `os.stat_result`."""

    st_size: int


class UrlPath:
    """A file or folder behind a URL, with the methods of pathlib.Path that stores need.

    Files appear whole or not at all, as in object stores. Errors are OSErrors, whatever the file system raises.
    """

    def __init__(self, url: str) -> None:
        """Raises UsageError for a URL that fsspec doesn't know, or whose package is missing."""
        self._url = url.rstrip("/")
        self.system, self.path = _opened(self._url)

    def __str__(self) -> str:
        return self._url

    def __repr__(self) -> str:
        return f"UrlPath({self._url!r})"

    def __truediv__(self, name: str) -> UrlPath:
        return UrlPath(f"{self._url}/{name}")

    def __reduce__(self) -> tuple[type[UrlPath], tuple[str]]:
        return UrlPath, (self._url,)

    @property
    def name(self) -> str:
        """The last part of the URL, after its last slash."""
        return self._url.rpartition("/")[2]

    @property
    def one_process(self) -> bool:
        """Whether only this process sees what is written there."""
        return self._url.partition(":")[0] in ONE_PROCESS

    def absolute(self) -> UrlPath:
        """This path itself: URLs are always absolute."""
        return self

    def is_file(self) -> bool:
        """Whether there is a file behind the URL."""
        with self.errors():
            return bool(self.system.isfile(self.path))

    def is_dir(self) -> bool:
        """Whether anything lies under the URL; object stores have no empty folders."""
        with self.errors():
            return bool(self.system.isdir(self.path))

    def exists(self) -> bool:
        """Whether there is a file or anything below the URL."""
        return self.is_file() or self.is_dir()

    def stat(self) -> UrlStat:
        """The size of a file. Raises FileNotFoundError if there is none."""
        with self.errors():
            return UrlStat(int(self.system.size(self.path)))

    def open(self, mode: str = "rb") -> IO[bytes]:
        """Open the file for reading; `mode` is "rb". To write, use `eyas.files.writing`."""
        if mode != "rb":
            raise ValueError(f"{self._url} is opened for reading only, not with mode {mode!r}")
        with self.errors():
            return self.system.open(self.path, "rb")  # type: ignore[no-any-return]

    def read_bytes(self) -> bytes:
        """The content of the file."""
        with self.open() as file:
            return file.read()

    def files(self) -> list[str]:
        """The names of all files below, relative to this folder, in order."""
        with self.errors():
            root = self.system._strip_protocol(self.path).rstrip("/")  # the form of names in listings
            return sorted(name[len(root) :].lstrip("/") for name in self.system.find(root))

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn everything that a file system's client raises into an OSError with a `strerror`."""
        self.system.invalidate_cache()
        try:
            yield
        except FileNotFoundError:
            raise
        except Exception as error:  # clients have exception trees of their own
            number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
            text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
            raise OSError(number, text, self._url) from error


def _upload(target: UrlPath, file: Path) -> None:
    """Replace the file behind a URL with a local one."""
    with target.errors():
        target.system.makedirs(target.system._parent(target.path), exist_ok=True)  # local file systems
        target.system.put_file(str(file), target.path)


def _download(source: UrlPath, file: Path) -> None:
    """Replace a local file with the one behind a URL; it appears whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f".{file.name}.part")
    with source.errors():
        source.system.get_file(source.path, str(part))
        part.replace(file)


AnyPath = Path | UrlPath
"""A path on this machine, or behind a URL."""


def is_url(path: str | PurePath) -> bool:
    """Whether a path is a URL; a letter and a colon are a drive."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)) is not None


def located(path: str | PurePath) -> AnyPath:
    """The path, local or behind a URL; `file://` is local. UsageError for URLs that can't be opened."""
    if not is_url(path):
        return Path(path)
    text = _url(path)
    return Path(text.removeprefix("file://")) if text.startswith("file://") else UrlPath(text)


def mirror(path: str | PurePath) -> Path:
    """The path of a URL's local copy; a local path is its own mirror."""
    found = located(path)
    if isinstance(found, Path):
        return found
    scheme, _, rest = str(found).partition("://")
    return MIRRORS.joinpath(scheme, *(part for part in rest.split("/") if part not in ("", ".", "..")))


def fetch(path: str | PurePath) -> Path:
    """Fill a URL's mirror with files that are missing or have another size, and return it. DataError if that fails.

    A local path is returned as it is, whether it exists or not.
    """
    found = located(path)
    local = mirror(path)
    if isinstance(found, Path):
        return local
    try:
        if found.is_file():
            _copy_in(found, local)
            return local
        names = found.files()
        if not names:
            raise DataError(f"there is nothing at {found}")
        for name in _last_last(names):
            _copy_in(found / name, local / name, again=Path(name).name in LAST)
    except OSError as error:
        raise DataError(f"can't read {found}: {error.strerror or error}") from error
    return local


def deliver(path: str | PurePath) -> None:
    """Upload the mirror of a URL, with the files in `LAST` last. Does nothing for a local path.

    Hidden files, such as journals, are not uploaded. Raises OutputError if that fails; the mirror is still complete.
    """
    target = located(path)
    local = mirror(path)
    if isinstance(target, Path):
        return
    try:
        if local.is_file():
            _upload(target, local)
            return
        names = [str(file.relative_to(local)) for file in sorted(local.rglob("*")) if file.is_file()]
        for name in _last_last([name for name in names if not any(part.startswith(".") for part in Path(name).parts)]):
            _upload(target / name, local / name)
    except OSError as error:
        raise OutputError(
            f"can't write {target}: {error.strerror or error}. All of it lies in {local}: run the same command "
            "again, or copy it"
        ) from error


@contextmanager
def uploading(target: UrlPath, mode: str) -> Iterator[IO[Any]]:
    """A local file that replaces the one behind the URL when the block ends."""
    with tempfile.TemporaryDirectory(prefix="eyas-") as folder:
        local = Path(folder, "content")
        with local.open(mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
        _upload(target, local)


def _copy_in(source: UrlPath, local: Path, *, again: bool = False) -> None:
    if again or not local.is_file() or local.stat().st_size != source.stat().st_size:
        _download(source, local)


def _last_last(names: list[str]) -> list[str]:
    return sorted(names, key=lambda name: (Path(name).name in LAST, name))


def _url(path: str | PurePath) -> str:
    """The URL as typed: pathlib turns its two slashes into one."""
    scheme, _, rest = str(path).partition(":")
    slashes = "///" if scheme == "file" else "//"
    return f"{scheme.lower()}:{slashes}{rest.lstrip('/')}"


def _opened(url: str) -> tuple[Any, str]:
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        raise UsageError(f"{url} can't be opened: {error}") from None
    except ValueError as error:
        raise UsageError(f"{url} can't be opened: {error}. Give a folder, or a URL that fsspec knows") from None
    return system, path
