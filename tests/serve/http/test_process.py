"""`eyas serve` as a process: ready, draining, failing, killed."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from ssl import SSLContext
from typing import Any

import httpx
import pytest

from ...forks import Fork
from ...pairs import Pair, save_target
from ...toy.pair import TOY_PAIR, TOY_TARGET

BODY = {"model": "m", "prompt": "Natalia", "temperature": 0}


class Process:
    """One server."""

    def __init__(
        self, *options: Any, log: Path, program: Sequence[str] = ("-m", "eyas"), verify: SSLContext | bool = True
    ) -> None:
        self.log = log
        self._verify = verify
        command = [*program, "serve", "--port", "0", "--served-model-name", "m", *options]
        self.process = Fork(command, env={**os.environ, "EYAS_API_KEY": ""}, stdout=log, stderr=log)
        found = None
        while found is None:
            assert self.process.poll() is None, self.said
            time.sleep(0.02)
            found = re.search(r"https?://[0-9.]+:[0-9]+", self.said)
        self.url = found.group()

    @property
    def said(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def ready(self) -> list[int]:
        """Wait for it; the health statuses on the way."""
        seen: list[int] = []
        until = time.monotonic() + 60
        while not seen or seen[-1] != 200:
            assert time.monotonic() < until
            assert self.process.poll() is None, self.said
            with suppress(httpx.HTTPError):
                seen.append(httpx.get(f"{self.url}/health", verify=self._verify).status_code)
            time.sleep(0.02)
        return seen

    def health(self) -> int:
        """The health status, once it answers."""
        until = time.monotonic() + 60
        while True:
            try:
                return httpx.get(f"{self.url}/health").status_code
            except httpx.HTTPError:
                assert time.monotonic() < until
                time.sleep(0.02)

    def complete(self, tokens: int) -> httpx.Response:
        body = {**BODY, "max_tokens": tokens, "ignore_eos": True}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60, verify=self._verify)


@contextmanager
def process(
    *options: Any, log: Path, program: Sequence[str] = ("-m", "eyas"), verify: SSLContext | bool = True
) -> Iterator[Process]:
    made = Process(*options, log=log, program=program, verify=verify)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait(10)


def test_a_server_is_ready_drains_when_told_to_end_and_ends_well(pair: Pair, tmp_path: Path) -> None:
    options = ("--model", pair.model, "--draft-model", pair.drafter, "--tree", "chain:2", "--max-running", 4)
    with process(*options, log=tmp_path / "log") as server:
        seen = server.ready()
        assert set(seen[:-1]) <= {503}
        expected = server.complete(200)
        answers: list[httpx.Response] = []
        running = threading.Thread(target=lambda: answers.append(server.complete(200)))
        with httpx.Client(base_url=server.url) as client:  # a connection from before
            assert client.get("/health").status_code == 200
            running.start()
            while running.is_alive() and not client.get("/stats").json()["running"]:
                time.sleep(0.005)  # until the engine has it
            assert running.is_alive()
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.1)
            with suppress(httpx.HTTPError):  # it may have ended already
                refused = client.post("/v1/completions", json=BODY)
                assert refused.status_code == 503
                assert refused.headers["retry-after"]
        running.join(30)
        assert server.process.wait(20) == 0, server.said
        assert answers[0].status_code == 200, answers[0].text + server.said
        assert answers[0].json()["choices"] == expected.json()["choices"]


@pytest.mark.parametrize(
    ("options", "plus"), [((), "+suffix"), (("--method", "eagle3"), ""), (("--num-speculative-tokens", "2"), "")]
)
def test_a_draft_model_is_joined_by_copies_unless_more_is_said(
    pair: Pair, tmp_path: Path, options: tuple[str, ...], plus: str
) -> None:
    with process("--model", pair.model, "--draft-model", pair.drafter, *options, log=tmp_path / "log") as server:
        server.ready()
        assert f"drafter={pair.drafter}{plus} " in server.said, server.said
        assert server.complete(20).status_code == 200


def test_a_second_signal_ends_it_at_once_and_says_nothing(pair: Pair, tmp_path: Path) -> None:
    with process("--model", pair.model, log=tmp_path / "log") as server:
        server.ready()
        failed: list[Exception] = []

        def ask() -> None:
            try:
                server.complete(240)
            except httpx.HTTPError as error:
                failed.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        while asking.is_alive() and not httpx.get(f"{server.url}/stats").json()["running"]:
            time.sleep(0.005)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.05)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(5) == 0
        asking.join(20)
        assert "Traceback" not in server.said


LOADS_FOR_EVER = """
import importlib, time
serve = importlib.import_module("eyas.cli.serve.serve")
serve._load = lambda *_: time.sleep(600)
from eyas.cli.app import main
main()
"""


def test_told_to_end_while_it_loads_it_ends_at_once(tmp_path: Path) -> None:
    with process(*TOY_PAIR, log=tmp_path / "log", program=("-c", LOADS_FOR_EVER)) as server:
        assert "eyas serves m: loading, then measuring costs for --tree auto" in server.said
        assert server.health() == 503
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(8) == 0, server.said  # a step of the engine would be waited for longer


STARTS_SLOWLY = """
import importlib, time
run = importlib.import_module("eyas.serve.run")
run.run_server = lambda *_: time.sleep(600)
from eyas.cli.app import main
main()
"""


def test_told_to_end_before_it_answers_it_ends_well(tmp_path: Path) -> None:
    with process("--model", str(TOY_TARGET), log=tmp_path / "log", program=("-c", STARTS_SLOWLY)) as server:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0, server.said


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("form", ["text", "json"])
def test_a_full_disk_under_standard_error_keeps_nobody_from_serving(pair: Pair, form: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["-m", "eyas", "serve", "--model", pair.model, "--port", port, "--log-format", form]
    server = Fork(command, env={**os.environ, "EYAS_API_KEY": ""}, stderr=Path("/dev/full"))
    try:
        until = time.monotonic() + 60
        status = 0
        while status != 200:
            assert time.monotonic() < until
            assert server.poll() is None
            with suppress(httpx.HTTPError):
                status = httpx.get(f"http://127.0.0.1:{port}/health").status_code
            time.sleep(0.02)
        server.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
    finally:
        server.kill()


@pytest.mark.slow
def test_killed_it_is_ready_again_in_seconds(pair: Pair, tmp_path: Path) -> None:
    with process("--model", pair.model, log=tmp_path / "log") as server:
        server.ready()
        expected = server.complete(30).json()["choices"]
        failed: list[Exception] = []

        def ask() -> None:
            try:
                server.complete(240)
            except httpx.HTTPError as error:
                failed.append(error)

        asking = [threading.Thread(target=ask) for _ in range(4)]
        for each in asking:
            each.start()
        time.sleep(0.1)
        server.process.kill()
        for each in asking:
            each.join(20)
        assert len(failed) == 4
    with process("--model", pair.model, log=tmp_path / "log") as again:
        again.ready()
        assert again.complete(30).json()["choices"] == expected


def test_a_model_that_can_not_be_loaded_ends_the_process_with_the_reason(tmp_path: Path) -> None:
    model = save_target(tmp_path / "nothing")
    (model / "model.safetensors").unlink()
    with process("--model", model, log=tmp_path / "log") as server:
        assert server.process.wait(60) == 1
        assert "error: " in server.said
        assert "nothing" in server.said
        assert "Traceback" not in server.said
