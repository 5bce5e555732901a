"""Trials of whether each layer of a native decoder, run alone, computes what the model's own module does.

A few tokens through the whole model can't show that. In bfloat16, rounding can hide that a layer lacks RoPE, and so can
the residual if weights are small. A factor that applies only from the thousandth position on doesn't show before. So a
layer and its module get the same states, of very different magnitudes, in float32 arithmetic (both multiply by the
original weights, without a copy of them). Positions are the first ones, numbers that the config names, and the end of
the context. How far the two may differ is the rule of `targets/roundings.py`.

Then the decoder runs as usual, in its own dtype, and each module runs on the states that the decoder gave that layer.

One layer of each kind is tried. Layers are of the same kind if their modules, arguments and native structs differ only
in weights and the layer number; anything that isn't understood counts as a difference.

Shapes: T tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from ctypes import Array, Structure, _Pointer, c_void_p
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from eyas.targets.architecture import attention_plan
from eyas.targets.linears import PrepackedLinear
from eyas.targets.native.decoder import NativeDecoder, Staged
from eyas.targets.native.experts import NativeExperts, NativeRouter
from eyas.targets.native.library import Decoder, Layer, Linear, Microkernel
from eyas.targets.native.packed import WeightFormat
from eyas.targets.native.packed_linears import PackedLinear
from eyas.targets.native.states import NativeStates
from eyas.targets.passes import Passes
from eyas.targets.recurrent import ByLevels
from eyas.targets.roundings import RoundingTrial
from eyas.targets.slots import KVShape, SlotCache

_NEAR, _MAX_NUMBERS = 8, 8
"""Number of tokens at the first positions, and most numbers of a config that are used as positions."""
_WINDOW = 3
"""Windows are cut to this, so that the few tokens reach beyond them."""
MAGNITUDES = (-7, 5), (-7, -6)
"""Exponents of 2 between which magnitudes of states are, in turn; small states hide little of what a layer adds."""


MAX_SEEN = _WINDOW + 1
"""Longest window of a trial, whatever it is cut by."""


def shortened(window: int, cut: int) -> int:
    """A window of a trial, cut by `cut`."""
    return max(1, min(window - cut, MAX_SEEN))


@dataclass(frozen=True)
class LayerCall:
    """The arguments with which a model calls one of its layers; other states can be passed instead."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def given(self, states: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with states [T, H] in place of the model's; other tensors are cast to their dtype."""

        def cast(value: Any) -> Any:
            if isinstance(value, Tensor) and value.is_floating_point():
                return value.to(states.dtype)
            if isinstance(value, tuple | list):
                return type(value)(map(cast, value))
            return value

        args = [cast(arg) for arg in self.args]
        kwargs = {name: cast(arg) for name, arg in self.kwargs.items()}
        if args:
            args[0] = states.unsqueeze(0)
        else:
            kwargs["hidden_states"] = states.unsqueeze(0)
        return tuple(args), kwargs

    def run(self, layer: nn.Module, states: Tensor, **changes: Any) -> Tensor:
        """Return a layer's output for states [T, H]."""
        args, kwargs = self.given(states)
        out = layer(*args, **(kwargs | changes))
        made: Tensor = (out[0] if isinstance(out, tuple) else out)[0]
        return made

    @property
    def shared(self) -> tuple[Any, ...]:
        """Which objects the model passed with the states: equal for layers that are called alike."""
        rest = self.args[1:] if self.args else [self.kwargs[name] for name in self.kwargs if name != "hidden_states"]
        return tuple(map(id, rest))

    @property
    def states(self) -> Tensor:
        """[T, H] the states that the model itself passed."""
        found: Tensor = self.args[0] if self.args else self.kwargs["hidden_states"]
        return found[0]


class TriedDecoder(Protocol):
    """A decoder whose layers can be tried."""

    @property
    def ropes(self) -> int:
        """Number of RoPE tables."""

    def rope(self, index: int) -> int:
        """Index of a layer's RoPE table, -1 = none."""

    def rotate_by(self, index: int, rope: int) -> None:
        """Make a layer rotate queries and keys by a RoPE table, -1 = none."""

    def kind(self, index: int) -> Any:
        """What tells a layer apart from others, except for its modules."""

    def alone(
        self, index: int, positions: Tensor, rope: int, cut: int, states: Tensor, shapes: tuple[KVShape, KVShape] | None
    ) -> Tensor:
        """A layer's output for float32 states [T, H] at `positions` [T], rotated by this table.

        The window is cut by `cut`, and stays between 1 and `MAX_SEEN`. `shapes` are the shapes of its keys and values;
        None = it has a recurrent state.
        """

    def whole(
        self, tokens: Tensor, shapes: Sequence[tuple[KVShape, KVShape] | None]
    ) -> tuple[Sequence[Tensor], Tensor]:
        """Of tokens [1, T]: the states [T, H] entering each layer and leaving the last; the head's output [T, V]."""


