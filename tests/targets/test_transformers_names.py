from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from eyas.errors import UnsupportedModelError
from eyas.targets.states import LevelStates, StateKey
from eyas.targets.transformers_names import cache_argument, cache_kwargs, rotation


class Before(nn.Module):
    def forward(self, x: Any, past_key_values: Any = None) -> Any:
        return x, past_key_values


class After(nn.Module):
    def forward(self, x: Any, cache: Any = None) -> Any:
        return x, cache


class Without(nn.Module):
    def forward(self, x: Any) -> Any:
        return x


@pytest.mark.parametrize(("module", "name"), [(Before(), "past_key_values"), (After(), "cache")])
def test_a_cache_is_given_by_the_name_that_the_forward_has_for_it(module: nn.Module, name: str) -> None:
    kept = object()
    assert cache_argument(module.forward) == name
    assert module(1, **cache_kwargs(module, kept)) == (1, kept)


def test_a_forward_without_a_cache_is_told() -> None:
    assert cache_argument(Without().forward) is None
    with pytest.raises(UnsupportedModelError, match="Without takes no key-value cache"):
        cache_kwargs(Without(), object())


def test_states_are_found_in_the_layers_of_a_cache_too() -> None:
    above = {StateKey(3, "conv", 1): torch.randn(2, 4), StateKey(3, "recurrent", 0): torch.randn(2, 5)}
    states = LevelStates(above, torch.tensor([1]))
    states.layers[3].conv_states[1].add_(1)  # as a fused step changes it
    assert states.get_conv_state(3, 1).equal(above[StateKey(3, "conv", 1)][1:] + 1)
    assert states.layers[3].recurrent_states[0] is states.get_recurrent_state(3)
    assert not states.layers[3].record_past


class Rotary(nn.Module):
    def __init__(self, sections: list[int] | None) -> None:
        super().__init__()
        self.mrope_section = sections

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + positions


@pytest.mark.parametrize(("sections", "shape"), [(None, (2, 5)), ([2, 1, 1], (3, 2, 5))])
def test_text_has_the_same_position_on_each_axis(sections: list[int] | None, shape: tuple[int, ...]) -> None:
    positions = torch.arange(10).view(2, 5)
    assert rotation(Rotary(sections), torch.zeros(1, dtype=torch.int64), positions).equal(positions.expand(shape))
