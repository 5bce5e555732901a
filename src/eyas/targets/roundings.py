"""How far rounding may move one correct evaluation of some modules from another: the tolerance of all trials at load.

A product of n terms may be summed in any order. Summed one by one, the partial sums drift, and the result ends about
sqrt(n / 6) roundings off; no order in use is worse. So the modules are run again with the inputs of each product moved
up or down at random, by sqrt(n) roundings of float32 (the dtype of accumulators), which is more than twice the error of
the worst order. If one rounding of the modules' dtype (the dtype of inputs) is more, inputs are moved by that. The run
shows how much large weights or a sharp softmax amplify roundings.

Trials move inputs twice as far, so that a choice of experts that rounding may change does change in some draws. They
allow twice the distance that this moves a token. Where a single attention weight decides, one draw may move a token
much less than another, so up to sixteen are drawn, and the farthest counts. Rounding alone exceeds that for about one
token in a million. Operations after the last product (a norm, a factor, an addition) round the token's greatest value
at most four times.

Shapes: T tokens, n values of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from eyas.targets.linears import PrepackedLinear
from eyas.targets.native.experts import NativeExperts

_DRAWS = 16
_TIMES = 2.0
_STEPS = 4


class RoundingTrial:
    """The output of some modules, and how far rounding may move another way of computing it."""

    def __init__(self, products: nn.Module, dtype: torch.dtype, run: Callable[[], Tensor]) -> None:
        """Take `run`, which computes [T, n] with the products below `products`; `dtype` is the other way's dtype.

        `run` may compute in a wider dtype.
        """
        self.expected = run()
        self._products = products
        self._dtype = dtype
        self._run = run
        self._drawn = 0
        self._noise = self.expected.new_zeros(len(self.expected))  # [T]

    def relative_error(self, found: Tensor) -> Tensor:
        """Distance of `found` [T, n] from the expected output, as a multiple of what rounding allows: [T]."""
        gaps = (found - self.expected).abs().amax(1).nan_to_num(float("inf"))
        while (gaps > self._allowed()).any() and self._drawn < _DRAWS:
            with perturbed_by_rounding(self._products, self._dtype, self._drawn, _TIMES):
                self._noise = self._noise.maximum((self._run() - self.expected).abs().amax(1))
            self._drawn += 1
        return (gaps / self._allowed().clamp(min=torch.finfo(torch.float32).tiny)).float()

    def _allowed(self) -> Tensor:  # [T]
        steps = _STEPS * torch.finfo(self._dtype).eps * self.expected.abs().amax(1)
        return steps + _TIMES * self._noise


@contextmanager
def perturbed_by_rounding(modules: nn.Module, dtype: torch.dtype, draw: int = 0, times: float = 1.0) -> Iterator[None]:
    """Move, within the block, the inputs of each product below `modules` by `times` the distance that rounding may."""
    drawn = torch.Generator().manual_seed(draw)

    def move(_product: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        states = args[0] if args else kwargs["hidden_states"]
        terms = max(states.shape[-1], states[..., 0].numel())  # attention sums over tokens
        share = times * max(terms**0.5 * torch.finfo(torch.float32).eps, torch.finfo(dtype).eps)
        sign = torch.randint(0, 2, states.shape, generator=drawn).to(states.device) * 2 - 1
        moved = (states * (1 + share * sign)).to(states.dtype)
        return ((moved, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": moved})

    hooks = [part.register_forward_pre_hook(move, with_kwargs=True) for part in modules.modules() if _multiplies(part)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _multiplies(part: nn.Module) -> bool:
    """Whether a module multiplies its input by weights of its own."""
    if isinstance(part, PrepackedLinear | NativeExperts):
        return True
    own = (weight for weight in part.parameters(recurse=False) if weight.is_floating_point())
    return not isinstance(part, nn.Embedding) and any(weight.dim() > 1 for weight in own)
