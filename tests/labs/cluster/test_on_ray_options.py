"""What may be said about a cluster, and which clusters are none."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from eyas.cli.common.cluster import ClusterOptions, parse_on
from eyas.errors import UsageError
from eyas.labs.cluster.on_ray import RayExecutor, room
from eyas.work import ClusterConfig


def test_addresses() -> None:
    assert parse_on("ray") is None
    assert parse_on("ray:auto") == "auto"
    assert parse_on("ray:head:6379") == "head:6379"
    assert parse_on("ray:ray://10.0.0.1:10001") == "ray://10.0.0.1:10001"
    for text in ("", "ray:", "rya", "slurm:10.0.0.1:6379", "ray:head", "ray:head:x", "ray:http://head:1"):
        with pytest.raises(UsageError, match="write ray, or ray:ADDRESS"):
            parse_on(text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (ClusterOptions(workers=2, gpus_per_worker=1), "--workers, --gpus-per-worker would be ignored without --on"),
        (ClusterOptions(on="dask"), "--on dask: write ray"),
    ],
    ids=["no --on", "another engine"],
)
def test_wrong_options(options: ClusterOptions, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        options.check()


def test_urls_and_torchrun_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ClusterOptions(on="ray").check(Path("/shared/store"))
    assert not ClusterOptions().check(Path("s3://bucket/store"))
    with pytest.raises(UsageError, match="is a URL: give a folder that all machines share"):
        ClusterOptions(on="ray").check(Path("s3://bucket/store"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="without torchrun"):
        ClusterOptions(on="ray").check()


def test_an_address_where_nothing_answers() -> None:
    pytest.importorskip("ray")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and doesn't listen
        with pytest.raises(UsageError, match=r"nothing answers there .*Start a cluster on its first machine with `ray"):
            RayExecutor(ClusterConfig(address=f"127.0.0.1:{taken.getsockname()[1]}"))


def test_ray_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"needs the extra ray: pip install 'eyas\[ray\]'"):
        RayExecutor(ClusterConfig())


def test_how_many_workers_fit() -> None:
    machines = [{"CPU": 8.0, "GPU": 2.0}, {"CPU": 3.0}, {}]
    assert room(machines, 1, 0) == 11
    assert room(machines, 4, 0) == 2
    assert room(machines, 1, 1) == 2
    assert room(machines, 1, 0.5) == 4
    assert room(machines, 6, 0.5) == 1
    assert room(machines, 9, 0) == 0
