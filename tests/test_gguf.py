"""GGUF files: their headers are read once, and again after a change."""

from __future__ import annotations

import os
import time
from pathlib import Path

from gguf import GGUFWriter

from eyas.gguf import Gguf


def write(path: Path, count: int) -> None:
    writer = GGUFWriter(path, "llama")
    writer.add_uint32("n", count)
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()


def test_a_header_is_kept_until_the_file_changes(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    write(path, 1)
    os.utime(path, (10, 10))
    first = Gguf(path)
    assert Gguf(path).metadata is first.metadata
    write(path, 2)
    os.utime(path, (20, 20))
    assert (first.metadata["n"], Gguf(path).metadata["n"]) == (1, 2)


def test_a_file_that_was_just_written_may_change_without_a_new_time(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    now = time.time_ns()
    for count in range(3):
        write(path, count)
        os.utime(path, ns=(now, now))
        assert Gguf(path).metadata["n"] == count
