"""The whole loop: traffic of a kind that the drafter doesn't know, a cycle, a trial; and what is forced or killed."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eyas.cli.app import main
from eyas.data.store.reader import FeatureStore
from eyas.drafters.checkpoint import load_network, save_network
from eyas.drafters.decoding import NetworkDrafter
from eyas.drafters.network import set_vocabulary
from eyas.drafters.options import DrafterOptions
from eyas.engine import Engine
from eyas.errors import CheckpointError, StoreError, TrainingError, UsageError
from eyas.labs.learn import cycle, trial
from eyas.labs.learn.cycle import CycleConfig, due, run_cycle
from eyas.labs.learn.folder import Card, LearnFolder
from eyas.labs.learn.gate import GateConfig, Judgment
from eyas.labs.learn.serving import LearnConfig, Learning
from eyas.labs.learn.supervise import supervise
from eyas.labs.learn.trial import CanaryReport
from eyas.options import EngineOptions
from eyas.types import Limits, Request, Stats

from ...forks import Fork
from .conftest import World

GATE = GateConfig(min_rows=4)


class Server:
    """An engine that learns, without HTTP; `look` is what its thread does once a second."""

    def __init__(self, world: World, folder: Path, canary: float = 0.3) -> None:
        self.learning = Learning(LearnConfig(folder, canary=canary))
        options = DrafterOptions(world.drafter, quantize="off")
        limits = Limits(max_running=4, prefix_tokens=1024)
        self.engine: Engine = world.session.engine(
            world.session.drafter(options),
            EngineOptions(tree="chain:3", limits=limits, around=self.learning.wrap(options, str(world.model))),
        )
        assert self.engine.speculation is not None
        self.learning.drafter = self.engine.speculation.drafter  # type: ignore[assignment]
        assert self.learning.folder is not None
        self.folder: LearnFolder = self.learning.folder
        self.world = world

    def serve(self, requests: Sequence[Request], looks: int = 10) -> Stats:
        """Serve, looking at the folder after every few requests; answers must be those of plain decoding."""
        pooled = Stats()
        answers = []
        for at in range(0, len(requests), looks):
            for done in self.engine.generate(requests[at : at + looks]):
                answers.append(list(done.token_ids))
                pooled.merge(done.stats)
            self.learning.look()
        plain = self.world.session.engine(None, EngineOptions(batch_size=8))
        assert answers == [list(done.token_ids) for done in plain.generate(requests)]
        return pooled

    def close(self) -> None:
        self.learning.close()


def random_drafter(world: World, path: Path, seed: int = 0) -> Path:
    network = load_network(world.drafter, world.session.target)
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in network.parameters():
            weight.copy_(torch.randn_like(weight) * 0.2)
    save_network(network, path)
    return path


def collected(world: World, folder: Path, count: int = 70) -> LearnFolder:
    """A folder with traffic of the other domain."""
    server = Server(world, folder)
    server.serve(world.requests(3, count, domain=1))
    server.close()
    return server.folder


@pytest.fixture(scope="module")
def shifted(world: World, tmp_path_factory: pytest.TempPathFactory) -> LearnFolder:
    """Such a folder, of which tests take copies."""
    return collected(world, tmp_path_factory.mktemp("shifted") / "learn")


def copied(folder: LearnFolder, path: Path) -> LearnFolder:
    return LearnFolder(Path(shutil.copytree(folder.path, path)))


def events(folder: LearnFolder) -> list[str]:
    return [event["event"] for event in folder.events()]


@pytest.mark.slow
def test_a_shift_is_learned_tested_and_served(
    world: World, shifted: LearnFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "ROWS", 12)
    folder = copied(shifted, tmp_path / "learn")
    config = CycleConfig(world.drafter.parent.parent / "store", min_rows=20, epochs=2.0, threads=1, gate=GATE)
    assert due(folder, config)
    said: list[str] = []
    assert run_cycle(folder, config, said.append) == 1, said
    assert folder.state.wanted == 1
    assert not folder.run.exists(), "no copy of traffic is left"
    assert not due(folder, config)
    card = folder.card(1)
    assert card.parent == 0
    assert card.traffic_rows > 40
    assert card.store_rows > 40
    assert card.gate["recent_candidate"] > 1.25 * card.gate["recent_incumbent"]
    assert card.gate["reference_lower"] >= 0.98

    server = Server(world, tmp_path / "learn")
    before = server.serve(world.requests(4, 30, domain=1), looks=30).accept_length
    for seed in range(5, 25):
        server.serve(world.requests(seed, 20, domain=1))
        if server.folder.state.settled:
            break
    after = server.serve(world.requests(30, 30, domain=1)).accept_length
    assert server.folder.state.settled == 1, server.folder.events()
    assert after > 1.25 * before
    assert events(server.folder) == ["promoted", "trial", "settled"]
    old = world.session.engine(
        world.session.drafter(DrafterOptions(world.drafter, quantize="off")), EngineOptions(tree="chain:3")
    )
    known = Stats()
    for done in old.generate(world.requests(21, 30)):
        known.merge(done.stats)
    assert server.serve(world.requests(21, 30)).accept_length > 0.95 * known.accept_length
    server.close()
    again = Server(world, tmp_path / "learn")
    assert again.learning.serving == 1, "a server that is started again goes on with the settled generation"
    again.close()


def test_a_bad_one_that_is_forced_is_taken_back(world: World, tmp_path: Path) -> None:
    server = Server(world, tmp_path / "learn", canary=0.1)
    number = server.folder.add(random_drafter(world, tmp_path / "bad"), Card(number=0, made=0.0))
    server.folder.change(lambda state: state.model_copy(update={"wanted": number}), "promoted", generation=number)
    server.learning.look()
    assert server.learning.trial is not None
    requests = world.requests(5, 200)
    for at in range(0, 200, 20):
        server.serve(requests[at : at + 20])
        if server.folder.state.refused:
            break
    state = server.folder.state
    assert (state.wanted, state.settled) == (0, 0)
    assert "behind beyond noise" in state.refused[number]
    assert events(server.folder) == ["promoted", "trial", "reverted"]
    assert server.learning.trial is None
    server.serve(world.requests(6, 3))
    assert server.learning.drafter is not None
    assert server.learning.drafter.generations.numbers == [0]
    server.close()


def test_what_can_not_be_loaded_is_taken_back(world: World, tmp_path: Path) -> None:
    server = Server(world, tmp_path / "learn")
    number = server.folder.add(random_drafter(world, tmp_path / "bad"), Card(number=0, made=0.0))
    (server.folder.generation(number) / "model.safetensors").write_bytes(b"nonsense")
    server.folder.change(lambda state: state.model_copy(update={"wanted": number}), "promoted", generation=number)
    server.serve(world.requests(5, 6), looks=2)
    assert "can't be served" in server.folder.state.refused[number]
    assert server.folder.state.wanted == 0
    server.close()


def test_by_hand(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = Server(world, tmp_path / "learn")
    folder = server.folder
    path = str(tmp_path / "learn")
    folder.add(world.drafter, Card(number=0, parent=0, made=0.0))

    def eyas(*words: str) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["eyas", "learn", *words])
            with pytest.raises(SystemExit) as done:
                main()
        assert not done.value.code
        return capsys.readouterr().out

    eyas("promote", path)
    assert folder.state.wanted == 1
    server.learning.look()
    assert server.learning.trial is not None
    eyas("revert", path)
    assert (folder.state.wanted, folder.state.settled) == (0, 0)
    server.learning.look()
    assert server.learning.trial is None
    eyas("revert", path, "1")
    server.learning.look()
    assert server.learning.serving == 1, "by hand it goes at once"
    server.serve(world.requests(1, 3))
    assert server.learning.drafter is not None
    assert server.learning.drafter.generations.numbers == [1]
    eyas("pin", path)
    assert folder.state.pinned
    shown = eyas("status", path)
    assert "serves" in shown
    assert "pinned" in shown
    assert json.loads(eyas("status", path, "--json"))["state"]["settled"] == 1
    eyas("pin", path, "--off")
    assert not folder.state.pinned
    server.close()


def test_a_pinned_folder_keeps_its_generation(
    world: World, shifted: LearnFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(shifted, tmp_path / "learn")
    monkeypatch.setattr(cycle.Gate, "judge", lambda *_: Judgment(True, "it wins", {}))
    monkeypatch.setattr(cycle, "_train", lambda *_: shutil.copytree(world.drafter, folder.run / "run" / "best"))
    config = CycleConfig(min_rows=20, gate=GATE)
    for pinned in (True, False):
        folder.change(lambda state, pinned=pinned: state.model_copy(update={"pinned": pinned, "learned": ""}), "pinned")
        number = run_cycle(folder, config)
        assert number is not None
        assert folder.state.wanted == (0 if pinned else number)


def test_one_that_forgets_comes_half_way_back(
    world: World, shifted: LearnFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are means; those of a token that the parent can't draft are the candidate's."""
    folder = copied(shifted, tmp_path / "learn")
    far = random_drafter(world, tmp_path / "far")
    network = load_network(far, world.session.target)
    ids = network.target_ids.clone()
    fresh = int((ids != torch.arange(len(ids))).nonzero()[0])
    ids[fresh] = fresh  # the first token that the parent doesn't know
    set_vocabulary(network, ids)
    save_network(network, far)
    monkeypatch.setattr(cycle, "_train", lambda *_: shutil.copytree(far, folder.run / "run" / "best"))
    judged: list[Path] = []

    def judge(_: object, candidate: Path) -> Judgment:
        judged.append(candidate)
        return Judgment(len(judged) == 3, "", {}, forgets=len(judged) < 3)

    monkeypatch.setattr(cycle.Gate, "judge", judge)
    number = run_cycle(folder, CycleConfig(min_rows=20, gate=GATE))
    assert number is not None
    assert folder.card(number).gate["share_of_change"] == 0.25
    made, old, new = (load_network(path).state_dict() for path in (folder.generation(number), world.drafter, far))
    for name in old.keys() - {"d2t", "t2d"}:
        mean = (0.75 * old[name].float() + 0.25 * new[name].float()).to(made[name])
        if name == "lm_head.weight":
            mean[fresh] = new[name][fresh]
        torch.testing.assert_close(made[name], mean, msg=name, rtol=0.01, atol=0.005)  # rounded twice


