"""Replacing files and folders: killed writers, full disks, several writers at once, and locks."""

from __future__ import annotations

import ast
import errno
import os
import random
import re
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas import files
from eyas.errors import DataError, LockedError, UsageError
from eyas.files import (
    FileLock,
    StagedFiles,
    copy_folder,
    file_hash,
    remove_leftovers,
    write_bytes,
    write_json,
    write_text,
    writing,
    writing_folder,
    writing_path,
)

KILLED_WRITER = Path(__file__).parent / "killed_writer.py"


def names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def write_two(folder: Path, content: str, then: Callable[[], None] = lambda: None) -> None:
    with StagedFiles() as staged:
        staged.open(folder / "a").write("new")
        staged.open(folder / "b").write(content)
        then()


def test_files_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folders" / "a.json"
    write_text(path, "käse\n")
    assert path.read_bytes() == "käse\n".encode()
    write_bytes(path, b"\0\1")
    assert path.read_bytes() == b"\0\1"
    write_json(path, {"ä": [1]})
    assert path.read_text() == '{\n  "\\u00e4": [\n    1\n  ]\n}\n'
    write_json(path, {"ä": 1}, ensure_ascii=False)
    assert path.read_text(encoding="utf-8") == '{\n  "ä": 1\n}\n'
    assert names(tmp_path) == ["new", "new/folders", "new/folders/a.json"]


def test_an_exception_leaves_the_old_content(tmp_path: Path) -> None:
    write_text(tmp_path / "a", "old")
    with writing_folder(tmp_path / "f") as folder:
        (folder / "x").write_text("old")
    before = names(tmp_path)

    def fails(path: Path) -> None:
        path.write_text("new")
        raise KeyError

    for write in (
        lambda: writing(tmp_path / "a"),
        lambda: writing(tmp_path / "b"),
        lambda: writing_path(tmp_path / "a"),
    ):
        with pytest.raises(KeyError), write() as out:
            fails(out if isinstance(out, Path) else Path(out.name))
    with pytest.raises(KeyError), writing_folder(tmp_path / "f") as folder:
        fails(folder / "x")
    with pytest.raises(KeyError):
        write_two(tmp_path, "new", lambda: fails(tmp_path / ".unrelated"))
    (tmp_path / ".unrelated").unlink()
    assert names(tmp_path) == before
    assert (tmp_path / "a").read_text() == (tmp_path / "f" / "x").read_text() == "old"


def test_new_files_have_the_permissions_of_new_files(tmp_path: Path) -> None:
    """safetensors makes files that only their owner may read."""
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "a", "")
        with writing_path(tmp_path / "b") as path:
            save_file({"x": torch.ones(2)}, path)
        with writing_folder(tmp_path / "f") as folder, writing_path(folder / "c") as path:
            save_file({"x": torch.ones(2)}, path)
    finally:
        os.umask(before)
    assert [mode(tmp_path / name) for name in ("a", "b", "f", "f/c")] == [0o640, 0o640, 0o750, 0o640]
    assert load_file(tmp_path / "b")["x"].tolist() == [1, 1]
    assert names(tmp_path) == ["a", "b", "f", "f/c"]


def test_a_folder_replaces_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for in_one_step in (True, False):
        if not in_one_step:
            monkeypatch.setattr(files, "_exchange", lambda *_: False)
        for content in ("a", "b", "c"):
            with writing_folder(tmp_path / "f") as folder:
                assert names(folder) == []
                (folder / content).write_text(content)
            assert names(tmp_path) == ["f", f"f/{content}"]
    (tmp_path / "f" / ".x.tmp").mkdir()  # of a writer that was killed in there
    copy_folder(tmp_path / "f", tmp_path / "deep" / "g")
    copy_folder(tmp_path / "f", tmp_path / "deep" / "g")
    assert names(tmp_path / "deep") == ["g", "g/c"]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux swaps folders in one step")
def test_a_replaced_folder_is_never_missing(tmp_path: Path) -> None:
    final = tmp_path / "f"
    missing = []
    done = threading.Event()
    copy_folder(Path(__file__).parent / "recipes", final)

    def watch() -> None:
        while not done.is_set():
            if not final.is_dir():
                missing.append(time.monotonic())

    watcher = threading.Thread(target=watch)
    watcher.start()
    for i in range(30):
        with writing_folder(final) as folder:
            (folder / "x").write_text(str(i))
    done.set()
    watcher.join()
    assert not missing


