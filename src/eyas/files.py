"""Files and folders that are replaced whole or not at all, locks between processes, and content hashes.

Every writer in this module guarantees that, once the call returns or its `with` block ends, the new content is on disk.
A crash, a kill or a power cut before that leaves the old content; no reader ever sees a mix of the two, a partial file
or an empty one. An exception in the block discards the new content. System errors, such as a full disk, are raised as
OSError. Missing parent folders are created.

How: new content is written to a temporary folder next to its final path, flushed to disk, and renamed; then the parent
folder is flushed, too. The temporary folder of NAME is `.NAME.tmp`, and its writer holds a lock in it. So the next
writer of NAME, or `remove_leftovers`, recognizes and removes what a killed writer left behind.
"""

from __future__ import annotations

import codecs
import ctypes
import errno
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from eyas.errors import DataError, LockedError, UsageError
from eyas.urls import AnyPath, UrlPath, uploading

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

TEMPORARY = ".tmp"
"""Suffix of temporary folders' names, which begin with a dot."""
_PARQUET_ROWS = 256
"""Rows of a Parquet file held in memory at a time."""


def write_text(path: AnyPath, text: str) -> None:
    """Replace a file's content with `text`, in UTF-8."""
    with writing(path) as file:
        file.write(text)


def write_bytes(path: Path, data: bytes) -> None:
    """Replace a file's content with `data`."""
    with writing(path, "wb") as file:
        file.write(data)


def write_json(path: Path, content: Any, *, ensure_ascii: bool = True) -> None:
    """Replace a file's content with JSON, indented by two spaces."""
    write_text(path, json.dumps(content, indent=2, ensure_ascii=ensure_ascii) + "\n")


@contextmanager
def writing(path: AnyPath, mode: str = "w") -> Iterator[IO[Any]]:
    """An open file that replaces `path` when the block ends; `mode` is "w" (UTF-8) or "wb".

    If another process is writing the same file, this one waits. Behind a URL nobody waits: the last writer wins.
    """
    if isinstance(path, UrlPath):
        with uploading(path, mode) as file:
            yield file
        return
    with StagedFiles() as staged:
        yield staged.open(path, mode)


@contextmanager
def writing_path(path: Path) -> Iterator[Path]:
    """A temporary path for libraries that open files themselves; the file there replaces `path` when the block ends.

    The file gets default permissions, whatever the library sets.
    """
    with _Staging(path, wait=True) as staging:
        staging.new.touch()
        mode = staging.new.stat().st_mode
        yield staging.new
        staging.new.chmod(mode)
        _sync(staging.new)
        staging.publish()


@contextmanager
def writing_folder(path: Path) -> Iterator[Path]:
    """An empty folder to fill, which replaces `path` when the block ends.

    Linux swaps the two atomically. Where the system can't, there is a moment without a folder: after a crash at that
    moment, the old one stays in the temporary folder until the next writer restores it. Raises LockedError if another
    process is writing the same folder.
    """
    with _Staging(path, wait=False) as staging:
        staging.new.mkdir()
        yield staging.new
        for folder, _, names in os.walk(staging.new, topdown=False):
            for name in names:
                _sync(Path(folder, name))
            sync_folder(Path(folder))
        staging.publish()


def copy_folder(source: Path, path: Path) -> None:
    """Replace the folder `path` with a copy of `source`."""
    with writing_folder(path) as folder:
        shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(f".*{TEMPORARY}"))


class StagedFiles:
    """Several files, written side by side, that replace existing ones when the `with` block ends.

    All are flushed to disk before the first is renamed, so a full disk leaves every old file in place. They are renamed
    one by one, in the order in which they were opened: a crash in between leaves the first ones new and the others old.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._opened: list[tuple[_Staging, IO[Any]]] = []

    def __enter__(self) -> StagedFiles:
        return self

    def open(self, path: Path, mode: str = "w") -> IO[Any]:
        """Open a file that will replace `path`; `mode` is "w" (UTF-8) or "wb". Don't close it."""
        staging = self._stack.enter_context(_Staging(path, wait=True))
        file = self._stack.enter_context(staging.new.open(mode, encoding=None if "b" in mode else "utf-8"))
        self._opened.append((staging, file))
        return file

    def flush(self) -> None:
        """Flush everything written so far to disk."""
        for _, file in self._opened:
            file.flush()
            os.fsync(file.fileno())

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            if kind is None:
                self.flush()
                for staging, file in self._opened:
                    file.close()
                    staging.publish()


