"""What a controller learns of a pair is there for the next one; nothing damaged is, nor anything of another pair."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from eyas.engine.controller.experience import Experience
from eyas.engine.controller.gain import GainModel
from eyas.targets.fingerprint import keep_fingerprint

from ... import tiny
from .simulation import mixed
from .test_gain import WIDTHS, trained

FORM = (WIDTHS, 4)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("EYAS_KEEP", "1")


def experience(kind: str = "eagle3", seed: int = 0) -> Experience:
    drafter = tiny.drafter(kind, seed=seed)
    found = Experience.of("a target", drafter.network, FORM)
    assert found is not None
    return found


def test_the_next_model_forecasts_what_the_last_one_learned() -> None:
    learned = trained(mixed(1), rounds=300)
    fresh = GainModel(WIDTHS, 4)
    resumed = GainModel(WIDTHS, 4)
    learned.resume(experience())  # finds nothing, and keeps what it knows
    unchanged = learned.forecast([0], [0]).accepted
    learned.keep()
    resumed.resume(experience())
    forecast = resumed.forecast([0], [0]).accepted
    np.testing.assert_allclose(forecast, unchanged, rtol=0.1, atol=0.05)
    assert np.abs(forecast - fresh.forecast([0], [0]).accepted).max() > 0.2
    for model, known in ((fresh, False), (resumed, True)):
        model.texts.follow([0])
        assert model.texts.known is known


def test_little_is_not_kept() -> None:
    gain = trained(mixed(1), rounds=20)
    gain.resume(experience())
    gain.keep()
    assert not experience().path.exists()


def test_other_pairs_and_shapes_begin_anew() -> None:
    gain = trained(mixed(1), rounds=300)
    gain.resume(experience())
    gain.keep()
    assert experience().read()
    assert not experience("eagle1").read()
    assert not experience(seed=1).read()
    other = GainModel((1, 2), 3)
    fresh = GainModel((1, 2), 3)
    other.resume(experience())
    np.testing.assert_array_equal(other.forecast([0], [0]).accepted, fresh.forecast([0], [0]).accepted)


def test_two_quantizations_of_one_model_are_two_drafters() -> None:
    """Their norms are the same; only their matrices differ. What eyas quantizes itself is still the same drafter."""

    def path(change: Callable[[nn.Module], object]) -> Path:
        network = tiny.drafter("eagle3").network
        change(network)
        found = Experience.of("a target", network, FORM)
        assert found is not None
        return found.path

    def rounded(network: nn.Module) -> None:
        for weight in network.parameters():
            if weight.dim() == 2:
                weight.data = (weight.data * 8).round() / 8

    def quantized(network: nn.Module) -> None:
        keep_fingerprint(network)
        rounded(network)

    assert len({path(rounded), path(keep_fingerprint)}) == 2
    assert path(quantized) == path(keep_fingerprint) == path(lambda _: None)


def test_damage_is_as_if_nothing_were_known() -> None:
    found = experience()
    found.path.parent.mkdir(parents=True)
    found.path.write_bytes(b"\x10\0\0\0\0\0\0\0{broken")
    assert found.read() == {}
    GainModel(WIDTHS, 4).resume(found)


def test_nothing_is_kept_where_nothing_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EYAS_KEEP", "0")
    assert Experience.of("a target", tiny.drafter("eagle3").network, FORM) is None
