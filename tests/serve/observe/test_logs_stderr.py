"""Standard error of a server: lines of JSON whoever writes them, and no reason to fail."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from pathlib import Path

import pytest
import typer

from eyas.serve.observe.logs import DurableStream, JsonLineStream


def test_every_line_is_json_whoever_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    under = io.StringIO()
    monkeypatch.setattr(sys, "stderr", JsonLineStream(DurableStream(under)))
    typer.echo("a note", err=True)
    sys.stderr.write('half "a')
    sys.stderr.write(' line"\nnext\r\n\n10%\r20%\n')
    sys.excepthook(ValueError, ValueError("broken"), None)
    logging.lastResort.handle(logging.makeLogRecord({"msg": "unhandled", "levelno": logging.WARNING}))  # type: ignore[union-attr]
    lines = [json.loads(line) for line in under.getvalue().splitlines()]
    messages = [line["message"] for line in lines]
    assert messages[:6] == ["a note", 'half "a line"', "next", "10%", "20%", "ValueError: broken"]
    assert "unhandled" in messages
    assert all({"time", "level"} <= line.keys() for line in lines)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_no_reason_to_fail() -> None:
    with open("/dev/full", "w") as full:
        stream = DurableStream(full)
        assert stream.write("text") == 4
        print("more", file=stream, flush=True)
        typer.echo("a note", file=stream)
    assert stream.write("after it was closed") == 19


def test_a_reader_that_is_gone_is_none_either() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        assert DurableStream(pipe).write("text\n") == 5


def test_all_of_a_long_text_is_written(tmp_path: Path) -> None:
    text = "ä\udc80" * 100_000
    with (tmp_path / "log").open("w") as file:
        DurableStream(file).write(text)
    assert (tmp_path / "log").read_text() == text.replace("\udc80", "\\udc80")