class _Staging:
    """The temporary folder of a path, locked and empty. Write to `new`; `publish` renames it to the path."""

    def __init__(self, path: Path, *, wait: bool) -> None:
        """If another process is writing the same path, `wait` for it, or raise LockedError."""
        self._path = Path(os.path.abspath(path))
        self._folder = self._path.with_name(f".{self._path.name}{TEMPORARY}")
        self._lock_file = self._folder / f".{self._path.name}.lock"
        self._old = self._folder / f".{self._path.name}.old"
        self._wait = wait
        self.new = self._folder / self._path.name

    def __enter__(self) -> _Staging:
        _make_folder(self._path.parent)
        self._acquire()
        try:
            if self._old.exists() and not self._path.exists():
                self._old.rename(self._path)
            self._clear()
        except BaseException:
            os.close(self._descriptor)
            raise
        return self

    def publish(self) -> None:
        """Rename `new`, already flushed to disk, to the path."""
        if not (self.new.is_dir() and self._path.exists()):
            self.new.replace(self._path)
        elif not _exchange(self.new, self._path):
            self._path.rename(self._old)
            self.new.rename(self._path)
        sync_folder(self._path.parent)

    def __exit__(self, *_: object) -> None:
        try:
            with suppress(OSError):  # the content is in place, or an error is already propagating
                self._clear()
                self._lock_file.unlink()  # last: until then no other writer claims the folder
                self._folder.rmdir()
        finally:
            os.close(self._descriptor)

    def _acquire(self) -> None:
        """Create and lock the folder, and make sure that its previous writer hasn't removed it in between."""
        while True:
            with suppress(FileExistsError):  # mkdir's exist_ok checks again, and raises if the folder is gone by then
                self._folder.mkdir()
            try:
                self._descriptor = os.open(self._lock_file, os.O_RDWR | os.O_CREAT, 0o666)
            except FileNotFoundError:
                continue
            try:
                self._lock()
                if _is_open_as(self._lock_file, self._descriptor):
                    return
            except BaseException:
                os.close(self._descriptor)
                raise
            os.close(self._descriptor)

    def _lock(self) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | (0 if self._wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise _locked(self._path) from None
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise

    def _clear(self) -> None:
        for path in self._folder.iterdir():
            if path != self._lock_file:
                _remove(path)


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary folders that killed writers left in `folder`; folders of active writers stay."""
    for path in folder.glob(f".*{TEMPORARY}"):
        try:
            with _Staging(path.with_name(path.name[1 : -len(TEMPORARY)]), wait=False):
                pass
        except LockedError:
            continue


class FileLock:
    """An advisory lock on a file, created if missing, or on an existing folder.

    It lasts until it is released, or until every process that inherited its descriptor has ended. Raises LockedError if
    another process holds it and `wait` is False, UsageError if the system has no such locks.
    """

    def __init__(self, path: Path, *, shared: bool = False, wait: bool = False) -> None:
        """`shared` locks exclude exclusive ones only."""
        if fcntl is None:
            raise UsageError(f"can't lock {path}: this system has no file locks (Python's fcntl module)")
        flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT
        self._descriptor: int | None = os.open(path, flags, 0o666)
        try:
            kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
            fcntl.flock(self._descriptor, kind | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            self.release()
            raise _locked(path) from None
        except BaseException:
            self.release()
            raise

    def __enter__(self) -> FileLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def fileno(self) -> int:
        """The descriptor, for child processes that inherit the lock."""
        if self._descriptor is None:
            raise ValueError("the lock has been released")
        return self._descriptor

    def release(self) -> None:
        """Close the descriptor; safe to call more than once."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, so that files created or renamed in it survive a power cut."""
    if os.name == "nt":  # folders can't be opened there
        return
    try:
        _sync(folder)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise


def read_text(path: Path) -> str:
    """UTF-8 text that people write, with a byte order mark or without. Raises OSError and UnicodeDecodeError."""
    return path.read_text(encoding="utf-8-sig")


def json_lines(path: AnyPath) -> Iterator[tuple[int, bytes]]:
    """The lines of a JSON Lines file, numbered from 1, without blank ones and without byte order marks.

    Every reader of JSON Lines that people write uses this one. Any line may begin with a mark, since files are joined.
    Raises OSError, and DataError for UTF-16.
    """
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise DataError(f"{path} is UTF-16 text: save it as UTF-8")
            line = line.removeprefix(codecs.BOM_UTF8)
            if line.strip():
                yield number, line


def parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a Parquet file. Raises DataError without pyarrow, OSError for a broken file."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DataError(f"reading {path} needs pyarrow: pip install 'eyas[data]'") from None
    try:
        with parquet.ParquetFile(path) as table:
            for batch in table.iter_batches(batch_size=_PARQUET_ROWS):
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise OSError(str(error)) from error


def file_hash(*paths: Path) -> str:
    """16 hex digits of SHA-256 over the files' concatenated contents. Raises DataError for unreadable files."""
    digest = hashlib.sha256()
    for path in paths:
        try:
            with path.open("rb") as data:
                while piece := data.read(1 << 22):
                    digest.update(piece)
        except OSError as error:
            raise DataError(f"can't read {path}: {error.strerror}") from error
    return digest.hexdigest()[:16]


_NOT_SUPPORTED = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.ENOLCK)
"""Error numbers from file systems that can't lock files or can't flush folders."""


def _locked(path: Path) -> LockedError:
    return LockedError(f"another process is writing {path}: wait for it, or choose another output")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _make_folder(folder: Path) -> None:
    """Create a folder and its parents; all are on disk when this returns."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        sync_folder(folder.parent)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _is_open_as(path: Path, descriptor: int) -> bool:
    """Whether `descriptor` refers to the file that is now at this path."""
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _exchange(one: Path, other: Path) -> bool:
    """Swap two paths atomically; False if the system or the file system can't."""
    if sys.platform != "linux":
        return False
    at_fdcwd, rename_exchange = -100, 2
    try:
        renameat2 = ctypes.CDLL(None).renameat2
    except AttributeError:
        return False
    swapped: int = renameat2(at_fdcwd, os.fsencode(one), at_fdcwd, os.fsencode(other), rename_exchange)
    return swapped == 0


def refuse_used(path: Path) -> None:
    """Raise UsageError if the path exists and isn't an empty folder."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UsageError(f"`fix={path}` exists and isn't empty: choose a new folder")
