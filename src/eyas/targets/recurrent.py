"""Layers with a recurrent state, run one level of a pass at a time with transformers' own single-token step.

They are recognized by what they do: any module that asks transformers' cache for a state (`ShapeProbe`). Such a module
gets a `forward` around its own, which changes only passes over a slot cache. There its step runs once per level, with
the level's nodes as the batch. Linears that read the module's input or compute its output run once for all tokens, so
that their weights are read once per pass.

Shapes: T tokens of a pass, W tokens of a level, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache

from eyas.errors import UnsupportedModelError
from eyas.targets.slots import KVShape, StagedCache
from eyas.targets.states import LevelStates, RecurrentStates, StateKey, StateShape

TRIED_BATCHES = (2, 3, 6, 9)
"""Numbers of tokens that are run both together and one by one, to see whether the results are bit-identical."""


@dataclass(frozen=True)
class WideLinears:
    """Names of a recurrent module's linears that need no state: readers of its input, and its output projection."""

    first: tuple[str, ...] = ()
    last: str | None = None


class ByLevels:
    """The `forward` of a recurrent module: by levels over a slot cache, the module's own over anything else."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.wide = WideLinears()
        self.alone = False
        """Whether a token's step gives other bits in a batch than alone; each token is then run alone."""
        self._own: Callable[..., Any] = module.forward

    @staticmethod
    def of(module: nn.Module) -> ByLevels | None:
        """The `forward` of a module if it runs by levels."""
        found = vars(module).get("forward")
        return found if isinstance(found, ByLevels) else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache = next((given for given in (*args, *kwargs.values()) if isinstance(given, StagedCache)), None)
        if cache is None:
            return self._own(*args, **kwargs)
        states = cache.states
        if not isinstance(states, RecurrentStates) or states.path is None:
            raise UnsupportedModelError(f"{type(self.module).__name__} was run over a cache that has no states for it")
        name, *_ = signature(self._own).parameters
        hidden: Tensor = args[0] if args else kwargs[name]  # [R, Q, H] or [1, T, H]
        if len(args) > 1:
            raise UnsupportedModelError(f"{type(self.module).__name__} is given more than its input by position")

        others: list[Any] = []  # the other values that one step returns

        def step(tokens: Tensor, seen: LevelStates) -> Tensor:
            given = {key: seen if value is cache else value for key, value in kwargs.items() if key != name}
            out = self._own(tokens.unsqueeze(1), **given)
            if isinstance(out, tuple):
                out, *others[:] = out
            made: Tensor = out[:, 0]
            return made

        several = states.path.steps > 1 or (self.alone and len(states.path.rows) > 1)
        steps = ModuleSteps(self, hidden.flatten(0, 1), step, several)
        out = None
        with steps.prepared():
            for tokens, made in states.walk(steps):
                if out is None:
                    out = made.new_zeros(hidden.shape[:2].numel(), made.shape[-1])
                out[tokens] = made
        assert out is not None
        if several and self.wide.last is not None:
            out = self.module.get_submodule(self.wide.last)(out)
        out = out.view(*hidden.shape[:2], -1)
        return (out, *others) if others else out


