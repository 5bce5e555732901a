"""A fingerprint tells models apart, and not the ways to load one."""

from __future__ import annotations

import pytest
import torch

from eyas.target.fingerprint import fingerprint
from eyas.target.packed import can_pack, pack_linears

from .. import tiny


@pytest.mark.parametrize("tied", [False, True])
def test_neither_dtype_nor_packing_changes_it(tied: bool) -> None:
    def made(dtype: torch.dtype) -> torch.nn.Module:
        model: torch.nn.Module = tiny.build_model("qwen2", tie_word_embeddings=tied)  # has biases
        return model.to(torch.bfloat16).to(dtype)

    prints = {fingerprint(made(dtype)) for dtype in (torch.float32, torch.bfloat16)}
    for dtype in (torch.float32, torch.bfloat16):
        if can_pack(torch.device("cpu"), dtype):
            packed = made(dtype)
            assert pack_linears(packed)
            prints.add(fingerprint(packed))
    assert len(prints) == 1
    assert fingerprint(tiny.build_model("qwen2", seed=1)) not in prints
