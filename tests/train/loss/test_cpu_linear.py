"""oneDNN's linears against torch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from eyas.train.loss.cpu_linear import OneDnnLinears, _Linear


def results(layer: nn.Linear, x: Tensor) -> list[Tensor]:
    out = layer(x)
    return [out, *torch.autograd.grad(out.sin().sum(), (x, *layer.parameters()))]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7,), (2, 5), (0, 3), (3, 1, 2)])
def test_values_and_gradients_are_those_of_torch(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(6, 4, bias=bias)
    x = torch.randn(*shape, 6, requires_grad=True)
    expected = results(layer, x)
    with OneDnnLinears():
        found = results(layer, x)
        assert type(found[0].grad_fn).__name__ == type(_Linear.apply(x, layer.weight, None).grad_fn).__name__
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_other_types_are_left_alone() -> None:
    layer = nn.Linear(6, 4)
    x = torch.randn(3, 6)
    with OneDnnLinears():
        assert torch.equal(layer.double()(x.double()), torch.nn.functional.linear(x.double(), layer.weight, layer.bias))
        with torch.autocast("cpu", torch.bfloat16):
            assert layer.float()(x).dtype == torch.bfloat16
