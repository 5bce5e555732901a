"""Layers with a recurrent state, run level by level of a pass with transformers' own single-token step.

They are recognised by what they do: a module that asks transformers' cache for a state is one (`ShapeProbe`). Such a
module gets a class put before its own, which leaves all passes alone but those over a slot cache. There its step runs
once for every level: the nodes of a level are its batch. Linears that read the module's input, or make its output, run
once for all tokens, so that their weights are read once a pass.

Shapes: T tokens of a pass, W tokens of a level, H hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Cache

from eyas.errors import UnsupportedModelError
from eyas.targets.architecture import logits_agree
from eyas.targets.roundings import moved_by_roundings
from eyas.targets.slots import KVShape, StagedCache
from eyas.targets.states import LevelStates, RecurrentStates, StateKey, StateShape
from eyas.targets.transformers_names import cache_of, given
from eyas.targets.trials import first_tokens
from eyas.tree import DraftTree

if TYPE_CHECKING:
    from eyas.targets.target import Target


@dataclass(frozen=True)
class WideLinears:
    """The names of a recurrent module's linears that need no state: those that read its input, and its output's."""

    first: tuple[str, ...] = ()
    last: str | None = None


class StateModule(nn.Module):
    """What is put before the class of a recurrent module."""

    wide: WideLinears
    alone: bool
    """Whether a token's step is other to the bit among others than alone: then each is run alone."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        cache = next((given for given in (*args, *kwargs.values()) if isinstance(given, StagedCache)), None)
        if cache is None:
            return super().forward(*args, **kwargs)
        states = cache.states
        if not isinstance(states, RecurrentStates) or states.path is None:
            raise UnsupportedModelError(f"{type(self).__name__} is run over a cache that has no states for it")
        name, *_ = signature(super().forward).parameters
        hidden: Tensor = args[0] if args else kwargs[name]  # [R, Q, H] or [1, T, H]
        if len(args) > 1:
            raise UnsupportedModelError(f"{type(self).__name__} is given more than its input by position")

        others: list[Any] = []  # what it returns besides, of one step

        def step(tokens: Tensor, seen: LevelStates) -> Tensor:
            given = {key: seen if value is cache else value for key, value in kwargs.items() if key != name}
            out = super(StateModule, self).forward(tokens.unsqueeze(1), **given)
            if isinstance(out, tuple):
                out, *others[:] = out
            made: Tensor = out[:, 0]
            return made

        several = states.path.steps > 1 or (self.alone and len(states.path.rows) > 1)
        steps, out = ModuleSteps(self, hidden.flatten(0, 1), step, several), None
        with steps.prepared():
            for tokens, made in states.walk(steps):
                if out is None:
                    out = made.new_zeros(hidden.shape[:2].numel(), made.shape[-1])
                out[tokens] = made
        assert out is not None
        if several and self.wide.last is not None:
            out = self.get_submodule(self.wide.last)(out)
        out = out.view(*hidden.shape[:2], -1)
        return (out, *others) if others else out


