from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from eyas.errors import UnsupportedModelError
from eyas.targets.transformers_names import cache_argument, given


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
    assert module(1, **given(module, kept)) == (1, kept)


def test_a_forward_without_a_cache_is_told() -> None:
    assert cache_argument(Without().forward) is None
    with pytest.raises(UnsupportedModelError, match="Without takes no key-value cache"):
        given(Without(), object())
