"""The probe at load: what the layers of a model keep of a sequence, found by running one token.

Shapes: H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import Cache

from eyas.errors import UnsupportedModelError
from eyas.targets.recurrent import WideLinears
from eyas.targets.slots import KVShape
from eyas.targets.states import StateKey, StateShape


class ShapeProbe(Cache):  # type: ignore[misc]  # transformers ships no types
    """A transformers cache that records the shapes of what each layer keeps, and which modules ask for a state."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.shapes: dict[int, tuple[KVShape, KVShape]] = {}
        self.states: dict[StateKey, StateShape] = {}
        self.modules: dict[nn.Module, WideLinears] = {}
        """The modules that asked for a state, with linears that need none."""
        self._running: list[nn.Module] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.shapes[layer_idx] = (_shape(key_states), _shape(value_states))
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        return 0

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:  # noqa: ARG002
        self._asked()

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:  # noqa: ARG002
        self._asked()

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None,
        **_options: Any,
    ) -> Tensor:  # fmt: skip
        self._asked()
        size = (*conv_states.shape[1:-1], conv_kernel_size or conv_states.shape[-1])
        self.states[StateKey(layer_idx, "conv", state_idx)] = StateShape(size, conv_states.dtype)
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        self._asked()
        shape = StateShape(tuple(recurrent_states.shape[1:]), recurrent_states.dtype)
        self.states[StateKey(layer_idx, "recurrent", state_idx)] = shape
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:  # noqa: ARG002
        return False

    def is_recording_past(self, layer_idx: int) -> bool:  # noqa: ARG002
        return False

    def _asked(self) -> None:
        if not self._running:
            raise UnsupportedModelError("a state is kept by the model itself, and not by one of its modules")
        self.modules.setdefault(self._running[-1], WideLinears())

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Within, it is known which module runs, and what its linears read and make."""
        read: dict[nn.Module, list[tuple[str, nn.Module, Any, Any]]] = {}

        def enters(module: nn.Module, _args: Any, _kwargs: Any) -> None:
            self._running.append(module)

        def leaves(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._running.pop()
            given = args[0] if args else next(iter(kwargs.values()), None)
            if self._running:
                above = self._running[-1]
                name = next((name for name, child in above._modules.items() if child is module), None)
                if name is not None and hasattr(module, "in_features"):
                    read.setdefault(above, []).append((name, module, given, output))
            if module in self.modules:
                inside = read.get(module, [])
                first = tuple(name for name, _, seen, _ in inside if seen is given)
                last = next((name for name, _, _, made in inside if made is output), None)
                self.modules[module] = WideLinears(first, last)

        handles = [
            handle
            for module in model.modules()
            for handle in (
                module.register_forward_pre_hook(enters, with_kwargs=True),
                module.register_forward_hook(leaves, with_kwargs=True),
            )
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def of_layers(self, config: Any) -> list[tuple[KVShape, KVShape] | None]:
        """The shapes of all layers but the last ones that share the keys of others; None of those without attention.

        Raises UnsupportedModelError for layers that keep nothing in a model without recurrent states.
        """
        cached = range(config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0))
        if not self.states and sorted(self.shapes) != list(cached):
            raise UnsupportedModelError(
                f"{config.model_type}: only {len(self.shapes)} of {len(cached)} layers use the key-value cache; a "
                "state kept elsewhere can't be rolled back after a rejected guess"
            )
        return [self.shapes.get(i) for i in cached]


def _shape(states: Tensor) -> KVShape:
    return KVShape(states.shape[1], states.shape[3])