class ModuleSteps:
    """The single-token steps of a recurrent module over the tokens of a pass (`StepsOfPass`)."""

    def __init__(
        self, module: StateModule, hidden: Tensor, step: Callable[[Tensor, LevelStates], Tensor], several: bool
    ) -> None:
        """`step` is the module's forward for inputs [W, H], of those of all tokens, `hidden` [T, H].

        If there are `several` steps, wide linears are stood in for by what they make of all tokens.
        """
        self.module, self._hidden, self._step = module, hidden, step
        self._first = [_Computed(module.get_submodule(name)(hidden)) for name in module.wide.first if several]
        self._stand_ins: dict[str, nn.Module | None] = dict(zip(module.wide.first, self._first, strict=False))
        if several and module.wide.last is not None:
            self._stand_ins[module.wide.last] = nn.Identity()

    @contextmanager
    def prepared(self) -> Iterator[None]:
        own = dict(self.module._modules)
        self.module._modules.update(self._stand_ins)
        try:
            yield
        finally:
            self.module._modules.update(own)

    def __call__(self, tokens: Tensor, states: LevelStates) -> Tensor:
        if self.module.alone and len(tokens) > 1:
            each = zip(tokens.view(-1, 1), states.singly(), strict=True)
            return torch.cat([self._run(token, state) for token, state in each])
        return self._run(tokens, states)

    def _run(self, tokens: Tensor, states: LevelStates) -> Tensor:
        for stand_in in self._first:
            stand_in.tokens = tokens
        return self._step(self._hidden[tokens], states)

    def odd(self, states: RecurrentStates) -> bool:
        """Whether tokens of the pass, as guesses below its first row, get other bits together than alone."""

        def guesses(count: int) -> tuple[Tensor, LevelStates]:
            tokens = torch.arange(count, device=self._hidden.device)
            return tokens, states.staged(torch.zeros_like(tokens))

        with self.prepared():
            tokens, alone = guesses(max(_TOGETHER))
            expected = torch.cat([self._run(*one) for one in zip(tokens.view(-1, 1), alone.singly(), strict=True)])
            for count in _TOGETHER:
                tokens, together = guesses(count)
                pairs = [(self._run(tokens, together), expected)]
                pairs += [(state, alone.reached[key]) for key, state in together.reached.items()]
                if any(not torch.equal(found, wanted[:count]) for found, wanted in pairs):
                    return True
        return False


class _Computed(nn.Module):
    """Stands in for a linear whose outputs [T, P] are known."""

    tokens: Tensor  # [W] which of them are asked for

    def __init__(self, outputs: Tensor) -> None:
        super().__init__()
        self._outputs = outputs

    def forward(self, given: Tensor) -> Tensor:
        return self._outputs[self.tokens].view(*given.shape[:2], -1)


@lru_cache
def _before(own: Any) -> type[StateModule]:
    return type(own.__name__, (StateModule, own), {"__module__": own.__module__})


def run_by_levels(modules: Mapping[nn.Module, WideLinears]) -> None:
    """Let recurrent modules go through a pass over a slot cache level by level."""
    for module, wide in modules.items():
        if not isinstance(module, StateModule):
            kind: Any = type(module)
            module.__class__ = _before(kind)
        assert isinstance(module, StateModule)
        module.wide, module.alone = wide, False


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
        self._note_module()

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:  # noqa: ARG002
        self._note_module()

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None,
        **_options: Any,
    ) -> Tensor:  # fmt: skip
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


_PROMPTS = ((3, 1, 4, 1, 5, 9, 2), (6, 5, 3))
"""Two prompts of the check, as distances from its first token."""
_PARENTS = (-1, -1, 0, 0, 2, 1)
_NOISE = 4.0
"""How many times as far as whole passes that roundings move other logits may be from those of the model's steps."""
_KEPT = ((0, 1, 3, 5), (0, 2))
"""The columns of the check's tree that are committed in each row."""
_TOGETHER = (2, 3, 6, 9)
"""How many tokens are run together, and each alone, to see whether that is the same to the bit."""


