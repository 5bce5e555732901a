"""A target's embedding and head loaded alone are those of the whole target."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eyas.errors import UnsupportedModelError
from eyas.targets import load_target
from eyas.targets.loading import load_embedding_and_head
from eyas.targets.taps import choose_taps
from eyas.targets.target import FinalNorm

from .. import tiny


@pytest.mark.parametrize("name", ["llama", "gemma2", "olmo3", "gptoss", "deepseek3", "gpt2"])
def test_embedding_and_head_are_the_targets_own(name: str, tmp_path: Path) -> None:
    tiny.build_model(name).save_pretrained(tmp_path)
    short = load_embedding_and_head(tmp_path, dtype="float32", device="cpu")
    whole = load_target(tmp_path, device="cpu", prepacked=False)
    for size in ("vocab_size", "hidden_size", "num_layers", "max_length"):
        assert getattr(short, size) == getattr(whole, size)
    assert choose_taps(short.config) == choose_taps(whole.config)
    assert len(short.layers) == 1
    states = torch.randn(3, whole.hidden_size)
    torch.testing.assert_close(short.head(states), whole.head(states), rtol=0, atol=0)
    for part in ("get_input_embeddings", "get_output_embeddings"):
        assert torch.equal(getattr(short.model, part)().weight, getattr(whole.model, part)().weight)


@pytest.mark.parametrize("name", ["llama", "gemma2", "olmo3", "gptoss", "deepseek3", "gpt2"])
def test_its_final_norm_is_the_whole_targets(name: str, tmp_path: Path) -> None:
    """Of states that leave the last layer of the whole target."""
    tiny.build_model(name).save_pretrained(tmp_path)
    whole = load_target(tmp_path, device="cpu", prepacked=False)
    final_norm = FinalNorm(load_embedding_and_head(tmp_path, dtype="float32", device="cpu"))
    tokens = torch.tensor([tiny.prompts(9)[0]])
    trace = whole.trace(tokens, torch.tensor([9]), (1, whole.num_layers))
    torch.testing.assert_close(final_norm(trace.taps[0, :, 1]), trace.final[0])
    assert not torch.allclose(final_norm(trace.taps[0, :, 0]), trace.final[0])


def test_a_model_that_does_more_than_to_norm(tmp_path: Path) -> None:
    tiny.build_model("llama").save_pretrained(tmp_path)
    short = load_embedding_and_head(tmp_path, dtype="float32", device="cpu")
    short.model.base_model.register_forward_hook(lambda _module, _args, output: (output[0] + torch.rand(()),))
    with pytest.raises(UnsupportedModelError, match="does more to its last layer's states than to norm them"):
        FinalNorm(short)