@dataclass(frozen=True)
class NativeTrials:
    """A native decoder as trials take it."""

    native: NativeDecoder

    @property
    def ropes(self) -> int:
        return len(self.native._ropes)

    def rope(self, index: int) -> int:
        return int(self.native._layers[index].rope)

    def rotate_by(self, index: int, rope: int) -> None:
        self.native._layers[index].rope = rope

    def kind(self, index: int) -> Any:
        return _numbers_in(self.native._layers[index])

    def alone(
        self, index: int, positions: Tensor, rope: int, cut: int, states: Tensor, shapes: tuple[KVShape, KVShape] | None
    ) -> Tensor:
        return layer_output(single_layer(self.native, index, positions, rope, cut), states, shapes)

    def whole(
        self, tokens: Tensor, shapes: Sequence[tuple[KVShape, KVShape] | None]
    ) -> tuple[Sequence[Tensor], Tensor]:
        count = tokens.shape[1]
        layers = len(shapes)
        cache = _one_slot(self.native, shapes, self.native._dtype, count)
        staged = Staged(range(1), count, None, [0], None)
        done = self.native.run(cache, staged, tokens, taps=range(layers + 1), logits=True)
        assert done.logits is not None
        return done.taps.unbind(1), done.logits


def single_layer(whole: NativeDecoder, index: int, positions: Tensor, rope: int, cut: int) -> NativeDecoder:
    """One layer of a native decoder as its own decoder, from states to states, without rounding to bfloat16.

    It rotates the tokens at `positions` [T] by the RoPE table with index `rope` (-1 = none). The window is shortened by
    `cut`.
    """
    layer = Layer.from_buffer_copy(whole._layers[index])
    layer.rope = rope
    layer.window = layer.window and shortened(layer.window, cut)
    layer.experts.rounds_scores = layer.experts.rounds_weights = 0
    made = copy.copy(whole)  # the same weights
    made._layers = (Layer * 1)(layer)
    made._struct = Decoder.from_buffer_copy(whole._struct)
    made._struct.layers = made._layers
    made._struct.count = 1
    made._struct.limit = 0
    made._struct.bf16 = made._struct.rounds_twice = made._struct.embedding_kind = made._struct.returns_normed = 0
    made._struct.norm = made._struct.position_embedding = None
    made._struct.mix = Linear()
    made._struct.head = Linear()
    made._struct.embedding_scale = 1.0
    made._dtype = torch.float32
    made._limit = len(positions)  # the tables end there
    if made._ropes:
        turned = zip(*(tables(positions.unsqueeze(0)) for tables in made._ropes), strict=True)
        cosines, sines = (torch.cat(tables).float().contiguous() for tables in turned)
        made._tables = (cosines, sines)
    return made


@torch.inference_mode()
def layer_output(layer: NativeDecoder, states: Tensor, shapes: tuple[KVShape, KVShape] | None) -> Tensor:
    """The output of a `single_layer` for states [T, H], one for each of its positions.

    `shapes` are the shapes of its keys and values; None = it has a recurrent state.
    """
    states = states.contiguous()
    count = len(states)
    layer._struct.embedding = states.data_ptr()
    layer._struct.embeddings = count
    cache = _one_slot(layer, [shapes], torch.float32, count)
    return layer.run(cache, Staged(range(1), count, None, [0], None), torch.arange(count)).states


@contextmanager
def inputs_as_floats(model: nn.Module, native: NativeDecoder | None) -> Iterator[None]:
    """Make a model and its native decoder multiply packed weights by unquantized inputs in this context.

    If rounding moves an input across the border between two codes, which is rare, its products change far more than by
    rounding. So with codes a wrong layer could pass, and a right one could be refused. Products of codes have trials of
    their own (`packed_linears.sums_codes`).
    """
    packed = [part for part in model.modules() if isinstance(part, PackedLinear)]
    given = [] if native is None else [each for each in _linears_in(native._struct) if each.kind in list(WeightFormat)]

    def switch(floats: bool) -> None:
        for module in packed:
            module.as_floats = floats
        for linear in given:
            linear.microkernels = Microkernel.AS_FLOATS if floats else 0

    switch(True)
    try:
        yield
    finally:
        switch(False)


