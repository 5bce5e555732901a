"""Replaces a file or folder and is killed at every system call on the way; run by tests/test_files.py.

    python killed_writer.py FOLDER KIND [two-steps]

KIND is a key of `WRITERS`. For N = 0, 1, ... a forked child replaces old content and is killed (SIGKILL) right before
its Nth call. After each kill, the content must be the old or the new, and the next writer must remove every leftover.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eyas import files

SIZE = 300_000


def write_files(folder: Path, content: str) -> None:
    files.write_text(folder / "a", content * SIZE)


def write_at_a_path(folder: Path, content: str) -> None:
    with files.writing_path(folder / "a") as path:
        path.write_text(content * (SIZE // 2))
        path.with_name("beside").write_text("a file of the library's own")
        path.with_name("beside").write_text(content * SIZE)
        path.with_name("beside").replace(path)


def write_two(folder: Path, content: str) -> None:
    with files.StagedFiles() as staged:
        for name in ("a", "b"):
            staged.open(folder / name).write(content * SIZE)


def write_folder(folder: Path, content: str) -> None:
    with files.writing_folder(folder / "made") as made:
        (made / "inner").mkdir()
        for name in ("a", "inner/b"):
            (made / name).write_text(content * SIZE)


WRITERS: dict[str, Callable[[Path, str], None]] = {
    "file": write_files,
    "path": write_at_a_path,
    "two": write_two,
    "folder": write_folder,
}
CALLS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.truncate", "fcntl.flock", "eyas"}


def die_before(number: int) -> None:
    """Kill this process right before its call `number`, counted from 0."""
    left = number
    sync, swap = os.fsync, files._exchange

    def hook(event: str, _: Any) -> None:
        nonlocal left
        if event in CALLS:
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    def counted(call: Any) -> Any:
        def made(*arguments: Any) -> Any:
            sys.audit("eyas")
            return call(*arguments)

        return made

    os.fsync = counted(sync)
    files._exchange = counted(swap)
    sys.addaudithook(hook)


def content(folder: Path) -> dict[str, str]:
    """Name -> the single character of which each file in the folder must consist."""
    found = {}
    for path in folder.rglob("*"):
        name = str(path.relative_to(folder))
        if path.is_file() and files.TEMPORARY not in name:
            text = path.read_text()
            assert len(text) == SIZE, (name, len(text))
            assert len(set(text)) == 1, name
            found[name] = text[0]
    return found


def main(folder: Path, kind: str, two_steps: bool) -> None:
    os.fsync = lambda _: None  # a kill loses nothing that was written; only power cuts do
    if two_steps:
        files._exchange = lambda *_: False
    write = WRITERS[kind]
    kills = gaps = 0
    while True:
        write(folder, "o")
        assert set(content(folder).values()) == {"o"}
        child = os.fork()
        if child == 0:
            die_before(kills)
            write(folder, "n")
            os._exit(0)
        _, status = os.waitpid(child, 0)
        after = content(folder)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            break
        kills += 1
        if kind == "two":
            assert after in ({"a": x, "b": y} for x, y in ("oo", "no", "nn")), after
        elif two_steps and not after:
            gaps += 1
            files.remove_leftovers(folder)  # as the next writer of this name does first
            assert set(content(folder).values()) == {"o"}
        else:
            assert len(after) == 1 + (kind == "folder"), after
            assert len(set(after.values())) == 1, after
        write(folder, "x")
        assert set(content(folder).values()) == {"x"}
        assert not list(folder.glob(".*")), list(folder.glob(".*"))
    assert set(after.values()) == {"n"}
    assert gaps == (1 if two_steps else 0), gaps
    print(kills)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], "two-steps" in sys.argv)