@contextmanager
def recorded_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """(call, path) of every flush and rename, in order."""
    calls: list[tuple[str, str]] = []
    sync = os.fsync
    replace = os.replace
    rename = os.rename
    swap = files._exchange

    def synced(descriptor: int) -> None:
        calls.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        sync(descriptor)

    def moved(move: Callable[..., Any]) -> Callable[..., Any]:
        def call(source: Any, target: Any, **options: Any) -> Any:
            calls.append(("rename", str(target)))
            return move(source, target, **options)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", synced)
        patch.setattr(os, "replace", moved(replace))
        patch.setattr(os, "rename", moved(rename))
        patch.setattr(files, "_exchange", moved(swap))
        yield calls


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="looks up descriptors in /proc")
def test_content_is_flushed_before_the_rename_and_the_folder_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def staged(name: str) -> str:
        return str(tmp_path / f".{name}.tmp" / name)

    with recorded_calls(monkeypatch) as calls:
        write_text(tmp_path / "a", "x")
        assert calls == [("fsync", staged("a")), ("rename", str(tmp_path / "a")), ("fsync", str(tmp_path))]
        calls.clear()
        with writing_path(tmp_path / "b") as path:
            path.write_text("x")
        assert calls == [("fsync", staged("b")), ("rename", str(tmp_path / "b")), ("fsync", str(tmp_path))]
        for _ in range(2):  # new, then swapped
            calls.clear()
            with writing_folder(tmp_path / "f") as folder:
                (folder / "in").mkdir()
                (folder / "in" / "x").write_text("x")
            inside = [staged("f") + end for end in ("/in/x", "/in", "")]
            assert calls == [
                *(("fsync", path) for path in inside),
                ("rename", str(tmp_path / "f")),
                ("fsync", str(tmp_path)),
            ]
        calls.clear()
        with StagedFiles() as group:
            for name in ("c", "d"):
                group.open(tmp_path / name).write("x")
        assert calls[:2] == [("fsync", staged("c")), ("fsync", staged("d"))]
        assert [path for call, path in calls if call == "rename"] == [str(tmp_path / "c"), str(tmp_path / "d")]
        calls.clear()
        write_text(tmp_path / "deep" / "er" / "e", "x")
        assert calls[:2] == [("fsync", str(tmp_path)), ("fsync", str(tmp_path / "deep"))]  # the new folders' names


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("kind", "least"), [("file", 9), ("path", 12), ("two", 16), ("folder", 15), ("folder two-steps", 16)]
)
def test_killed_before_every_call_into_the_system(tmp_path: Path, kind: str, least: int) -> None:
    program = [sys.executable, str(KILLED_WRITER), str(tmp_path), *kind.split()]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= least


ENDLESS = """
import sys
from pathlib import Path
from eyas.files import StagedFiles, write_text, writing_folder
folder, step = Path(sys.argv[1]), 0
print("begun", flush=True)
while True:
    step += 1
    write_text(folder / "file", f"{step:08}" * 250_000)
    with writing_folder(folder / "made") as made:
        for name in "ab":
            (made / name).write_text(f"{step:08}" * 50_000)
"""


def test_killed_at_random_moments(tmp_path: Path) -> None:
    """Neither a reader beside the writer nor one after its end sees anything but whole content; versions only rise."""
    draw = random.Random(4)
    last = 0
    for _ in range(12):
        with subprocess.Popen([sys.executable, "-c", ENDLESS, str(tmp_path)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            end = time.monotonic() + draw.random() * 0.15
            while time.monotonic() < end:
                if (tmp_path / "file").exists():
                    whole_version((tmp_path / "file").read_text(), 250_000)
            writer.send_signal(signal.SIGKILL)
        if (tmp_path / "file").exists():
            last = whole_version((tmp_path / "file").read_text(), 250_000)
        if (tmp_path / "made").exists():
            version = {whole_version((tmp_path / "made" / name).read_text(), 50_000) for name in "ab"}
            assert len(version) == 1
    assert last > 0
    remove_leftovers(tmp_path)
    assert [name for name in names(tmp_path) if "tmp" in name] == []


def whole_version(text: str, repeats: int) -> int:
    assert text == text[:8] * repeats
    return int(text[:8])


def full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_leaves_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path / "a", "old")
    write_text(tmp_path / "b", "old")
    with writing_folder(tmp_path / "f") as folder:
        (folder / "x").write_text("old")
    before = names(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(OSError, match="No space"):
            write_text(tmp_path / "a", "new")
        with pytest.raises(OSError, match="No space"), writing_folder(tmp_path / "f") as folder:
            (folder / "x").write_text("new")
        with pytest.raises(OSError, match="No space"), writing_path(tmp_path / "a") as path:
            path.write_text("new")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, hard))  # a real refusal of the system, in the middle of the file
    try:
        for size in (9_000, 90_000):
            with pytest.raises(OSError, match="too large"):
                write_text(tmp_path / "a", "n" * size)
            with pytest.raises(OSError, match="too large"):
                write_two(tmp_path, "n" * size)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == before
    assert {(tmp_path / name).read_text() for name in ("a", "b", "f/x")} == {"old"}


