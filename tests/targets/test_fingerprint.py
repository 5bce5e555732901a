"""A fingerprint tells models apart, and not the ways to load one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eyas.targets import load_target
from eyas.targets.fingerprint import embedding_head_fingerprint, fingerprint
from eyas.targets.linears import can_prepack, prepack_linears
from eyas.targets.loading import load_embedding_and_head

from .. import tiny


@pytest.mark.parametrize("tied", [False, True])
def test_neither_dtype_nor_prepacking_changes_it(tied: bool) -> None:
    def made(dtype: torch.dtype) -> torch.nn.Module:
        model: torch.nn.Module = tiny.build_model("qwen2", tie_word_embeddings=tied)  # has biases
        return model.to(torch.bfloat16).to(dtype)

    prints = {fingerprint(made(dtype)) for dtype in (torch.float32, torch.bfloat16)}
    for dtype in (torch.float32, torch.bfloat16):
        if can_prepack(torch.device("cpu"), dtype):
            linears = made(dtype)
            assert prepack_linears(linears)
            prints.add(fingerprint(linears))
    assert len(prints) == 1
    assert fingerprint(tiny.build_model("qwen2", seed=1)) not in prints


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["llama", "gemma3", "deepseek3", "gpt2", "mixtral"])
def test_embedding_and_head_have_the_fingerprint_of_the_whole_target(name: str, tmp_path: Path) -> None:
    tiny.build_model(name).save_pretrained(tmp_path)
    loaded = [load_target(tmp_path, device="cpu", prepacked=prepacked) for prepacked in (False, True)]
    short = load_embedding_and_head(tmp_path, dtype="bfloat16", device="cpu")
    assert len({embedding_head_fingerprint(target.model, target.layers) for target in (*loaded, short)}) == 1
    whole = loaded[0]
    before = embedding_head_fingerprint(whole.model, whole.layers)
    with torch.no_grad():
        next(whole.layers[2].parameters()).add_(1)
        assert embedding_head_fingerprint(whole.model, whole.layers) == before
        next(whole.layers[0].parameters()).add_(1)
    assert embedding_head_fingerprint(whole.model, whole.layers) != before
