"""What the rule of trials takes for rounding, and what it doesn't."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from eyas.targets.roundings import RoundingTrial, perturbed_by_rounding

TOKENS, INPUTS = 40, 256


class Choosing(nn.Module):
    """Two experts, of which a router chooses one for each token."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(INPUTS, 2)
        self.experts = nn.ModuleList(nn.Linear(INPUTS, INPUTS) for _ in range(2))

    def forward(self, x: Tensor, turned: bool = False) -> Tensor:
        first = (self.router(x).diff() < 0) ^ turned
        return torch.where(first, self.experts[0](x), self.experts[1](x))


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    torch.manual_seed(1)
    with torch.no_grad():
        yield


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_in_the_worst_order_is_rounding_and_a_factor_is_not(dtype: torch.dtype) -> None:
    product = nn.Linear(INPUTS, 32).to(dtype)
    x = torch.randn(TOKENS, INPUTS).to(dtype)
    chain = torch.zeros(TOKENS, 32)
    for i in range(INPUTS):
        chain += x[:, i : i + 1].float() * product.weight[:, i].float()
    chain = (chain + product.bias.float()).to(dtype).float()
    trial = RoundingTrial(product, dtype, lambda: product(x).float())
    assert trial.relative_error(chain).max() <= 1
    assert trial.relative_error(chain * (1 + 1000 * torch.finfo(dtype).eps)).max() > 1
    assert trial.relative_error(chain.masked_fill(chain > 0, float("nan"))).max() == float("inf")


def test_what_large_weights_make_of_a_rounding_is_allowed() -> None:
    first = nn.Linear(INPUTS, INPUTS)
    x = torch.randn(TOKENS, INPUTS)
    second = nn.Linear(INPUTS, INPUTS)
    second.weight *= 1000.0
    both = nn.Sequential(first, nn.Softmax(dim=1), second)
    exact = both.double()(x.double()).float()
    both.float()
    assert RoundingTrial(both, torch.float32, partial(both, x)).relative_error(exact).max() <= 1


def test_experts_may_be_others_at_a_near_tie_only() -> None:
    model = Choosing()
    x = torch.randn(TOKENS, INPUTS)
    axis = model.router.weight[1] - model.router.weight[0]
    shift = model.router(x).diff() / axis.square().sum()
    near = x - shift * axis * (1 - 1e-6)  # the router's scores all but agree
    assert RoundingTrial(model, torch.float32, partial(model, near)).relative_error(model(near, turned=True)).max() <= 1
    apart = RoundingTrial(model, torch.float32, partial(model, x)).relative_error(model(x, turned=True))
    assert apart.min() > 1


def test_nothing_is_moved_afterwards() -> None:
    model = Choosing()
    x = torch.randn(TOKENS, INPUTS)
    before = model(x)
    with perturbed_by_rounding(model, torch.float32):
        assert not model(x).equal(before)
    assert model(x).equal(before)
