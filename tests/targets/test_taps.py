"""Which boundaries a drafter reads: outputs of full-attention layers where a model has both kinds."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import transformers as tf

from eyas.targets.taps import choose_taps, default_taps, why_taps

from .. import tiny

FULL = "full_attention"


def gemma3(layers: int) -> Any:
    return tf.Gemma3TextConfig(num_hidden_layers=layers)  # five sliding layers, then a full one


@pytest.mark.parametrize(
    ("config", "taps"),
    [
        (tf.LlamaConfig(num_hidden_layers=32), (2, 16, 29)),
        (gemma3(62), (6, 30, 60)),
        (gemma3(26), (6, 12, 24)),
        (tf.Gemma2Config(num_hidden_layers=26), (2, 12, 22)),
        (tf.Olmo3Config(num_hidden_layers=32), (4, 16, 28)),
        (gemma3(12), default_taps(12)),  # two full layers aren't enough for three taps
    ],
    ids=["llama", "gemma3-62", "gemma3-26", "gemma2", "olmo3", "too few"],
)
def test_taps_of_real_shapes(config: Any, taps: tuple[int, ...]) -> None:
    chosen = choose_taps(config)
    assert all(a < b for a, b in pairwise(chosen))
    assert chosen == taps


@pytest.mark.parametrize("config", [gemma3(62), tf.Olmo3Config(), tf.Gemma2Config()], ids=["gemma3", "olmo3", "gemma2"])
def test_the_layer_that_carries_a_tap_attends_to_everything(config: Any) -> None:
    """Boundary k is the output of layer k - 1."""
    chosen = choose_taps(config)
    assert all(config.layer_types[k - 1] == FULL for k in chosen)
    assert any(config.layer_types[k - 1] != FULL for k in default_taps(config.num_hidden_layers))
    assert "3 of 3 are outputs of full-attention layers, nearest the default" in why_taps(config, chosen)


def test_it_says_what_was_chosen() -> None:
    llama = tf.LlamaConfig(num_hidden_layers=32)
    assert why_taps(llama, (2, 16, 29)) == "taps 2, 16, 29: the default ones, because all layers are alike"
    assert why_taps(llama, (2, 5, 9)) == "taps 2, 5, 9: as requested"
    assert why_taps(gemma3(62), (2, 6, 12)) == "taps 2, 6, 12: 2 of 3 are outputs of full-attention layers"


@pytest.mark.parametrize("name", [*tiny.ARCHITECTURES])
def test_every_architecture_has_taps(name: str) -> None:
    target = tiny.target(name)
    chosen = choose_taps(target.config)
    target.check_taps(chosen)
    assert why_taps(target.config, chosen)
