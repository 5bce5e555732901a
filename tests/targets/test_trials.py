"""What trials of whole passes refuse, of tokens that are routed to experts too."""

from __future__ import annotations

import pytest
import torch

from eyas.targets import Target
from eyas.targets.linears import prepack_linears
from eyas.targets.native.architectures import transformers_decoder
from eyas.targets.native.experts import replace_experts
from eyas.targets.native.library import kernels
from eyas.targets.native.linears import NativeLinear

from .. import tiny


@pytest.mark.skipif(kernels() is None, reason="no compiler, or neither AVX2 nor AVX-512")
@pytest.mark.parametrize("wrong", [None, "embedding", "attention", "norm"])
def test_native_passes_of_routed_tokens_are_refused_for_what_is_wrong(wrong: str | None) -> None:
    model = tiny.build_model("gptoss", head_dim=16).to(torch.bfloat16)
    prepack_linears(model, NativeLinear)
    replace_experts(model, NativeLinear, torch.bfloat16)
    native = transformers_decoder(model)
    assert native is not None
    if wrong == "embedding":
        native._struct.embedding_scale = -1.0
    elif wrong == "attention":
        native._struct.scale = 0.0
    elif wrong == "norm":  # after all layers
        native._struct.norm = native._vector(-torch.ones(tiny.HIDDEN))
    assert (Target(model, native=native).native is None) == (wrong is not None)
