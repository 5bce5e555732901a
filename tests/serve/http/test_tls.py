"""HTTPS: a server with a certificate of its own, and certificates that are refused before anything is loaded."""

from __future__ import annotations

import asyncio
import gc
import shutil
import socket
import ssl
import subprocess
import warnings
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

import httpx
import pytest

from eyas.errors import UsageError
from eyas.serve.context import ServeSettings
from eyas.serve.run import HttpConnection, TlsHandshake, WaitingConnections, tls_context

from ...pairs import Pair
from ..fakes import FakeEngine
from ..live import live
from .test_process import process

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl, which makes certificates, isn't here")


class Files(NamedTuple):
    """Two certificates for this machine, each signed by itself."""

    certificate: Path
    key: Path
    encrypted_key: Path
    other_key: Path
    both: Path
    """Certificate and key in one file."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("tls")
    made = Files(*(folder / f"{name}.pem" for name in Files._fields))

    def openssl(*arguments: object) -> None:
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)

    for key in (made.other_key, made.key):
        openssl(*"req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=eyas -addext subjectAltName=IP:127.0.0.1".split(),
                "-keyout", key, "-out", made.certificate)  # fmt: skip
    openssl("rsa", "-aes256", "-passout", "pass:secret", "-in", made.key, "-out", made.encrypted_key)
    made.both.write_bytes(made.certificate.read_bytes() + made.key.read_bytes())
    return made


def test_a_server_with_a_certificate_speaks_https_and_nothing_else(pair: Pair, files: Files, tmp_path: Path) -> None:
    options = ("--model", pair.model, "--ssl-certfile", files.certificate, "--ssl-keyfile", files.key)
    trust = ssl.create_default_context(cafile=str(files.certificate))
    with process(*options, log=tmp_path / "log", verify=trust) as server:
        assert server.url.startswith("https://127.0.0.1:")
        server.ready()
        assert server.complete(5).json()["usage"]["completion_tokens"] == 5
        with pytest.raises(httpx.HTTPError):
            httpx.get(server.url.replace("https", "http") + "/health")
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{server.url}/health")


WRONG: dict[str, tuple[Callable[[Files], tuple[Path | None, Path | None]], str]] = {
    "no certificate": (lambda files: (None, files.key), "needs its certificate: give `ssl_certfile=`"),
    "another's key": (lambda files: (files.certificate, files.other_key), "unencrypted key that belongs to it"),
    "an encrypted key": (lambda files: (files.certificate, files.encrypted_key), "unencrypted key"),
    "no key": (lambda files: (files.certificate, None), "`ssl_certfile="),
    "no PEM": (lambda _: (Path(__file__), None), "give a PEM certificate"),
}


@pytest.mark.parametrize("case", WRONG)
def test_certificates_that_cannot_be_used_are_refused(files: Files, case: str) -> None:
    choose, message = WRONG[case]
    certificate, key = choose(files)
    with pytest.raises(UsageError, match=message):
        tls_context(ServeSettings(model_names=("m",), ssl_certfile=certificate, ssl_keyfile=key))


def test_certificate_and_key_may_be_one_file(files: Files) -> None:
    tls_context(ServeSettings(model_names=("m",), ssl_certfile=files.both))


def test_connections_without_a_handshake_keep_nobody_out(files: Files) -> None:
    settings = {"ssl_certfile": files.both, "max_connections": 6, "header_seconds": 60.0}
    trust = ssl.create_default_context(cafile=str(files.certificate))
    with live(FakeEngine(), **settings) as server, ExitStack() as silent:
        held = [silent.enter_context(server.connect()) for _ in range(30)]
        url = f"https://127.0.0.1:{server.port}/health"
        assert httpx.get(url, verify=trust, timeout=20).status_code == 200
        held[0].settimeout(10)
        with suppress(ConnectionResetError):
            assert held[0].recv(1) == b"", "the oldest is closed"


def test_a_handshake_has_the_time_that_headers_have(files: Files) -> None:
    with live(FakeEngine(), ssl_certfile=files.both, header_seconds=0.3) as server, server.connect() as silent:
        silent.settimeout(20)
        with suppress(ConnectionResetError):
            assert silent.recv(1) == b""


def test_a_connection_that_is_closed_before_its_handshake_begins_leaves_nothing(files: Files) -> None:
    """Where all that may be open have requests running, a new one is closed at once."""
    context = tls_context(ServeSettings(model_names=("m",), ssl_certfile=files.both))
    assert context is not None

    async def work() -> set[Any]:
        ours, theirs = socket.socketpair()
        full = WaitingConnections(0, 60.0)
        with theirs:
            loop = asyncio.get_running_loop()
            http = cast(HttpConnection, None)
            await loop.connect_accepted_socket(lambda: TlsHandshake(http, full, context), ours)
            _, left = await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()}, timeout=5)
        return left

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        assert not asyncio.run(work())
        gc.collect()
    assert not [str(one.message) for one in caught]
