"""What a model computes without rounding: its own modules in float64, those steps too that they do in float32.

Shapes: T tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from eyas.targets.architecture import decoder_layers
from eyas.targets.native.layer_trials import LayerCall

_NARROW = (torch.float32, torch.bfloat16)


class Widely(TorchFunctionMode):
    """Within it float64 is what functions of torch are given where they are asked for a narrower dtype."""

    def __torch_function__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if isinstance(value, torch.dtype) and value in _NARROW else value

        if function in (Tensor.float, Tensor.bfloat16):
            function = Tensor.double
        return function(*map(wide, args), **{name: wide(value) for name, value in (kwargs or {}).items()})


class ExactModel:
    """A copy of a model in float64. Its layers get the RoPE tables that the model itself makes, in its precision."""

    def __init__(self, model: Any, layers: int) -> None:
        self.model = copy.deepcopy(model).double()
        self.model.set_experts_implementation("eager")  # the other is for narrower dtypes
        self.layers = decoder_layers(self.model, layers)

    def layer(self, index: int, call: LayerCall, states: Tensor) -> Tensor:
        """What a layer makes of states [T, H], called as the model calls it."""
        with Widely():
            return call.run(self.layers[index], states.double())

    def logits(self, tokens: Tensor, calls: Sequence[LayerCall]) -> Tensor:
        """The logits [T, V] of tokens [1, T] for which the model calls its layers so."""

        def as_called(layer: nn.Module, args: Any, kwargs: Any) -> Any:
            return calls[order[layer]].given(LayerCall(args, kwargs).states)

        order = {layer: index for index, layer in enumerate(self.layers)}
        hooks = [layer.register_forward_pre_hook(as_called, with_kwargs=True) for layer in self.layers]
        try:
            with Widely():
                logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits[0]
                return logits
        finally:
            for hook in hooks:
                hook.remove()
