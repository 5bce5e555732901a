"""Which window a drafter gets: its own, the one that is asked for, by rule, or none; and who can't have one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from eyas.drafters.checkpoint import load_network, open_checkpoint, save_network
from eyas.drafters.decoding import NetworkDrafter
from eyas.drafters.loading import load_drafter, make_drafter
from eyas.drafters.options import DrafterOptions
from eyas.drafters.registry import kind_for
from eyas.drafters.window.decoding import WindowPairs
from eyas.errors import CheckpointError, ConfigError, UsageError
from eyas.train.drafter.shape import DrafterShape, drafter_config

from ... import tiny


def pairs_of(drafter: NetworkDrafter) -> int | None:
    return drafter.pairs.window.pairs if isinstance(drafter.pairs, WindowPairs) else None


@pytest.mark.parametrize(
    ("own", "trained", "asked", "pairs"),
    [
        (None, None, None, None), (64, None, None, 64), (64, None, "off", None), (64, None, "32", 32),
        (None, None, 16, 16), (64, 1000, "auto", 64), (None, 1000, "auto", 964), (None, None, "auto", 2012),
    ],
)  # fmt: skip
def test_the_window_of_a_drafter(
    own: int | None, trained: int | None, asked: Any, pairs: int | None, tmp_path: Path
) -> None:
    provenance = {} if trained is None else {"max_length": trained}
    save_network(tiny.eagle3_module(taps=[1, 2, 4], draft_window=own), tmp_path, provenance)
    assert load_network(tmp_path).config.draft_window == own
    assert pairs_of(load_drafter(tmp_path, tiny.target(), window=asked)) == pairs


@pytest.mark.parametrize("kind", ["dflash", "dspark", "peagle", "mlp", "medusa"])
def test_kinds_that_have_none(kind: str, tmp_path: Path) -> None:
    save_network(tiny.network(kind), tmp_path)
    with pytest.raises(UsageError, match="`draft_window=8`: this drafter can't, it"):
        load_drafter(tmp_path, tiny.target(), window="8")
    assert pairs_of(load_drafter(tmp_path, tiny.target(), window="off")) is None


def test_windows_that_do_not_fit(tmp_path: Path) -> None:
    save_network(tiny.eagle3_module(taps=[1, 2, 4], max_position_embeddings=100), tmp_path)
    with pytest.raises(UsageError, match="takes 101 positions, and the drafter has 100: use a window of at most 96"):
        load_drafter(tmp_path, tiny.target(), window=97)
    assert pairs_of(load_drafter(tmp_path, tiny.target(), window=96)) == 96
    assert pairs_of(load_drafter(tmp_path, tiny.target(), window="auto")) == 64
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    save_network(tiny.eagle3_module(taps=[1, 2, 4], rope_parameters=rope), tmp_path / "dynamic")
    with pytest.raises(UsageError, match="RoPE of type dynamic changes with the length"):
        load_drafter(tmp_path / "dynamic", tiny.target(), window="auto")
    with pytest.raises(UsageError, match="`draft_window=0`: write a number"):
        load_drafter(tmp_path, tiny.target(), window="0")
    with pytest.raises(UsageError, match="`draft_window=` is for drafters that are networks, and ngram is none"):
        make_drafter(DrafterOptions(method="ngram", window="8"), tiny.target())


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ({"kind": "eagle3", "window": 253}, "use a window of at most 252"),
        ({"kind": "peagle", "window": 8}, "makes its guesses in one pass"),
        ({"kind": "dflash", "window": 8}, "makes its guesses in one pass"),
        ({"kind": "eagle3", "window": 8, "sliding_window": 8}, "sliding windows of their own"),
        (
            {"kind": "eagle3", "sliding_window": 8, "layer_types": ["sliding_attention"] * 2},
            "layer_types names 2 layers",
        ),
        ({"kind": "peagle", "sliding_anchored": True, "mask_token_id": 1}, "needs a sliding_window"),
    ],
)
def test_shapes_that_can_not_be_trained(shape: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        drafter_config(DrafterShape.model_validate(shape), tiny.target())
    with pytest.raises(ValueError, match="kind mlp has no window"):
        DrafterShape.model_validate({"kind": "mlp", "window": 8})


@pytest.mark.parametrize("kind", ["eagle3", "eagle3.1", "peagle", "dflash"])
def test_a_trained_window_by_layer_is_written(kind: str, tmp_path: Path) -> None:
    types = ("sliding_attention", "full_attention")
    shape = {"kind": kind, "layers": 2, "sliding_window": 32, "layer_types": types, "sliding_anchored": True}
    shape |= {} if kind.startswith("eagle3") else {"mask_token_id": 1}
    config = drafter_config(DrafterShape.model_validate(shape), tiny.target())
    save_network(kind_for(config).network(config), tmp_path)
    windows = [None if window is None else (window.size, window.anchored) for window in config.layer_windows]
    assert windows == [(32, True), None]
    assert open_checkpoint(tmp_path).config.layer_windows == config.layer_windows
    with pytest.raises(UsageError, match="sliding windows of their own"):
        load_drafter(tmp_path, tiny.target(), window=8)


@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "eagle3.1", "mla", "mtp"])
def test_a_trained_window_is_written(kind: str) -> None:
    config = drafter_config(DrafterShape.model_validate({"kind": kind, "window": 32}), tiny.target())
    assert config.model_dump()["draft_window"] == 32


def test_a_bad_window_in_a_file(tmp_path: Path) -> None:
    save_network(tiny.eagle3_module(taps=[1, 2, 4], draft_window=64), tmp_path)
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"draft_window": 64', '"draft_window": 4096'))
    with pytest.raises((ConfigError, CheckpointError), match="use a window of at most 2044"):
        load_drafter(tmp_path, tiny.target())