class ModuleSteps:
    """The single-token steps of a recurrent module over the tokens of a pass (`StepsOfPass`)."""

    def __init__(
        self, forward: ByLevels, hidden: Tensor, step: Callable[[Tensor, LevelStates], Tensor], several: bool
    ) -> None:
        """Take the inputs of all tokens, `hidden` [T, H], and the module's own forward for W of them, `step`.

        With `several` steps, the outputs of wide linears are computed once for all tokens.
        """
        module, wide = forward.module, forward.wide
        self.module = module
        self._forward = forward
        self._hidden = hidden
        self._step = step
        self._first = [_PrecomputedLinear(module.get_submodule(name)(hidden)) for name in wide.first if several]
        self._stand_ins: dict[str, nn.Module | None] = dict(zip(wide.first, self._first, strict=False))
        if several and wide.last is not None:
            self._stand_ins[wide.last] = nn.Identity()

    @contextmanager
    def prepared(self) -> Iterator[None]:
        own = dict(self.module._modules)
        self.module._modules.update(self._stand_ins)
        try:
            yield
        finally:
            self.module._modules.update(own)

    def __call__(self, tokens: Tensor, states: LevelStates) -> Tensor:
        if self._forward.alone and len(tokens) > 1:
            each = zip(tokens.view(-1, 1), states.each_alone(), strict=True)
            return torch.cat([self._run(token, state) for token, state in each])
        return self._run(tokens, states)

    def _run(self, tokens: Tensor, states: LevelStates) -> Tensor:
        for stand_in in self._first:
            stand_in.tokens = tokens
        return self._step(self._hidden[tokens], states)

    def odd(self, states: RecurrentStates) -> bool:
        """Whether the pass's tokens, run as guesses that follow its first row, get other bits together than alone."""

        def guesses(count: int) -> tuple[Tensor, LevelStates]:
            tokens = torch.arange(count, device=self._hidden.device)
            return tokens, states.staged(torch.zeros_like(tokens))

        with self.prepared():
            tokens, alone = guesses(max(TRIED_BATCHES))
            expected = torch.cat([self._run(*one) for one in zip(tokens.view(-1, 1), alone.each_alone(), strict=True)])
            for count in TRIED_BATCHES:
                tokens, together = guesses(count)
                pairs = [(self._run(tokens, together), expected)]
                pairs += [(state, alone.reached[key]) for key, state in together.reached.items()]
                if any(not torch.equal(found, wanted[:count]) for found, wanted in pairs):
                    return True
        return False


class _PrecomputedLinear(nn.Module):
    """Stands in for a linear with precomputed outputs [T, P]."""

    tokens: Tensor  # [W] indexes of the tokens to return

    def __init__(self, outputs: Tensor) -> None:
        super().__init__()
        self._outputs = outputs

    def forward(self, given: Tensor) -> Tensor:
        return self._outputs[self.tokens].view(*given.shape[:2], -1)


def run_by_levels(modules: Mapping[nn.Module, WideLinears]) -> None:
    """Make recurrent modules run passes over a slot cache level by level."""
    for module, wide in modules.items():
        by_levels = ByLevels.of(module) or ByLevels(module)
        by_levels.wide = wide
        by_levels.alone = False
        vars(module)["forward"] = by_levels


class ShapeProbe(Cache):  # type: ignore[misc]  # transformers ships no types
    """A transformers cache that records the shapes that each layer stores, and which modules ask for a state."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.shapes: dict[int, tuple[KVShape, KVShape]] = {}
        self.states: dict[StateKey, StateShape] = {}
        self.modules: dict[nn.Module, WideLinears] = {}
        """The modules that asked for a state, and their linears that don't need it."""
        self._running: list[nn.Module] = []

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.shapes[layer_idx] = (_shape(key_states), _shape(value_states))
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        return 0

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:  # noqa: ARG002
        self._note_module()

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:  # noqa: ARG002
        self._note_module()

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_options: Any,
    ) -> Tensor:
        self._note_module()
        size = (*conv_states.shape[1:-1], conv_kernel_size or conv_states.shape[-1])
        self.states[StateKey(layer_idx, "conv", state_idx)] = StateShape(size, conv_states.dtype)
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        self._note_module()
        shape = StateShape(tuple(recurrent_states.shape[1:]), recurrent_states.dtype)
        self.states[StateKey(layer_idx, "recurrent", state_idx)] = shape
        return recurrent_states

    def get_linear_cache(self, layer_idx: int) -> None:  # of MiniMax's cache
        self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self.update_recurrent_state(linear_cache, layer_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:  # noqa: ARG002
        return False

    def is_recording_past(self, layer_idx: int) -> bool:  # noqa: ARG002
        return False

    def _note_module(self) -> None:
        if not self._running:
            raise UnsupportedModelError("the model itself keeps a state, not one of its modules: use another model")
        self.modules.setdefault(self._running[-1], WideLinears())

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Track, in this context, which module is running and what its linears read and output."""
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
                own = output[0] if isinstance(output, tuple) else output
                last = next((name for name, _, _, made in inside if made is own), None)
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
        """The shapes of all layers but the last ones, which share other layers' keys; None for those without attention.

        Raises UnsupportedModelError if a layer stores nothing in the cache and the model has no recurrent states.
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
