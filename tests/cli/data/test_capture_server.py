"""`eyas data capture --engine vllm`, with a stand-in for vLLM's server: its line, its workers, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pytest

from eyas.bench.serving import servers
from eyas.cli.common.cluster import ClusterOptions
from eyas.cli.data.capture import StateEngineOptions
from eyas.data.store import FeatureStore
from eyas.errors import EndpointError, UsageError
from eyas.interop.serving import hidden_states
from eyas.targets import load_target
from eyas.text.chats import exchange, write_chats

from ... import pairs
from ...data.capture.connector_server import ConnectorServer
from ...labs.cluster.fake import FakeExecutor
from ..conftest import Run

COMMAND = ("--engine", "vllm", "--engine-command", "true serve")


class StandIn:
    """In place of `ServerProcess`: the line is vLLM's, what it starts is a server in this process."""

    lines: ClassVar[list[list[str]]] = []
    log = ""
    """Unless it is empty: the output of a server that ends at once."""
    running = 0

    def __init__(self, name: str, command: Callable[[int], Sequence[str]], *, ready_seconds: float, bound: bool):
        assert (name, bound) == ("vllm", True)
        assert ready_seconds > 600
        self.line = list(command(8123))
        self.lines.append(self.line)

    def start(self) -> None:
        if self.log:
            raise EndpointError("the server 'vllm' ended at once")
        self._server = ConnectorServer(load_target(self.line[2], dtype="float32", device="cpu"), self.line)
        self.folder = self._server.folder
        self.url = self._server.url
        StandIn.running += 1

    def log_tail(self, lines: int = 12) -> str:
        return "\n".join(self.log.splitlines()[-lines:])

    def __exit__(self, *_: object) -> None:
        if not self.log:
            assert not list(self.folder.iterdir())
            StandIn.running -= 1
            self._server.close()


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[StandIn]]:
    monkeypatch.setattr(servers, "ServerProcess", StandIn)
    monkeypatch.setattr(StandIn, "lines", [])
    yield StandIn
    assert StandIn.running == 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pairs.save_target(tmp_path_factory.mktemp("pair") / "target")


@pytest.fixture
def words(model: Path, tmp_path: Path) -> tuple[Any, ...]:
    chats = tmp_path / "chats.jsonl"
    write_chats(chats, [exchange(f"c{i}", f"What is {i}+{i} in May?", f"<<{i}+{i}={2 * i}>> clips") for i in range(12)])
    return (
        "data",
        "capture",
        "--model",
        model,
        "--chats",
        chats,
        "--held-out-share",
        0.2,
        "--dtype",
        "float32",
        "--shard-mib",
        0.02,
        "--batch-tokens",
        64,
        "--states",
        "float32",
        "--output",
    )


def close(own: FeatureStore, other: FeatureStore) -> bool:
    return all(
        bool((ours.final.values - theirs.final.values).abs().max() < 1e-4)
        and bool((ours.taps.values - theirs.taps.values).abs().max() < 1e-4)
        for ours, theirs in ((own.read(i), other.read(i)) for i in range(len(own)))
        if ours.final is not None and theirs.final is not None and ours.taps is not None and theirs.taps is not None
    )


def test_the_states_are_the_servers(run: Run, words: tuple[Any, ...], model: Path, tmp_path: Path) -> None:
    assert run(*words, tmp_path / "own").exit_code == 0
    done = run(*words, tmp_path / "vllm", *COMMAND, "--engine-option", "--enforce-eager")
    assert done.exit_code == 0, done.output
    assert "minutes at" in done.stderr
    (line,) = StandIn.lines
    assert line[0:3] == ["true", "serve", str(model)]
    assert line[-1] == "--enforce-eager"
    layers = json.loads(line[line.index("--speculative-config") + 1])["draft_model_config"]["hf_config"]
    assert layers == {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    own = FeatureStore.open(tmp_path / "own")
    other = FeatureStore.open(tmp_path / "vllm")
    assert own.settings.splits == other.settings.splits
    assert other.settings.engine == "vllm"
    assert close(own, other)
    assert run(*words, tmp_path / "vllm", *COMMAND).exit_code == 0
    assert len(StandIn.lines) == 1  # nothing was missing


def test_a_dry_run_measures_the_server(run: Run, words: tuple[Any, ...], tmp_path: Path) -> None:
    done = run(*words, tmp_path / "store", *COMMAND, "--dry-run")
    assert done.exit_code == 0, done.output
    assert "minutes at" in done.stderr
    assert not (tmp_path / "store").exists()


def test_workers_start_their_own(
    run: Run, words: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ClusterOptions, "connected", lambda _: nullcontext(FakeExecutor(room=2)))
    done = run(*words, tmp_path / "store", *COMMAND, "--on", "ray")
    assert done.exit_code == 0, done.output
    assert len(StandIn.lines) == 2
    store = FeatureStore.open(tmp_path / "store")
    assert list(store.verify()) == []
    assert store.manifest.versions["vllm"]


def test_what_is_refused(run: Run, words: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "store"

    def refused(said: str, *options: Any, code: int = 2) -> None:
        result = run(*words, store, *options)
        assert result.exit_code == code, result.output
        assert said in " ".join(result.stderr.split())
        assert not list(store.glob("*.safetensors"))

    refused("--engine-option would be ignored: give --engine vllm, too", "--engine-option", "x")
    refused("vLLM isn't installed here: --engine-command says where", "--engine", "vllm")
    refused("there is no program 'no-such-program'", "--engine", "vllm", "--engine-command", "no-such-program")
    context = load_target(words[3], device="cpu").max_length
    long = tmp_path / "long.jsonl"
    write_chats(long, [exchange(f"c{i}", "In May?", "clips " * 2 * context) for i in range(3)])
    said = f"as many as the target's context, and vLLM adds one: give --max-length {context - 1}"
    refused(said, *COMMAND, "--chats", long, "--max-length", context)
    monkeypatch.setattr(
        StandIn, "log", "version 0.17.1\nValueError: Unsupported connector type: " + hidden_states.CONNECTOR
    )
    refused("vLLM 0.17.1 has no ExampleHiddenStatesConnector", *COMMAND, code=1)
    monkeypatch.setattr(StandIn, "log", "out of memory")
    refused("the server 'vllm' ended at once", *COMMAND, code=1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused("leave out torchrun", *COMMAND)


def test_an_installed_version_without_the_connector(
    run: Run, words: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "installed" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(package.parent))
    done = run(*words, tmp_path / "store", "--engine", "vllm")
    assert done.exit_code == 2
    assert "has no ExampleHiddenStatesConnector, which writes the hidden states: use vLLM 0.18 or later" in done.stderr


def test_an_adapter_is_refused(model: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    facts = {"peft_type": "LORA", "r": 4, "base_model_name_or_path": str(model)}
    (adapter / "adapter_config.json").write_text(json.dumps(facts))
    with pytest.raises(UsageError, match=r"there is a LORA adapter of rank 4 .*: merge it"):
        StateEngineOptions("vllm").check_target(str(adapter))