def test_writers_of_one_file_wait_for_each_other(tmp_path: Path) -> None:
    path = tmp_path / "a"
    order = []

    def second() -> None:
        write_text(path, "second")
        order.append("second")

    other = threading.Thread(target=second)
    with writing(path) as file:
        other.start()
        time.sleep(0.1)
        file.write("first")
        order.append("first")
    other.join(10)
    assert order == ["first", "second"]
    assert path.read_text() == "second"
    assert names(tmp_path) == ["a"]


def test_many_writers_of_one_file(tmp_path: Path) -> None:
    """The temporary folder comes and goes under the feet of those who wait for it."""
    errors: list[BaseException] = []

    def write(letter: str) -> None:
        try:
            for _ in range(15):
                write_text(tmp_path / "a", letter * 50_000)
                text = (tmp_path / "a").read_text()
                assert text == text[0] * 50_000
        except BaseException as error:  # noqa: BLE001  # looked at below
            errors.append(error)

    writers = [threading.Thread(target=write, args=(letter,)) for letter in "abcde"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert not errors
    assert names(tmp_path) == ["a"]


def test_a_temporary_folder_that_is_gone_right_after_it_was_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    mkdir = os.mkdir

    def found_once(path: str, *arguments: int) -> None:
        if not found:
            found.append(path)
            raise FileExistsError(errno.EEXIST, "File exists", path)
        mkdir(path, *arguments)

    monkeypatch.setattr(os, "mkdir", found_once)
    write_text(tmp_path / "a", "new")
    assert found
    assert names(tmp_path) == ["a"]


def test_two_writers_of_one_folder(tmp_path: Path) -> None:
    with writing_folder(tmp_path / "f") as folder:
        (folder / "x").write_text("first")
        with pytest.raises(LockedError, match=r"another process is writing .*f: wait"), writing_folder(tmp_path / "f"):
            pass
        remove_leftovers(tmp_path)
        assert (folder / "x").exists()
    assert (tmp_path / "f" / "x").read_text() == "first"


def test_only_what_dead_writers_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".a.tmp").mkdir()
    (tmp_path / ".a.tmp" / "a").write_text("half")
    (tmp_path / ".a.tmp" / ".a.lock").touch()
    (tmp_path / ".b.tmp").mkdir()
    (tmp_path / "c.tmp").write_text("somebody else's")
    with writing(tmp_path / "d"):
        remove_leftovers(tmp_path)
        assert names(tmp_path) == [".d.tmp", ".d.tmp/.d.lock", ".d.tmp/d", "c.tmp"]
    assert names(tmp_path) == ["c.tmp", "d"]


