"""The gate: a better drafter passes, a worse one never does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from eyas.data.store.reader import FeatureStore
from eyas.drafters.checkpoint import load_network, save_network
from eyas.drafters.network import DraftNetwork
from eyas.labs.learn.gate import Gate, GateConfig, replayed
from eyas.options import EngineOptions

from .conftest import World

ROWS = 18
CONFIG = GateConfig(min_rows=16)
"""Half as many rows as by default: every row is replayed alone."""


@pytest.fixture(scope="module")
def recent(world: World, tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    return world.store(tmp_path_factory.mktemp("recent") / "store", {"held": world.rows(7, ROWS)})


@pytest.fixture(scope="module")
def gate(world: World, recent: FeatureStore) -> Gate:
    """Compares with the drafter, which is replayed once for all tests."""
    return Gate(world.drafter, world.session.target, recent, "held", None, CONFIG)


def changed(world: World, path: Path, how: str, seed: int) -> Path:
    """The drafter, made worse in one of three ways."""
    network = load_network(world.drafter, world.session.target).float()
    torch.manual_seed(seed)
    with torch.no_grad():
        _spoil(network, how)
    save_network(network, path)
    return path


def _spoil(network: DraftNetwork, how: str) -> None:
    if how == "random":
        for weight in network.parameters():
            weight.copy_(torch.randn_like(weight) * weight.std().nan_to_num(0.1).clamp(min=0.01))
    elif how == "taps":  # it reads them in another order than it was trained with
        width = network.fc.weight.shape[1] // 3  # type: ignore[union-attr, index]
        order = [(1, 2, 0), (2, 0, 1), (2, 1, 0)][torch.randint(3, ()).item()]  # type: ignore[call-overload]
        network.fc.weight.copy_(torch.cat([network.fc.weight[:, k * width : (k + 1) * width] for k in order], dim=1))  # type: ignore[union-attr, index, operator]
    else:  # a step of training on nonsense
        for weight in network.parameters():
            weight.add_(torch.randn_like(weight) * weight.std().nan_to_num(0.1), alpha=0.3)


@pytest.mark.parametrize("how", ["random", "taps", "noise"])
@pytest.mark.parametrize("tries", [range(1), pytest.param(range(1, 17), marks=pytest.mark.slow)])
def test_a_worse_one_is_never_promoted(world: World, gate: Gate, tmp_path: Path, how: str, tries: range) -> None:
    """Not in 51 tries."""
    for seed in tries:
        found = gate.judge(changed(world, tmp_path / str(seed), how, seed))
        assert not found.promoted, found.reason


def test_an_equal_one_is_not_promoted(world: World, gate: Gate) -> None:
    found = gate.judge(world.drafter)
    assert not found.promoted
    assert found.figures["recent_lower"] == 1.0


def test_a_better_one_is_promoted(world: World, recent: FeatureStore, tmp_path: Path) -> None:
    worse = changed(world, tmp_path / "worse", "noise", 0)
    target = world.session.target
    found = Gate(worse, target, recent, "held", recent, CONFIG).judge(world.drafter)
    assert found.promoted, found.reason
    assert found.figures["recent_candidate"] > found.figures["recent_incumbent"]
    assert (
        "too few"
        in Gate(worse, target, recent, "held", None, GateConfig(min_rows=ROWS + 1)).judge(world.drafter).reason
    )


def test_one_that_forgets_is_not_promoted(world: World, tmp_path: Path) -> None:
    """Of two drafters each knows the tokens of one domain only; traffic has moved to that of the second."""
    knows = [_without_tokens(world, tmp_path / str(domain), domain) for domain in (1, 0)]
    recent = world.store(tmp_path / "recent", {"held": world.rows(8, ROWS, domain=1)})
    reference = world.store(tmp_path / "reference", {"reference": world.rows(9, ROWS, domain=0)})
    found = Gate(knows[0], world.session.target, recent, "held", reference, CONFIG).judge(knows[1])
    assert not found.promoted
    assert found.figures["recent_lower"] > 1.0
    assert found.forgets
    assert "it forgets" in found.reason


def _without_tokens(world: World, path: Path, domain: int) -> Path:
    network = load_network(world.drafter, world.session.target)
    half = world.session.target.vocab_size // 2
    gone = network.target_ids >= half if domain else network.target_ids < half
    with torch.no_grad():
        for head in network.heads:
            head.weight[gone] = 0.0
    save_network(network, path)
    return path


def test_other_forms_and_damaged_ones_are_refused(world: World, gate: Gate, tmp_path: Path) -> None:
    network = load_network(world.drafter, world.session.target)
    for name, change in (("taps", {"taps": (0, 1, 2)}), ("theta", {"rms_norm_eps": 0.5})):
        network.config = network.config.model_copy(update=change)
        save_network(network, tmp_path / name)
        found = gate.judge(tmp_path / name)
        assert "another form" in found.reason
    (tmp_path / "taps" / "model.safetensors").write_bytes(b"nonsense")
    found = gate.judge(tmp_path / "taps")
    assert "can't be loaded" in found.reason


def test_replayed_lengths_are_those_of_greedy_decoding(world: World, tmp_path: Path) -> None:
    """On greedy answers the replay says what chains of that depth really accept, but for where rounds begin."""
    rows = world.rows(11, 30, temperature=0.0)
    store = world.store(tmp_path / "greedy", {"held": rows})
    network = load_network(world.drafter, world.session.target)
    sums, counts = replayed(network, world.session.target, store, "held")
    drafter = world.session.drafter(_options(world))
    engine = world.session.engine(drafter, EngineOptions(tree="chain:6", batch_size=4))
    done = engine.generate(world.requests(11, 30, temperature=0.0))
    passes = sum(one.stats.target_passes for one in done)
    real = sum(one.stats.walked + one.stats.target_passes for one in done) / passes
    assert np.sum(sums) / np.sum(counts) == pytest.approx(real, rel=0.15)
    assert real > 2.0


def _options(world: World):  # type: ignore[no-untyped-def]
    from eyas.drafters.options import DrafterOptions

    return DrafterOptions(world.drafter, quantize="off")