def _linears_in(struct: Structure) -> Iterator[Linear]:
    """All linears of a decoder or a part of it, as views of its memory."""
    for name, *_ in struct._fields_:
        value = getattr(struct, name)
        parts = [value] if isinstance(value, Structure) else []
        if isinstance(value, _Pointer) and value:
            parts = [value[i] for i in range(struct.count)]
        for part in parts:
            yield from [part] if isinstance(part, Linear) else _linears_in(part)


def _one_slot(
    native: NativeDecoder, shapes: Sequence[tuple[KVShape, KVShape] | None], dtype: torch.dtype, count: int
) -> SlotCache:
    """A cache with one empty slot, ready for a pass of `count` tokens."""
    states = NativeStates.of(native, 1)
    if states is not None:
        states.begin(range(1), [count], None, [0])
    return SlotCache(shapes, 1, dtype, torch.device("cpu"), count, states)


@torch.inference_mode()
def refusal(target: Passes, tried: TriedDecoder) -> str | None:
    """Why a decoder doesn't compute what a target's modules do, in words; None if all its layers do.

    This also finds and sets which of the model's RoPE tables, if any, rotates a layer's queries and keys.
    """
    with _unlimited_steps(target.layers):
        return _refusal(target, tried)


@contextmanager
def _unlimited_steps(layers: nn.Module) -> Iterator[None]:
    """Make scans over many tokens compute what single steps do: lift limits on step sizes, which single steps lack."""
    limited: list[Any] = [part for part in layers.modules() if hasattr(part, "time_step_limit")]
    limits = [part.time_step_limit for part in limited]
    for part in limited:
        part.time_step_limit = (0.0, float("inf"))
    try:
        yield
    finally:
        for part, limit in zip(limited, limits, strict=True):
            part.time_step_limit = limit


def _refusal(target: Passes, tried: TriedDecoder) -> str | None:
    positions = probed_positions(target.config.to_dict(), target.max_length).to(target.device)
    windows = {kind: window and min(window, _WINDOW) for kind, window in target.plan.windows.items()}
    cuts = {kind: (window or 0) - (windows[kind] or 0) for kind, window in target.plan.windows.items()}
    kinds = attention_plan(target.config).of_layers(target.config)
    passes = [(at, _calls(target, at, windows)[0]) for at in (positions, positions[_NEAR - 2 :])]
    alike = _alike(target.layers, tried, passes[0][1])
    for index, *others in alike:
        module = widened(target.layers[index])
        for sizes, (at, calls) in zip(MAGNITUDES, passes, strict=True):
            why = _layer_refusal(target, tried, index, module, at, sizes, calls[index], cuts.get(kinds[index], 0))
            if why is not None:
                return f"layer {index} {why}"
        for other in others:
            tried.rotate_by(other, tried.rope(index))
    return _own_dtype_refusal(target, tried, [group[0] for group in alike])


def _alike(layers: nn.ModuleList, tried: TriedDecoder, calls: Sequence[LayerCall]) -> list[list[int]]:
    """The indices of layers, in groups of a kind."""
    groups = defaultdict[Any, list[int]](list)
    for index, (layer, call) in enumerate(zip(layers, calls, strict=True)):
        groups[_kind_of(layer), tried.kind(index), call.shared].append(index)
    return list(groups.values())


def _kind_of(layer: nn.Module) -> tuple[Any, ...]:
    """What a layer's modules are and hold, apart from the values of their tensors and the layer's number."""
    kind: list[Any] = []
    for name, part in layer.named_modules():
        tensors = [*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)]
        own = [
            (key, _told_apart_by(value))
            for key, value in sorted(vars(part).items())
            if key not in ("layer_idx", "_parameters", "_buffers", "_modules")
        ]
        kind.append((name, type(part), tuple((key, one.shape, one.dtype) for key, one in tensors), tuple(own)))
    return tuple(kind)


