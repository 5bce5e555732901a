"""Which tokens of a trial agree: but for rounding, and for what rounding does to the routing of tokens."""

from __future__ import annotations

import pytest
import torch

from eyas.targets import Target
from eyas.targets.linears import prepack_linears
from eyas.targets.native.architectures import transformers_decoder
from eyas.targets.native.experts import replace_experts
from eyas.targets.native.library import kernels
from eyas.targets.native.linears import NativeLinear
from eyas.targets.trials import PassTrial, token_agrees

from .. import tiny


def trial(logits: float, first: float, routed: bool = True) -> PassTrial:
    """Logits and first states that differ by so much, as shares of their length, from those of `trial(0, 0)`."""
    draw = torch.Generator().manual_seed(0)
    made = []
    for shape, share in (((4, 97), logits), ((4, 2, 32), first)):
        right, wrong = torch.randn(shape, generator=draw), torch.randn(shape, generator=draw)
        made.append(right + share * wrong * (right.flatten(1).norm(dim=1) / wrong.flatten(1).norm(dim=1)).max())
    return PassTrial(made[0], made[1] if routed else made[1][:, :0])


@pytest.mark.parametrize(
    ("logits", "first", "routed", "dtype", "agrees"),
    [
        (0.0, 0.0, False, torch.float32, True),
        (0.01, 9.0, True, torch.bfloat16, True),  # the logits alone say it
        (0.4, 0.01, True, torch.bfloat16, True),  # gone astray later
        (0.4, 0.01, True, torch.float32, False),
        (0.4, 0.01, False, torch.bfloat16, False),
        (0.4, 0.2, True, torch.bfloat16, False),  # wrong from the beginning
        (1.4, 0.01, True, torch.bfloat16, False),  # unrelated in the end
    ],
)
def test_what_agrees(logits: float, first: float, routed: bool, dtype: torch.dtype, agrees: bool) -> None:
    expected, found = trial(0.0, 0.0, routed), trial(logits, first, routed)
    assert {token_agrees(found, expected, token, dtype) for token in range(4)} == {agrees}


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