def test_enough_rows_are_held_out_however_few_are_learned_from(shifted: LearnFolder, tmp_path: Path) -> None:
    folder = copied(shifted, tmp_path / "learn")
    _, store = cycle._snapshot(folder, CycleConfig(min_rows=1, max_rows=4, gate=GATE))
    assert len(store.rows("held")) == GATE.min_rows


def test_folders_belong_to_a_pair(world: World, tmp_path: Path) -> None:
    Server(world, tmp_path / "learn").close()
    other = random_drafter(world, tmp_path / "other")
    with pytest.raises(UsageError, match="another drafter"):
        Server(world._replace(drafter=other), tmp_path / "learn")
    with pytest.raises(UsageError, match="fewer than 200 new rows"):
        run_cycle(LearnFolder(tmp_path / "learn"), CycleConfig())


def test_old_generations_are_dropped(world: World, tmp_path: Path) -> None:
    Server(world, tmp_path / "learn").close()
    folder = LearnFolder(tmp_path / "learn")
    for _ in range(9):
        folder.add(world.drafter, Card(number=0, made=0.0))
    folder.change(lambda state: state.model_copy(update={"settled": 2}), "x")
    assert folder.numbers() == [0, 4, 5, 6, 7, 8, 9]
    folder.add(world.drafter, Card(number=0, made=0.0))
    assert folder.numbers() == [0, 5, 6, 7, 8, 9, 10]