def _told_apart_by(value: Any) -> Any:
    """What tells a value from others: itself if it is plain, its shape if it holds weights, otherwise which it is."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return value
    if isinstance(value, ByLevels):
        return value.wide
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if isinstance(value, tuple | list):
        return tuple(map(_told_apart_by, value))
    if isinstance(value, set):
        return frozenset(map(_told_apart_by, value))
    if isinstance(value, dict):
        return tuple((key, _told_apart_by(value[key])) for key in value)
    if isinstance(value, Array):
        return tuple(map(_numbers_in, value))
    if isinstance(value, partial):
        return id(value.func), _told_apart_by(value.args), _told_apart_by(value.keywords)
    return id(value)


def _numbers_in(struct: Structure) -> tuple[Any, ...]:
    """The numbers of a struct and of those inside it, and which of its pointers are null."""
    found: list[Any] = []
    for name, kind, *_ in struct._fields_:
        value = getattr(struct, name)
        if isinstance(value, Structure):
            found.append(_numbers_in(value))
        elif isinstance(value, _Pointer) or kind is c_void_p:
            found.append(bool(value))
        elif name != "states":  # where the layer's own states begin
            found.append(value)
    return tuple(found)


def probed_positions(config: Mapping[str, Any], limit: int | None) -> Tensor:
    """Sorted positions [T]: the first, numbers of the config, and the end of the context, or beyond all numbers."""
    numbers = {number for number in _numbers(dict(config)) if number >= _NEAR}
    end = limit or 2 * max(numbers, default=_NEAR)
    named = sorted(number for number in numbers if number < end)
    step = max(1.0, len(named) / _MAX_NUMBERS)
    named = [named[-1 - int(i * step)] for i in range(min(len(named), _MAX_NUMBERS))]
    found = {*range(_NEAR), *named, end // 2, end - 2, end - 1}
    return torch.tensor(sorted(at for at in found if 0 <= at < end))


def _numbers(value: Any) -> Iterator[int]:
    """Every whole number in a config."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            yield from _numbers(part)
    elif isinstance(value, int | float) and not isinstance(value, bool) and value == value // 1:
        yield int(value)


