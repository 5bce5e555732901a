"""What a request's headers say before anything else is read: the host it is for, the length and coding of its body."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import httpx
import pytest

from eyas.serve.http.request import _Gunzip

from ..conftest import client_of, run
from ..fakes import FakeEngine
from ..live import live
from .test_connections import answered, ended
from .test_sockets import CHAT, body, still_answers


def status(sent: str, **settings: Any) -> int:
    """The status of a request for this host, to a server with these settings."""

    async def work() -> int:
        async with client_of(FakeEngine(), **settings) as client:
            answer = await client.post("/v1/completions", json={"model": "tiny", "prompt": "a"}, headers={"Host": sent})
            if answer.status_code != 200:
                assert answer.json()["error"]["code"] == "host_not_allowed"
                assert sent[:20] in answer.json()["error"]["message"]
            return answer.status_code

    found: int = run(work())
    return found


HERE = ["127.0.0.1", "127.0.0.1:8000", "localhost", "LOCALHOST:80", "localhost.", "[::1]:8000", "app.localhost"]
LAN = ["192.168.1.5:8000", "[fe80::1]", "eyas:8000"]
ELSEWHERE = ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example"]
NONSENSE = [
    "",
    "a b.example",
    "me@evil.example",
    "evil.example/",
    "evil.example:port",
    "[::1",
    "evil.example#.localhost",
]


@pytest.mark.parametrize("host", HERE)
def test_this_machine_is_known_by_its_own_names(host: str) -> None:
    assert status(host) == 200
    assert status(host, host="0.0.0.0") == 200


@pytest.mark.parametrize("host", [*LAN, *ELSEWHERE, *NONSENSE])
def test_where_only_this_machine_can_connect_no_other_name_is_known(host: str) -> None:
    assert status(host) == 403


@pytest.mark.parametrize("host", LAN)
def test_what_no_stranger_can_point_here_is_known_where_others_connect(host: str) -> None:
    assert status(host, host="0.0.0.0") == status(host, host="192.168.1.5") == 200


@pytest.mark.parametrize("host", [*ELSEWHERE, *NONSENSE])
def test_other_names_are_refused_there_too(host: str) -> None:
    assert status(host, host="0.0.0.0") == 403


@pytest.mark.parametrize(
    ("allowed", "known", "unknown"),
    [
        ("api.example", "api.example:443", "www.api.example"),
        ("*.lan.example", "gpu.lan.example", "lan.example"),
        ("*", "evil.example", None),
    ],
)
def test_names_that_are_allowed(allowed: str, known: str, unknown: str | None) -> None:
    assert status(known, allowed_hosts=(allowed,)) == 200
    assert unknown is None or status(unknown, allowed_hosts=(allowed,)) == 403


def test_the_name_it_listens_on_is_known() -> None:
    assert status("gpu7.example", host="gpu7.example") == 200


def test_the_host_is_looked_at_before_the_key_and_for_what_is_open() -> None:
    async def work() -> list[int]:
        async with client_of(FakeEngine(), api_keys=("key",)) as client:
            evil = {"Host": "evil.example"}
            return [(await client.get(path, headers=evil)).status_code for path in ("/health", "/v1/models")]

    assert run(work()) == [403, 403]


def test_http_1_0_needs_no_host() -> None:
    with live(FakeEngine()) as server, server.connect() as client:
        client.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert ended(client)[0].startswith(b"HTTP/1.1 200")


def test_two_lengths_are_refused_and_nothing_behind_them_is_read() -> None:
    with live(FakeEngine()) as server, server.connect() as client:
        smuggled = b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + smuggled
        )
        answer, _ = ended(client)
        still_answers(server)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"ambiguous_length" in answer
    assert answer.count(b"HTTP/1.1") == 1


def posted(content: bytes, coding: str, **settings: Any) -> httpx.Response:
    """The answer to a body in a coding."""

    async def work() -> httpx.Response:
        async with client_of(FakeEngine(), **settings) as client:
            headers = {"Content-Type": "application/json", "Content-Encoding": coding}
            return await client.post(CHAT, content=content, headers=headers)

    answer: httpx.Response = run(work())
    return answer


@pytest.mark.parametrize("coding", ["gzip", "x-gzip", "GZIP"])
def test_gzip_is_read(coding: str) -> None:
    assert posted(gzip.compress(body(max_tokens=1)), coding).status_code == 200


def test_identity_is_no_coding() -> None:
    assert posted(body(max_tokens=1), "identity").status_code == 200


@pytest.mark.parametrize("coding", ["br", "zstd", "deflate", "gzip, gzip"])
def test_other_codings_are_refused_as_such(coding: str) -> None:
    answer = posted(body(), coding)
    assert answer.status_code == 415
    assert answer.json()["error"]["code"] == "unsupported_encoding"
    assert answer.headers["accept-encoding"] == "gzip, identity"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (body(), "not gzip"),
        (gzip.compress(body())[:-4], "is cut off"),
        (gzip.compress(body()) + b"more", "continues after its end"),
        (b"", "is cut off"),
    ],
    ids=["plain", "cut", "longer", "empty"],
)
def test_what_is_not_gzip_is_400(content: bytes, problem: str) -> None:
    answer = posted(content, "gzip")
    assert answer.status_code == 400
    assert problem in answer.json()["error"]["message"]


def test_a_bomb_is_too_large_before_it_is_read() -> None:
    bomb = gzip.compress(b" " * (64 << 20))
    assert len(bomb) < 100_000
    answer = posted(bomb, "gzip", max_body_bytes=100_000)
    assert answer.status_code == 413
    gunzip = _Gunzip(1000)
    assert len(gunzip.decompress(bomb, True)) == 1001  # no more is ever made of it
    assert gunzip.too_large


def test_gzip_comes_in_pieces() -> None:
    whole = json.dumps({"text": "x" * 5000}).encode()
    packed = gzip.compress(whole)
    gunzip = _Gunzip(len(whole))
    pieces = [gunzip.decompress(packed[at : at + 7], at + 7 >= len(packed)) for at in range(0, len(packed), 7)]
    assert b"".join(pieces) == whole
    assert not gunzip.too_large
    assert zlib.decompress(packed, wbits=31) == whole


def test_a_gzip_body_on_a_socket() -> None:
    packed = gzip.compress(body(max_tokens=1))
    with live(FakeEngine()) as server, server.connect() as client:
        client.sendall(
            f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Encoding: gzip\r\n"
            f"Content-Length: {len(packed)}\r\n\r\n".encode()
            + packed
        )
        assert answered(client).startswith(b"HTTP/1.1 200")
