"""A target's embedding and head loaded alone are those of the whole target."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eyas.targets import load_target
from eyas.targets.loading import load_embedding_and_head
from eyas.targets.taps import choose_taps

from .. import tiny


@pytest.mark.parametrize("name", ["llama", "gemma2", "olmo3", "gptoss", "deepseek3", "gpt2"])
def test_embedding_and_head_are_the_targets_own(name: str, tmp_path: Path) -> None:
    tiny.build_model(name).save_pretrained(tmp_path)
    short, whole = (
        load_embedding_and_head(tmp_path, dtype="float32", device="cpu"),
        load_target(tmp_path, device="cpu", prepacked=False),
    )
    for size in ("vocab_size", "hidden_size", "num_layers", "max_length"):
        assert getattr(short, size) == getattr(whole, size)
    assert choose_taps(short.config) == choose_taps(whole.config)
    assert len(short.layers) == 1
    states = torch.randn(3, whole.hidden_size)
    torch.testing.assert_close(short.head(states), whole.head(states), rtol=0, atol=0)
    for part in ("get_input_embeddings", "get_output_embeddings"):
        assert torch.equal(getattr(short.model, part)().weight, getattr(whole.model, part)().weight)