def _calls(
    target: Passes, positions: Tensor, windows: Mapping[str, int | None], last: Tensor | None = None
) -> tuple[list[LayerCall], Tensor]:
    """How the model calls each layer for tokens at `positions` [T] with a causal mask, and the final states [T, H].

    `windows` count tokens of the pass. Only the first layer computes: the others return the states that they are given,
    which no trial uses. Given states `last` [T, H], they replace the last layer's output, and the result has the logits
    [T, V] that the model computes from them instead of final states.
    """
    count = len(positions)
    calls = list[LayerCall]()
    form = list[Any]()  # what the first layer returns: a tensor, or a tuple that begins with it
    steps = torch.arange(count, device=target.device)
    seen = (steps.unsqueeze(1) >= steps).unsqueeze(0)
    mask = target.masks(torch.zeros_like(steps[:1]), 0, seen, steps.unsqueeze(0), windows=windows)

    def instead(own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        calls.append(LayerCall(args, kwargs))
        if len(calls) == 1:
            form.append(own(*args, **kwargs))
        states = last if last is not None and len(calls) == target.num_layers else calls[-1].states
        return (states.unsqueeze(0), *form[0][1:]) if isinstance(form[0], tuple) else states.unsqueeze(0)

    replaced = [(vars(layer), vars(layer).get("forward")) for layer in target.layers]
    try:
        for layer in target.layers:
            vars(layer)["forward"] = partial(instead, layer.forward)
        runner = target.model.base_model if last is None else target.model
        out = runner(
            input_ids=_tokens(target, count), attention_mask=mask, position_ids=positions.unsqueeze(0), use_cache=False
        )[0]
    finally:
        for attributes, own in replaced:
            del attributes["forward"]
            if own is not None:
                attributes["forward"] = own
    return calls, out[0]


def _tokens(target: Passes, count: int) -> Tensor:
    """Ordinary tokens [1, T], without padding."""
    return (torch.arange(count, device=target.device) + target.vocab_size // 2).unsqueeze(0) % target.vocab_size


def _layer_refusal(
    target: Passes,
    tried: TriedDecoder,
    index: int,
    module: nn.Module,
    positions: Tensor,
    sizes: tuple[int, int],
    call: LayerCall,
    cut: int,
) -> str | None:
    """How a layer alone differs from its `module` in float32, or None; windows are shortened by `cut`."""
    states = spread(len(positions), target.hidden_size, sizes).to(target.device)
    trial = RoundingTrial(module, torch.float32, partial(call.run, module, states))
    if _reads_positions(module, call, trial.expected, states):
        return "reads position ids for more than RoPE"
    own = tried.rope(index)
    shape = target.kv_shapes[index]
    refused = None
    others = sorted({-1, *range(tried.ropes)} - {own}) if shape is not None else ()
    for rope in (own, *others):
        apart = trial.relative_error(tried.alone(index, positions, rope, cut, states, shape))
        if apart.max() <= 1:
            tried.rotate_by(index, rope)
            return None
        refused = refused or (
            f"is {float(apart.max()):.3g} times as far from its module as rounding allows, "
            f"at position {int(positions[apart.argmax()])}"
        )
    return refused


def _reads_positions(module: nn.Module, call: LayerCall, expected: Tensor, states: Tensor) -> bool:
    """Whether a layer that takes position ids gives another output for `states` with other ids."""
    ids = call.kwargs.get("position_ids")
    named = any("position_ids" in signature(part.forward).parameters for part in module.children())
    if ids is None or not named:
        return False
    others = (torch.zeros_like(ids), 3 * ids + 1_000_003)
    return any(not call.run(module, states, position_ids=other).equal(expected) for other in others)


def spread(tokens: int, hidden: int, sizes: tuple[int, int]) -> Tensor:
    """Random states [T, H] with magnitudes between two powers of 2."""
    draw = torch.Generator().manual_seed(0)
    factors = torch.logspace(*sizes, tokens, base=2.0)[torch.randperm(tokens, generator=draw)]
    return torch.randn(tokens, hidden, generator=draw) * factors.unsqueeze(1)


def widened(layer: nn.Module) -> nn.Module:
    """A copy of a layer that computes in float32; it shares the weights of prepacked linears and of experts."""
    kept: dict[int, Any] = {}
    for part in layer.modules():
        if isinstance(part, NativeExperts):
            kept |= {id(each): each for each in part.modules()}
        elif isinstance(part, PrepackedLinear) and id(part) not in kept:
            kept[id(part)] = wide = copy.copy(part)
            wide._dtype = torch.float32
            if isinstance(wide, NativeRouter):
                wide.form = wide.form._replace(rounds_scores=False, rounds_weights=False)
                wide._states = torch.float32
        if hasattr(part, "config"):
            kept[id(part.config)] = part.config
    shared = {id(each) for each in kept.values()}
    made = copy.deepcopy(layer, kept)
    for part in made.modules():
        if id(part) not in shared:
            for name, weight in part._parameters.items():
                if weight is not None and weight.is_floating_point():
                    part._parameters[name] = nn.Parameter(weight.detach().float(), False)
            for name, buffer in part._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    part._buffers[name] = buffer.float()
    return made


def _own_dtype_refusal(target: Passes, tried: TriedDecoder, indices: Sequence[int]) -> str | None:
    """How a pass of the decoder differs from some layers, each run on the states of the pass, or None."""
    count = min(_NEAR, target.max_length or _NEAR)
    states, outputs = tried.whole(_tokens(target, count), target.kv_shapes)
    calls = list[LayerCall]()

    def logits() -> Tensor:
        calls[:], made = _calls(target, torch.arange(count, device=target.device), target.plan.windows, states[-1])
        return made.float()

    head = RoundingTrial(target.model.get_output_embeddings(), target.dtype, logits)
    gap = (states[0].float() - calls[0].states.float()).abs().amax()
    scale = calls[0].states.float().abs().amax()
    if not gap <= 4 * torch.finfo(target.dtype).eps * scale:
        return f"the embedding differs from the modules' by {float(gap):.3g} of {float(scale):.3g}"
    trials = {"the head": (head, target.finish(outputs))}
    for index in indices:
        layer, call = target.layers[index], calls[index]
        trial = RoundingTrial(layer, target.dtype, partial(_widely, call, layer, states[index]))
        trials[f"layer {index}"] = trial, states[index + 1]
    for name, (trial, found) in trials.items():
        apart = float(trial.relative_error(found.float()).max())
        if apart > 1:
            kind = str(target.dtype).removeprefix("torch.")
            return f"{name} of a pass in {kind} is {apart:.3g} times as far from its module as rounding allows"
    return None


def _widely(call: LayerCall, layer: nn.Module, states: Tensor) -> Tensor:
    return call.run(layer, states).float()