def cycle_command(path: Path, store: Path) -> list[str]:
    options = [f"--store={store}", "--least-rows=20", "--epochs=6", "--threads=1", "--confidence=0.9"]
    return [sys.executable, "-m", "eyas", "learn", "run", str(path), "--once", *options]


@pytest.mark.slow
def test_a_cycle_killed_at_random_moments_goes_on(world: World, tmp_path: Path) -> None:
    """kill -9 twenty times; what comes out in the end is what comes out without."""
    folder = collected(world, tmp_path / "learn", count=320)
    shutil.copytree(folder.path, tmp_path / "whole")
    store = world.drafter.parent.parent / "store"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    subprocess.run(cycle_command(tmp_path / "whole", store), check=True, env=environment, capture_output=True)
    seconds = time.monotonic() - began
    live = {path.name: path.read_bytes() for path in folder.traffic.iterdir()}
    rng = random.Random(0)
    kills = 0
    while kills < 20:
        child = subprocess.Popen(
            cycle_command(folder.path, store), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            child.wait(rng.uniform(0.2, 1.0) * seconds)
            break
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
            kills += 1
    else:
        subprocess.run(cycle_command(folder.path, store), check=True, env=environment, capture_output=True)
    assert kills
    made = folder.generation(1) / "model.safetensors"
    assert made.read_bytes() == (tmp_path / "whole" / "generations" / "0001" / "model.safetensors").read_bytes()
    assert {path.name: path.read_bytes() for path in folder.traffic.iterdir()} == live


_WORKS = """
import os, sys, time
from pathlib import Path
Path(sys.argv[1]).write_text(str(os.getpid()))
while True:
    time.sleep(0.01)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only Linux says whether a process is stopped")
def test_the_learner_stops_within_a_second_of_load(tmp_path: Path) -> None:
    """It is stopped while the server works, goes on afterwards, and dies with its supervisor."""
    folder = LearnFolder(tmp_path)
    written = tmp_path / "pid"
    code = (
        "import sys; from pathlib import Path; from eyas.labs.learn.folder import LearnFolder\n"
        "from eyas.labs.learn.supervise import supervise\n"
        "supervise(LearnFolder(Path(sys.argv[1])), sys.argv[2:], lambda: True, pause=0.05)"
    )
    supervisor = Fork(["-c", code, tmp_path, sys.executable, "-c", _WORKS, written])
    try:
        assert soon(lambda: written.exists() and bool(written.read_text()), 120)
        pid = int(written.read_text())
        assert not stopped(pid)
        assert os.sched_getscheduler(pid) == os.SCHED_IDLE
        assert os.getpriority(os.PRIO_PROCESS, pid) == 19
        with folder.locked():
            for _ in range(8):
                folder.mark_busy()
                time.sleep(0.1)
            assert not stopped(pid), "it may have been about to let go of the lock"
        began = time.monotonic()
        while not stopped(pid):
            folder.mark_busy()
            assert time.monotonic() - began < 1.0
            time.sleep(0.02)
        assert soon(lambda: not stopped(pid), 10), "it goes on when the load is over"
    finally:
        supervisor.kill()
        supervisor.wait()
    assert soon(lambda: not Path(f"/proc/{pid}").exists() or state_of(pid) == "Z", 10), "it outlived its supervisor"


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def stopped(pid: int) -> bool:
    return state_of(pid) == "T"


def soon(what: Callable[[], bool], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if what():
            return True
        time.sleep(0.02)
    return False


def test_a_failing_cycle_is_reported(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="exit code 3"):
        supervise(LearnFolder(tmp_path), [sys.executable, "-c", "raise SystemExit(3)"], lambda: True, yields=False)


def step(server: Server, running: int) -> None:
    server.learning.stepped(replace(server.engine.state(), running=running), None, None)


def quiet(server: Server) -> bool:
    """Whether the server gives no sign for a while."""
    with suppress(FileNotFoundError):
        (server.folder.path / "busy").unlink()
    time.sleep(0.5)
    return not server.folder.busy


def gives_a_sign(server: Server) -> bool:
    with suppress(FileNotFoundError):
        (server.folder.path / "busy").unlink()
    return soon(lambda: server.folder.busy, 5)


def test_the_server_says_that_it_works_for_as_long_as_it_does(world: World, tmp_path: Path) -> None:
    """Also while a step takes long, and while its thread loads a drafter."""
    server = Server(world, tmp_path / "learn")
    loading = threading.Event()
    go_on = threading.Event()
    server.learning._poll = 0.01

    def load(_: Path) -> NetworkDrafter:
        loading.set()
        go_on.wait()
        raise CheckpointError("it can't be read")

    server.learning._load = load
    assert server.learning.drafter is not None
    server.learning.start(server.learning.drafter)
    try:
        assert quiet(server)
        step(server, running=0)
        assert gives_a_sign(server), "a step that was all there was to do"
        assert quiet(server)
        number = server.folder.add(world.drafter, Card(number=0, made=0.0))
        server.folder.change(lambda state: state.model_copy(update={"wanted": number}), "promoted")
        assert loading.wait(10)
        step(server, running=2)
        assert gives_a_sign(server)
        assert gives_a_sign(server), "a step that takes long"
        step(server, running=0)
        assert soon(lambda: quiet(server), 5)
    finally:
        go_on.set()
        server.close()


def test_a_disk_that_hangs_keeps_no_step_waiting(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(world, tmp_path / "learn")
    hanging = threading.Event()
    go_on = threading.Event()
    monkeypatch.setattr(server.folder, "mark_busy", lambda: (hanging.set(), go_on.wait()))
    assert server.learning.drafter is not None
    server.learning.start(server.learning.drafter)
    try:
        step(server, running=1)
        assert hanging.wait(10)
        began = time.monotonic()
        for _ in range(100):
            step(server, running=1)
        assert time.monotonic() - began < 1.0
    finally:
        go_on.set()
        server.close()


def test_a_settled_generation_that_is_damaged_gives_way_to_the_first(world: World, tmp_path: Path) -> None:
    """The server starts all the same, and the learner isn't kept waiting for a trial that nobody makes."""
    server = Server(world, tmp_path / "learn")
    number = server.folder.add(world.drafter, Card(number=0, made=0.0))
    server.folder.change(lambda state: state.model_copy(update={"wanted": number, "settled": number}), "promoted")
    (server.folder.generation(number) / "model.safetensors").write_bytes(b"nonsense")
    server.learning.look()
    assert (server.folder.state.wanted, server.folder.state.settled) == (0, 0), "while it serves"
    server.close()
    server.folder.change(lambda state: state.model_copy(update={"wanted": number, "settled": number}), "promoted")
    again = Server(world, tmp_path / "learn")
    assert again.learning.serving == 0
    assert (again.folder.state.wanted, again.folder.state.settled) == (0, 0), "when it starts"
    assert "can't be served" in again.folder.state.refused[number]
    again.close()


def test_what_is_reverted_by_hand_at_the_end_of_its_trial_stays_reverted(world: World, tmp_path: Path) -> None:
    server = Server(world, tmp_path / "learn")
    number = server.folder.add(world.drafter, Card(number=0, made=0.0))
    server.folder.change(lambda state: state.model_copy(update={"wanted": number}), "promoted")
    server.learning.look()
    assert server.learning.trial is not None
    server.learning.trial.report = CanaryReport("settle", "not behind")
    server.folder.change(lambda state: state.model_copy(update={"wanted": 0}), "reverted")
    server.learning.look()
    assert (server.folder.state.wanted, server.folder.state.settled, server.learning.serving) == (0, 0, 0)
    server.close()


def test_training_that_fails_ends_its_cycle(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rows would fail again and again."""
    folder = collected(world, tmp_path / "learn", count=40)

    def fails(*_: object) -> None:
        raise TrainingError("the gradient of step 1 is not finite")

    monkeypatch.setattr(cycle, "_train", fails)
    config = CycleConfig(min_rows=20, gate=replace(GATE, min_rows=1))
    assert run_cycle(folder, config) is None
    assert "not finite" in folder.events()[-1]["reason"]
    assert not due(folder, config)
    assert not folder.run.exists()


def test_no_cycle_begins_that_could_not_be_tested(world: World, tmp_path: Path) -> None:
    folder = collected(world, tmp_path / "learn", count=40)
    assert due(folder, CycleConfig(min_rows=20, gate=GateConfig(min_rows=1)))
    assert not due(folder, CycleConfig(min_rows=20, gate=GateConfig(min_rows=30)))


def test_rows_of_the_store_are_mixed_in_by_tokens_and_must_be_the_target_s(world: World, tmp_path: Path) -> None:
    folder = collected(world, tmp_path / "learn", count=4)
    learned = cycle._traffic(folder).newest("train", 100)
    store = FeatureStore.open(world.drafter.parent.parent / "store")
    tokens = sum(len(row.tokens.tokens) for row in learned)
    mixed = cycle.mixed_rows(store, folder.settings, learned, seed=0)
    found = sum(len(row.tokens.tokens) for row in mixed)
    assert tokens <= found < tokens + max(len(row.tokens.tokens) for row in mixed)
    other = folder.settings.model_copy(
        update={"target": folder.settings.target.model_copy(update={"fingerprint": "x"})}
    )
    with pytest.raises(StoreError, match="another target"):
        cycle.mixed_rows(store, other, learned, seed=0)
