"""States from a server that writes vLLM's files: the same store as by eyas's own pass, and what isn't believed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.data.capture.capture import Capture
from eyas.data.capture.connector import ConnectorStates, boundaries
from eyas.data.capture.workers import CaptureWorker, capture_on
from eyas.data.store import FeatureStore
from eyas.data.store.layout import ShardLayout
from eyas.errors import ClusterError, EndpointError, StoreError
from eyas.interop.serving.hidden_states import connector_arguments
from eyas.targets.loading import load_embedding_and_head
from eyas.targets.target import EmbeddingAndHead, FinalNorm

from ... import tiny
from ...labs.cluster.fake import FakeExecutor
from ..store.conftest import captured, prepare
from .connector_server import VERSION, ConnectorServer

LAYERS = 4


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> EmbeddingAndHead:
    folder = tmp_path_factory.mktemp("model")
    tiny.build_model("llama").save_pretrained(folder)
    return load_embedding_and_head(folder, dtype="float32", device="cpu")


class Connected:
    """A server and its states for a capture."""

    def __init__(self, prepared: Capture, short: EmbeddingAndHead, spool: Path) -> None:
        self.prepared = prepared
        self.spool = spool
        spool.mkdir()
        written = boundaries(prepared.settings.layout, LAYERS)
        self.server = ConnectorServer(tiny.target(), connector_arguments(written, spool, "float32", 100))
        self.states = ConnectorStates(
            self.server.url, "m", FinalNorm(short), written, lambda said: f"{said} (and its output)"
        )
        prepared.source = self.states
        prepared.engine_version = self.states.version()

    def run(self) -> None:
        with self.prepared.begun():
            assert self.prepared.run() is not None
        assert not list(self.spool.iterdir())

    def close(self) -> None:
        self.states.__exit__()
        self.server.close()


@pytest.fixture
def connect(short: EmbeddingAndHead, tmp_path: Path) -> Iterator[Any]:
    made: list[Connected] = []

    def connected(folder: Path, **options: Any) -> Connected:
        made.append(Connected(prepare(folder, engine="vllm", **options), short, tmp_path / f"spool{len(made)}"))
        return made[-1]

    yield connected
    for each in made:
        each.close()


def compared(own: FeatureStore, other: FeatureStore) -> None:
    """The tensors of both are the same, but for the rounding of another order of arithmetic."""
    assert len(own) == len(other)
    for number in range(len(own)):
        for ours, theirs in zip(own.read(number), other.read(number), strict=True):
            torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "options",
    [
        {"states": "float32", "taps": (4, 1, 2)},
        {"states": "float32", "taps": (0, 5), "final": "all"},
        {"states": "float32", "final": "top", "top": 4},
    ],
    ids=["answers", "all", "top"],
)
def test_the_same_store_as_by_eyas(options: dict[str, Any], connect: Any, tmp_path: Path) -> None:
    own = captured(tmp_path / "own", **options)
    connected = connect(tmp_path / "vllm", **options)
    connected.run()
    other = FeatureStore.open(tmp_path / "vllm")
    assert list(other.verify()) == []
    compared(own, other)
    assert other.settings.splits == own.settings.splits
    assert other.settings.target == own.settings.target
    assert (own.settings.engine, other.settings.engine) == ("eyas", "vllm")
    assert other.manifest.versions == {**own.manifest.versions, "vllm": VERSION}
    sent = connected.server.requests
    assert len(sent) == sum(split.rows for split in own.settings.splits.values())
    assert {key: sent[0][key] for key in sent[0].keys() - {"prompt"}} == {
        "model": "m", "max_tokens": 1, "temperature": 0, "return_token_ids": True,
    }  # fmt: skip


def test_what_is_missing_is_made_again_and_nothing_else(connect: Any, tmp_path: Path) -> None:
    store = tmp_path / "store"
    connect(store).run()
    before = {path.name: path.read_bytes() for path in store.iterdir()}
    (store / "manifest.json").unlink()
    (store / "train-00001.safetensors").unlink()
    again = connect(store)
    (plan,) = again.prepared.missing()
    again.run()
    assert len(again.server.requests) == plan.size.rows
    assert {path.name: path.read_bytes() for path in store.iterdir()} == before


def test_states_of_two_engines_are_not_mixed(connect: Any, tmp_path: Path) -> None:
    captured(tmp_path / "store")
    with pytest.raises(StoreError, match=r"engine was 'eyas', is 'vllm' \(`engine=`\)"):
        connect(tmp_path / "store").prepared.begun().__enter__()


def other_tokens(said: dict[str, Any]) -> None:
    said["tensors"]["token_ids"][1] += 1


def fewer_tokens(said: dict[str, Any]) -> None:
    said["tensors"] = {name: value[:-1] for name, value in said["tensors"].items()}


def fewer_layers(said: dict[str, Any]) -> None:
    said["tensors"]["hidden_states"] = said["tensors"]["hidden_states"][:, 1:].contiguous()


def in_half(said: dict[str, Any]) -> None:
    said["tensors"]["hidden_states"] = said["tensors"]["hidden_states"].half()


def another_layer(said: dict[str, Any]) -> None:
    said["tensors"]["hidden_states"][:, -1] = said["tensors"]["hidden_states"][:, 0]


def no_tensors(said: dict[str, Any]) -> None:
    said["tensors"] = None


def other_names(said: dict[str, Any]) -> None:
    said["tensors"]["states"] = said["tensors"].pop("hidden_states")


def no_path(said: dict[str, Any]) -> None:
    said["path"] = None


def no_token(said: dict[str, Any]) -> None:
    said["next"] = []


def overloaded(said: dict[str, Any]) -> None:
    said["status"] = 500


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        (other_tokens, StoreError, "the states of .* other tokens than the"),
        (fewer_tokens, StoreError, "other tokens"),
        (fewer_layers, StoreError, r"not \[.*its model doesn't give boundaries \[1, 2, 4\]"),
        (in_half, StoreError, r"in torch.float16, not .* in torch.float32"),
        (another_layer, StoreError, "the head predicts another next token"),
        (no_tensors, EndpointError, r"has written no hidden states into .* \(and its output\)"),
        (other_names, EndpointError, "has written no hidden states"),
        (no_path, EndpointError, r"names no file of hidden states.*\(and its output\)"),
        (no_token, EndpointError, "names no file"),
        (overloaded, EndpointError, r"vLLM says 500.*\(and its output\)"),
    ],
)
def test_what_is_not_believed(damage: Any, error: type[Exception], words: str, connect: Any, tmp_path: Path) -> None:
    connected = connect(tmp_path / "store")
    connected.server.damage = damage
    with connected.prepared.begun(), pytest.raises(error, match=words):
        connected.prepared.run()
    assert {path.name for path in (tmp_path / "store").iterdir()} == {"capture.json"}


def test_a_server_that_is_gone(connect: Any, tmp_path: Path) -> None:
    connected = connect(tmp_path / "store")
    connected.server.shutdown()
    connected.server.server_close()
    with pytest.raises(EndpointError, match=r"vLLM gave no answer.*\(and its output\)"):
        connected.run()  # asks for several rows at once: one would go through the connection that is open


def test_which_boundaries_are_written() -> None:
    layout = ShardLayout(hidden=8, vocab=9, taps=(16, 2))
    assert boundaries(layout, 32) == (2, 16, 32)
    assert boundaries(layout, 16) == (2, 16)


WORKERS: list[CaptureWorker] = []


def made() -> CaptureWorker:
    """The next worker; what makes them is pickled, they can't be."""
    return WORKERS.pop()


@pytest.mark.parametrize("versions", [("0.32.0", "0.32.0"), ("0.32.0", "0.31.0")])
def test_workers_with_servers_of_their_own(versions: tuple[str, str], connect: Any, tmp_path: Path) -> None:
    connected = connect(tmp_path / "store", states="float32")
    prepared, settings = connected.prepared, connected.prepared.settings
    WORKERS[:] = [CaptureWorker(connected.states, tmp_path / "store", settings, settings.target, v) for v in versions]
    with prepared.begun():
        if versions[0] != versions[1]:
            with pytest.raises(ClusterError, match="engine_version was"):
                capture_on(FakeExecutor(room=2), prepared, made)
            return
        manifest = capture_on(FakeExecutor(room=2), prepared, made)
    assert manifest.versions["vllm"] == versions[0]
    compared(captured(tmp_path / "own", states="float32"), FeatureStore.open(tmp_path / "store"))
