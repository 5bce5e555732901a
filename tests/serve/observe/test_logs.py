"""LineFormatter that machines and people can read, one a record, and statistics only while something happens."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import eyas
from eyas.serve.observe.logs import (
    LineFormatter,
    Logs,
    RepeatFilter,
    StatisticsInterval,
    log_listening,
    log_loaded,
    log_to,
)
from eyas.serve.observe.observer import ReceivedSequence
from eyas.types import Limits

from ...pairs import save_drafter, save_target
from ..conftest import client_of
from ..fakes import FakeEngine
from .watched import CONTROLLER, finished, outcome, state

Read = Callable[[], list[dict[str, object]]]


@pytest.fixture
def read() -> Iterator[Read]:
    """The lines written so far."""
    loggers = [logging.getLogger(name) for name in ("eyas.serve", "uvicorn", "uvicorn.access", "asyncio")]
    before = [(logger, logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    stream = io.StringIO()
    log_to(stream, "json", logging.DEBUG)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    for logger, handlers, level, propagate in before:
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate = propagate


def test_statistics_of_an_interval() -> None:
    interval = StatisticsInterval(state(generated_tokens_total=100, prompt_tokens_total=40))
    interval.add(state(), CONTROLLER, outcome([2, 0, 0], [3, 3, 0], [6, 9, 0]))
    interval.add(state(), CONTROLLER, outcome([0, 0], [0, 0], [0, 0]))
    last = state(generated_tokens_total=120, prompt_tokens_total=60, prefix_hit_tokens_total=5, preempted_total=1)
    interval.add(last, CONTROLLER, outcome([1], [2], [2]))
    assert interval.fields(4.0) == {
        "running": 3,
        "waiting": 3,
        "tokens_per_second": 5.0,
        "prompt_tokens_per_second": 5.0,
        "cached_tokens": 50,
        "prefix_hit_rate": 0.25,
        "preempted": 1,
        "accept_length": 1.5,  # 3 accepted in 6 rows
        "acceptance_by_position": [0.67, 0.33, 0.0],
        "accepted_histogram": [1, 1, 1],
        "plain_rounds": 0.333,
        "tree": "5,4,40",
    }
    after = interval.next()
    assert after.fields(1.0) is None
    after.add(last, None, None)
    told = after.fields(1.0)
    assert told is not None
    assert told["tokens_per_second"] == 0.0
    assert not {"tree", "accept_length", "preempted"} & told.keys()


def test_statistics_while_something_happens_and_silence_after(read: Read) -> None:
    logs = Logs(every=0.05)
    logs.stepped(state(generated_tokens_total=1), None, None)
    until = time.monotonic() + 10
    while len(read()) < 1 and time.monotonic() < until:
        time.sleep(0.01)
    time.sleep(0.2)  # several intervals without a step
    assert [line["message"] for line in read()] == ["statistics"]
    logs.stepped(state(generated_tokens_total=5), None, None)
    logs.close()  # what was counted last is told
    logs.close()
    logs.stepped(state(generated_tokens_total=7), None, None)
    time.sleep(0.1)
    assert len(read()) == 2


def test_no_statistics_if_unwanted(read: Read) -> None:
    logs = Logs(every=0.0)
    logs.stepped(state(), None, None)
    logs.close()
    assert read() == []


def test_a_request_has_a_line_when_it_ends(read: Read) -> None:
    logs = Logs()
    nasty = ReceivedSequence('a"b\n\x1b[2J', "/v1/completions", 3, 9)
    logs.request_received(nasty)
    logs.finished(finished())
    logs.finished(finished("error", first=None))
    logs.refused("/v1/completions", 429, "queue_full", "/v1/completions")
    logs.refused("/v1/completions", 500, "internal_error", "/v1/completions")
    logs.refused("", 404, "not_found", "/v1/model\n" + 300 * "s")
    received, good, bad, full, broken, nowhere = read()
    assert nowhere["endpoint"] == "/v1/model\n" + 190 * "s"
    assert (received["level"], received["id"]) == ("debug", nasty.id)
    assert good["message"] == "finished"
    assert (good["id"], good["reason"], good["tokens"], good["seconds"]) == ("chatcmpl-7-0", "stop", 5, 2.5)
    assert (good["first_token_seconds"], good["queue_seconds"], good["accept_length"]) == (0.5, 0.125, 4.0)
    assert "first_token_seconds" not in bad
    assert [line["level"] for line in (good, bad, full, broken)] == ["info", "warning", "info", "error"]


def test_what_draining_cuts_off_has_the_tokens_that_were_sent(read: Read) -> None:
    engine = FakeEngine("a b " * 60, pause=0.005)

    async def ask() -> None:
        async with client_of(engine, Logs()) as client:
            asked = asyncio.ensure_future(
                client.post("/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 200})
            )
            while 0 not in engine._sequences or len(engine._sequences[0].taken) < 6:
                await asyncio.sleep(0.001)
            client.thread.drain()  # type: ignore[attr-defined]
            client.thread.stop()  # type: ignore[attr-defined]  # as when the time for draining is over
            assert (await asked).status_code == 503

    asyncio.run(asyncio.wait_for(ask(), 30))
    (line,) = [line for line in read() if line["message"] == "finished"]
    assert line["reason"] == "cancelled"
    assert line["tokens"] == len(engine._sequences[0].taken) >= 6
    assert "queue_seconds" not in line  # nobody knows


def test_readable_lines_stay_lines() -> None:
    record = logging.makeLogRecord({"msg": "hello", "levelno": logging.INFO, "levelname": "INFO", "created": 0.25})
    record.msecs = 250
    record.fields = {"id": 'a"b\n\x1b[2J', "plain": "x/y", "none": None, "list": [1, 0.5], "number": 1.5}
    line = LineFormatter("text").format(record)
    assert line == (
        '1970-01-01T00:00:00.250Z info hello id="a\\"b\\n\\u001b[2J" plain=x/y none=null list=1/0.5 number=1.5'
    )
    record.msg = "two\nlines"
    assert "\n" not in LineFormatter("text").format(record)


def test_tracebacks_are_kept() -> None:
    try:
        raise ValueError("broken")
    except ValueError as error:
        record = logging.makeLogRecord({"msg": "m", "exc_info": (ValueError, error, error.__traceback__)})
    assert "ValueError: broken" in LineFormatter("text").format(record)
    assert "ValueError: broken" in json.loads(LineFormatter("json").format(record))["traceback"]


def test_uvicorns_lines_are_of_the_same_form(read: Read) -> None:
    logging.getLogger("uvicorn.error").warning("down")
    logging.getLogger("uvicorn.access").info("GET /")
    assert [(line["level"], line["message"]) for line in read()] == [("warning", "down")]


def test_a_warning_that_repeats_is_written_once_a_second() -> None:
    once = RepeatFilter()
    shown: list[tuple[str, object]] = []
    for tenth in range(25):
        for text, level in (
            ("accept() failed: %d", logging.ERROR),
            ("closed", logging.WARNING),
            ("fine", logging.INFO),
        ):
            record = logging.makeLogRecord({"msg": text, "levelno": level, "created": tenth / 10, "args": (tenth,)})
            if once.filter(record):
                shown.append((text, getattr(record, "fields", None)))
    expected = [None, {"repeated": 9}, {"repeated": 9}]
    for text in ("accept() failed: %d", "closed"):
        assert [fields for message, fields in shown if message == text] == expected
    assert shown.count(("fine", None)) == 25


def test_asyncios_lines_are_of_the_same_form_and_repeat_as_little(read: Read) -> None:
    for _ in range(20):
        logging.getLogger("asyncio").error("socket.accept() out of system resource")
    assert [line["level"] for line in read()] == ["error"]


def test_lines_of_requests_are_never_held_back(read: Read) -> None:
    logs = Logs()
    for _ in range(5):
        logs.refused("/v1/completions", 500, "internal_error", "/v1/completions")
    assert len(read()) == 5


def test_the_start_says_where_and_what(read: Read, tmp_path: Path) -> None:
    model = save_target(tmp_path / "model")
    drafter = save_drafter(tmp_path / "drafter")
    limits = Limits(max_running=2, max_cached_tokens=512)
    log_listening("tiny", "http://127.0.0.1:8000", "loading")
    log_loaded(eyas.load(model, dtype="float32"), None, None, 1.23)
    log_loaded(eyas.load(model, drafter, tree="auto", dtype="float32", limits=limits), str(drafter), "auto", 4.56)
    first, plain, measured = read()
    assert first["message"] == "eyas serves tiny: loading"
    assert (first["page"], first["api"]) == ("http://127.0.0.1:8000/", "http://127.0.0.1:8000/v1")
    assert (plain["message"], plain["seconds"], plain["dtype"]) == ("loaded", 1.2, "float32")
    assert plain["kernels"] in ("eyas's", "oneDNN's", "PyTorch's")
    assert (plain["drafter"], plain["cache_tokens"]) == ("none: plain decoding", "what memory allows")
    assert not {"tree", "pass_ms"} & plain.keys()
    assert (measured["drafter"], measured["tree"]) == (str(drafter), "auto")
    assert (measured["cache_tokens"], measured["max_running"]) == (512, 2)
    assert all(float(str(measured[name])) > 0 for name in ("pass_ms", "pass_of_8_tokens_ms"))
    assert float(str(measured["draft_level_ms"])) >= 0  # a difference of two times, which noise can cancel
