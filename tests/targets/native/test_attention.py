"""Attention of the kernels: what is far less likely than the best key counts as nothing, and takes no longer."""

from __future__ import annotations

import pytest
import torch

from eyas.targets.native.library import kernels
from eyas.targets.native.linears import native_attention

pytestmark = pytest.mark.skipif(kernels() is None, reason="there are no native kernels here")


def mixed(scores: list[float], values: list[float], dtype: torch.dtype = torch.float32) -> float:
    """The output of one query whose keys have these scores, of one feature of the values."""
    size = 16
    query, key, value = (torch.zeros(1, 1, n, size, dtype=dtype) for n in (1, len(scores), len(scores)))
    query[..., 0], key[0, 0, :, 0], value[0, 0, :, 3] = 1.0, torch.tensor(scores), torch.tensor(values)
    out = native_attention(query, key, value, torch.ones(1, 1, 1, len(scores), dtype=torch.bool), 1.0)
    assert out is not None
    return float(out[0, 0, 0, 3])


@pytest.mark.parametrize("first", [True, False])
def test_weights_that_would_be_subnormal_are_zero(first: bool) -> None:
    """Products with subnormal numbers made prompts of 4,096 tokens take six times as long."""
    for apart in (61.0, 87.0, 88.0, 100.0, 1e4):
        scores, values = [0.0, -apart], [0.0, 1.0]
        assert mixed(scores if first else scores[::-1], values if first else values[::-1]) == 0.0


@pytest.mark.parametrize("apart", [0.0, 1.0, 20.0, 59.0])
def test_weights_of_likelier_keys_are_not(apart: float) -> None:
    expected = torch.tensor([0.0, -apart], dtype=torch.float64).softmax(0)[1]
    assert mixed([0.0, -apart], [0.0, 1.0]) == pytest.approx(float(expected), rel=1e-6)