HOLDER = """
import sys
from pathlib import Path
from eyas.files import FileLock
lock = FileLock(Path(sys.argv[1]), shared="shared" in sys.argv)
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held(path: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Another process holds the lock until it ends or is killed."""
    program = [sys.executable, "-c", HOLDER, str(path), *options]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_two_lockers(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "lock" if kind == "file" else tmp_path
    with held(path) as holder:
        for shared in (False, True):
            with pytest.raises(LockedError, match=f"another process is writing {path}: wait for it"):
                FileLock(path, shared=shared)
        timer = threading.Timer(0.2, holder.kill)
        timer.start()
        before = time.monotonic()
        with FileLock(path, wait=True):  # a killed process holds nothing
            assert time.monotonic() - before > 0.1
    with held(path, "shared"), FileLock(path, shared=True), pytest.raises(LockedError):
        FileLock(path)
    FileLock(path).release()


def test_a_lock_lasts_until_those_who_inherited_it_are_gone(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock")
    program = [sys.executable, "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(program, stdin=subprocess.PIPE, pass_fds=(lock.fileno(),)) as heir:
        lock.release()
        lock.release()
        with pytest.raises(ValueError, match="released"):
            lock.fileno()
        with pytest.raises(LockedError):
            FileLock(tmp_path / "lock")
        heir.kill()
    FileLock(tmp_path / "lock").release()


def test_systems_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(files, "fcntl", None)
        write_text(tmp_path / "a", "x")
        with pytest.raises(UsageError, match="this system has no file locks"):
            FileLock(tmp_path / "lock")
    assert files.fcntl is not None

    def unsupported(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", unsupported)  # some network file systems
    write_text(tmp_path / "a", "y")
    assert (tmp_path / "a").read_text() == "y"
    with pytest.raises(OSError, match="No locks"):
        FileLock(tmp_path / "lock")


def test_hashes_go_by_content(tmp_path: Path) -> None:
    for name, text in (("a", "1"), ("b", "2"), ("ab", "12")):
        (tmp_path / name).write_text(text)
    assert file_hash(tmp_path / "a", tmp_path / "b") == file_hash(tmp_path / "ab") != file_hash(tmp_path / "a")
    assert len(file_hash(tmp_path / "a")) == 16
    with pytest.raises(DataError, match=r"can't read .*gone: No such file"):
        file_hash(tmp_path / "gone")


SOURCE = Path(__file__).parents[1] / "src" / "eyas"
WRITING = {
    "engine/round_log.py": {"open", "open a"},  # a round is a line in one write
    "labs/sandbox/jail.py": {"open"},  # /dev/null and the like, inside the sandbox
    "labs/sandbox/sandbox.py": {"TemporaryFile", "TemporaryDirectory"},  # what a program prints, where it runs
    "bench/serving/servers.py": {"TemporaryFile"},  # a server's output, which no path names
    "cli/decode/chat.py": {"open a"},  # a conversation is added to the end of a file of chats
    "gguf_target.py": {"save_pretrained"},  # in a folder that becomes visible when it is complete
    # object files, and the hash behind a library, before it becomes visible
    "targets/native/builds.py": {"TemporaryDirectory", "open ab"},
    "labs/other_engine.py": {"TemporaryDirectory"},  # what vLLM hands over, until it is read
    "data/capture/connector.py": {"flock"},  # waits until vLLM has written a file
    "data/chats/prepare.py": {"open w", "open wb+"},  # in a folder that becomes visible when it is complete
    "data/regenerate/journal.py": {"FileIO"},  # appends, and reads past a line that a kill cut off
    "data/regenerate/endpoint.py": {"open wb"},  # of StagedFiles
    # an event is a line in one write; a generation is made in a folder that becomes visible when it is complete
    "labs/learn/folder.py": {"open", "copytree", "write_text", "touch"},
    "drafters/checkpoint.py": {"save_file"},  # to the path that `writing_path` gives
    "interop/export/export.py": {"GGUFWriter"},  # likewise
    "labs/sweep/trial.py": {"open ab"},  # the log of a trial's process
    "train/lm/lm.py": {"save_pretrained"},  # likewise
    "train/loop/checkpoint.py": {"save_file"},  # to the path that `writing_path` gives
    "urls.py": {"TemporaryDirectory", "replace"},  # a URL's files on their way to and from local ones
    "train/loop/log.py": {"open a"},  # metrics.jsonl, cut to the last state when a run goes on
}
"""Where files are written without `eyas.files`, or by a library that is given its paths."""
METHODS = {"write_text", "write_bytes", "rename", "touch", "symlink_to", "hardlink_to", "save_pretrained", "GGUFWriter"}
FUNCTIONS = {
    *("open", "fdopen", "replace", "rename", "link", "symlink", "truncate", "flock", "lockf", "FileIO"),
    *("copy", "copy2", "copyfile", "copytree", "move"),
    *("mkstemp", "mkdtemp", "TemporaryFile", "NamedTemporaryFile", "TemporaryDirectory"),
    "save_file",
}
MODULES = {"os", "io", "shutil", "tempfile", "fcntl", "safetensors.torch"}


def writing_calls(tree: ast.Module) -> Iterator[str]:
    """What a file calls that writes to the disk: `open` for writing, methods of paths, functions of libraries."""
    modules = set()
    functions = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {each.asname or each.name for each in node.names if each.name in MODULES}
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            functions |= {each.asname or each.name for each in node.names if each.name in FUNCTIONS}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        method = isinstance(call.func, ast.Attribute)
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        owner = getattr(call.func.value, "id", "") if isinstance(call.func, ast.Attribute) else ""
        given = [*call.args, *(each.value for each in call.keywords if each.arg == "mode")]
        modes = [each.value for each in given if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        mode = next((text for text in modes if re.fullmatch(r"[rwaxbt+]+", text)), "r")
        if name == "open" and owner not in modules:
            if set(mode) & set("wax+"):
                yield f"open {mode}"
        elif owner in modules:
            if name in FUNCTIONS:
                yield name
        elif name in (METHODS if method else functions):
            yield name
        elif method and name == "replace" and owner != "dataclasses" and len(call.args) == 1:
            yield name  # of a path: a text's takes two


def test_nobody_else_writes_files() -> None:
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        calls = set(writing_calls(ast.parse(path.read_text(encoding="utf-8"))))
        if calls and path != SOURCE / "files.py":
            found[path.relative_to(SOURCE).as_posix()] = calls
    assert found == WRITING
    assert set(writing_calls(ast.parse((SOURCE / "files.py").read_text(encoding="utf-8")))) >= {"open", "flock"}