@torch.inference_mode()
def find_odd_steps(target: Target) -> None:
    """Let recurrent modules run each token alone whose step gives other bits for it among others.

    PyTorch computes 128 bytes of an elementwise function at once, and what is left over by another formula; matrix
    products may add up in an order that depends on their number. A guess must be what it is in plain decoding.
    """
    cache, device = target.allocate(1), target.device
    count = max(_TOGETHER)
    tokens = (torch.arange(count, device=device).unsqueeze(0) * 7 + target.vocab_size // 2) % target.vocab_size
    target.prefill_chunk(cache, range(1), tokens.tolist(), ())
    valid = torch.ones_like(tokens, dtype=torch.bool)
    tree = DraftTree(tokens, torch.full_like(tokens, -1), valid.float(), valid, 1, counted=count)
    target.verify(cache, range(1), tokens[:, 0], tree, ())
    assert isinstance(cache.states, RecurrentStates)
    odd = set[type[nn.Module]]()
    for steps in cache.states.pending:
        assert isinstance(steps, ModuleSteps)
        if type(steps.module) not in odd and steps.odd(cache.states):
            odd.add(type(steps.module))
    for module in target.layers.modules():
        if isinstance(module, StateModule):
            module.alone = type(module) in odd


@torch.inference_mode()
def check_states(target: Target) -> None:
    """Raise UnsupportedModelError where prompts in pieces and a branching tree give other logits than the model itself.

    The model's own passes are single tokens over transformers' cache, which is copied where paths branch. After the
    tree a path of each row is committed, and a token after it is run.
    """
    trials = first_tokens(target)
    wrong = sum(not _states_agree(target, first) for first in trials)
    if 2 * wrong > len(trials):
        raise UnsupportedModelError(
            f"{target.config.model_type} has recurrent layers that give other logits level by level than token by "
            "token, so trees of guesses can't be verified; use another model"
        )


def _states_agree(target: Target, first: int) -> bool:
    """Whether a trial's logits are the model's own token by token, as nearly as those are moved whole passes'.

    In these the inputs of every product are moved by roundings.
    """
    found, paths = _states_trial(target, first)
    expected = _by_steps(target, paths)
    if logits_agree(found, expected, target.dtype):
        return True
    with moved_by_roundings(target.layers, target.dtype):
        whole = [target.model(input_ids=_row(target, path), use_cache=False).logits[0, -1] for path in paths]
    return float((found - expected).abs().max()) <= _NOISE * float((torch.stack(whole) - expected).abs().max())


def _states_trial(target: Target, first: int) -> tuple[Tensor, list[tuple[int, ...]]]:
    """Logits of all nodes of a tree and of a token after a committed path, and the text up to each."""

    def ids(offsets: Sequence[int]) -> tuple[int, ...]:
        return tuple((first + offset) % target.vocab_size for offset in offsets)

    rows, cache, device = range(2), target.allocate(2), target.device
    prompts, last = [ids(offsets) for offsets in _PROMPTS], ids((8, 2))
    for _ in target.prefill(cache, rows, prompts, (), 2):
        pass
    guesses = [ids(range(7 * row, 7 * row + len(_PARENTS))) for row in rows]
    tokens, parents = torch.tensor([guesses, [_PARENTS] * 2], device=device)
    valid = torch.ones_like(tokens, dtype=torch.bool)
    valid[1, -1] = False
    tree = DraftTree(tokens, parents, valid.float(), valid, 3, counted=int(valid.sum()))
    roots = torch.tensor([prompt[-1] for prompt in prompts], device=device)
    of_nodes = target.verify(cache, rows, roots, tree, ()).logits
    cache.commit(rows, _KEPT)
    after = target.verify(cache, rows, torch.tensor(last, device=device), DraftTree.empty(2, device), ()).logits.rows

    found, paths = list[Tensor](), list[tuple[int, ...]]()
    for row, prompt in enumerate(prompts):
        texts = [prompt]
        for parent, token in zip(_PARENTS, guesses[row], strict=True):
            texts.append((*texts[parent + 1], token))
        nodes = [node for node in range(len(texts)) if not node or valid[row, node - 1]]
        found += [*(of_nodes.rows[of_nodes.index[row, node]] for node in nodes), after[row]]
        paths += [*(texts[node] for node in nodes), (*texts[_KEPT[row][-1]], last[row])]
    return torch.stack(found), paths


def _by_steps(target: Target, paths: Sequence[tuple[int, ...]]) -> Tensor:
    """Logits [n, V] after each path, of the model's own passes over single tokens; its cache is copied at branches."""
    outputs: dict[tuple[int, ...], Any] = {}
    positioned = "position_ids" in signature(type(target.model).forward).parameters

    def after(path: tuple[int, ...]) -> Any:
        if path not in outputs:
            before = after(path[:-1]) if len(path) > 1 else None
            kept = {} if before is None else given(target.model, copy.deepcopy(cache_of(before)))
            where = {"position_ids": _row(target, [len(path) - 1])} if positioned else {}
            outputs[path] = target.model(input_ids=_row(target, path[-1:]), use_cache=True, **kept, **where)
            if path[:-1] not in paths:  # states are large
                outputs.pop(path[:-1], None)
        return outputs[path]

    return torch.stack([after(path).logits[0, -1] for path in paths])


def _row(target: Target, numbers: Sequence[int]) -> Tensor:
    return torch.tensor([list(numbers)], device=target.device)
