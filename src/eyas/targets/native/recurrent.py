"""Layers that mix tokens by a recurrence, as the kernels take them; see `kernels/recurrent.h`.

They are recognized by their parameters: a convolution, decays (`A_log`) and steps (`dt_bias`). With a skip factor (`D`)
they are Mamba-2 layers, without it gated delta rules, and with only a convolution LFM2 layers. Trials check that this
is what they compute (`layer_trials`).

Shapes: H hidden size, C channels of the convolution, K its kernel size, V features that all heads mix together.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import Array
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from eyas.errors import UnsupportedModelError
from eyas.targets.native.library import MAX_TAPS, PANEL, Linear, Recurrent

_INPUTS = (
    ("in_proj_qkvz", "in_proj_ba"),
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"),
)
"""Names of the linears that make a delta rule's inputs; the last ones make gates, factors and steps."""
_OTHER_PARTS = {"conv1d", "conv", "norm", "o_norm", "out_proj", "o_proj", "act"}


@dataclass(frozen=True)
class RecurrentParts:
    """The parts of a recurrent mixer; sizes have the names of the kernels' `Recurrent`."""

    inputs: tuple[Any, ...]
    """Linears of the layer's input, whose outputs are numbered consecutively across all of them."""
    out: nn.Module
    conv: nn.Conv1d
    channels: Tensor  # [C] the outputs that go through the convolution
    gates: Tensor  # [V] the outputs that gate the mixed features
    steps: Tensor  # [heads] the outputs that give the step sizes
    factors: Tensor | None  # [heads] the outputs that give a delta rule's factors; None = not a delta rule
    step_bias: Tensor  # [heads]
    rates: Tensor  # [heads] float32, negative
    key_heads: int = 1
    key_size: int = 0
    starts: tuple[int, int, int] = (0, 0, 0)
    """The channels at which values, keys and queries begin."""
    scales: Tensor | None = None  # [outputs of all inputs] factors of the outputs
    multipliers: Tensor | None = None  # [C] outputs by which the channels are multiplied before the convolution
    skip: Tensor | None = None  # [heads]
    factor_scale: float = 1.0
    norm: Any = None
    norm_size: int = 0
    gates_first: bool = False

    @property
    def heads(self) -> int:
        """Number of states, one per head; 0 = there is only a convolution."""
        return len(self.rates)

    @property
    def mixed(self) -> int:
        """V, the features that leave the recurrence."""
        return len(self.gates)

    @property
    def state_size(self) -> int:
        """Floats in a sequence's states: the convolution's last inputs, and [key size, value size] per head."""
        return (self.conv.kernel_size[0] - 1) * len(self.channels) + self.key_size * self.mixed

    def struct(self, inputs: Array[Linear], out: Linear, states: int, keep_alive: Callable[[Tensor], int]) -> Recurrent:
        """The mixer as the kernels take it, with its linears; its states begin at float `states` of a slot's states.

        `keep_alive` keeps a tensor alive and returns its address. Raises UnsupportedModelError for sizes that don't fit
        vectors.
        """
        kernel = self.conv.kernel_size[0]
        size = self.mixed // max(self.heads, 1)
        normed = self.key_size if self.factors is not None else PANEL
        fits = (len(self.channels), size, normed, self.norm_size or size)
        if any(part % PANEL for part in fits) or kernel > MAX_TAPS or self.heads % self.key_heads:
            raise UnsupportedModelError(f"the sizes {fits}, {kernel} of a recurrence don't fit the vectors")
        begins_at, width, where = self._arranged()
        weight = None if self.norm is None else self.norm.weight

        def floats(values: Tensor | None) -> int | None:
            return None if values is None else keep_alive(values.detach().float())

        scales = None
        if self.scales is not None:
            scales = torch.ones(width)
            scales[where] = self.scales.float()
        return Recurrent(
            inputs,
            len(inputs),
            keep_alive(torch.tensor(begins_at)),
            floats(scales),
            width,
            len(self.channels),
            kernel,
            0 if self.multipliers is None else len(self.channels) + self.mixed,
            floats(self.conv.weight[:, 0].T),
            floats(self.conv.bias),
            self.factors is not None,
            self.heads,
            self.key_heads,
            size,
            self.key_size,
            *self.starts,
            keep_alive(where[self.steps]),
            None if self.factors is None else keep_alive(where[self.factors]),
            floats(self.step_bias),
            floats(self.rates),
            floats(self.skip),
            self.factor_scale,
            len(self.channels),
            self.gates_first,
            None if weight is None else floats(weight.repeat(self.mixed // len(weight))),
            self.norm_size or size,
            getattr(self.norm, "variance_epsilon", 0.0),
            states,
            out,
        )

    def _arranged(self) -> tuple[list[int], int, Tensor]:
        """Where each panel of the inputs' outputs begins in a row, the row's width, and each output's index in the row.

        The convolution's channels come first, then gates, then multipliers. Raises UnsupportedModelError if these
        aren't whole panels.
        """
        sizes = [part.out_features for part in self.inputs]
        where = torch.full((sum(sizes),), -1)
        more = () if self.multipliers is None else (self.multipliers,)
        wanted = torch.cat((self.channels, self.gates, *more))
        where[wanted] = torch.arange(len(wanted))
        begins_at = list[int]()
        width = len(wanted)
        first = 0
        for size in sizes:
            for panel in range(first, first + size, PANEL):
                end = min(panel + PANEL, first + size)
                if not (where[panel:end] >= 0).any():
                    where[panel:end] = torch.arange(width, width + end - panel)
                    width += PANEL
                begins = int(where[panel])
                if where[panel:end].tolist() != [*range(begins, begins + end - panel)]:
                    raise UnsupportedModelError("inputs of a recurrence don't come in whole panels")
                begins_at.append(begins)
            first += size
        return begins_at, width, where


def recurrent_parts(mixer: Any) -> RecurrentParts:
    """Take apart a module that mixes tokens by a recurrence.

    Raises UnsupportedModelError for modules of an unknown kind.
    """
    own = {key for key, _ in mixer.named_parameters(recurse=False)}
    name = type(mixer).__name__
    conv = getattr(mixer, "conv1d", getattr(mixer, "conv", None))
    if not isinstance(conv, nn.Conv1d) or not conv.groups == conv.in_channels == conv.out_channels:
        raise UnsupportedModelError(f"{name} has no depthwise convolution")
    if own == {"A_log", "dt_bias"}:
        return _delta_rule(mixer)
    if own == {"A_log", "dt_bias", "D"}:
        return _mamba(mixer)
    if not own:
        return _short_convolution(mixer)
    raise UnsupportedModelError(f"{name} has the parameters {sorted(own)}")


def _delta_rule(mixer: Any) -> RecurrentParts:
    """The parts of a gated delta rule (Qwen3-Next, OLMo-Hybrid)."""
    linears = _linears(mixer, _INPUTS)
    sizes = [part.out_features for part in linears]
    outputs = torch.split(torch.arange(sum(sizes)), sizes)
    if len(outputs) == 2:  # in the mixer's own order
        parts = mixer.fix_query_key_value_ordering(*(part.view(1, 1, -1) for part in outputs))
        *channels, gates, factors, steps = (part.flatten() for part in parts)
    else:
        *channels, gates, factors, steps = outputs
    joint = torch.cat(channels)
    size = int(mixer.head_k_dim)
    keys = (len(joint) - len(gates)) // 2
    norm = mixer.norm if hasattr(mixer, "norm") else mixer.o_norm
    return RecurrentParts(
        linears,
        mixer.out_proj if hasattr(mixer, "out_proj") else mixer.o_proj,
        mixer.conv1d,
        joint,
        gates,
        steps,
        factors,
        mixer.dt_bias,
        -mixer.A_log.float().exp(),
        keys // size,
        size,
        (2 * keys, keys, 0),
        factor_scale=2.0 if getattr(mixer, "allow_neg_eigval", False) else 1.0,
        norm=norm,
        norm_size=len(norm.weight),
    )


def _mamba(mixer: Any) -> RecurrentParts:
    """The parts of a Mamba-2 mixer (Bamba, Granite 4, Nemotron-H; Falcon-H1 scales the outputs of its inputs)."""
    linears = _linears(mixer, (("in_proj",),))
    heads = len(mixer.A_log)
    channels = mixer.conv1d.in_channels
    mixed = mixer.out_proj.in_features
    groups = int(mixer.n_groups)
    norm = getattr(mixer, "norm", None)
    scales = getattr(mixer, "mup_vector", None)
    norm = None if isinstance(norm, nn.Identity) else norm
    size = getattr(norm, "group_size", mixed // int(getattr(norm, "n_groups", 1)))
    keys = (channels - mixed) // 2
    gates, convolved, steps = torch.split(torch.arange(linears[0].out_features), [mixed, channels, heads])
    return RecurrentParts(
        linears,
        mixer.out_proj,
        mixer.conv1d,
        convolved,
        gates,
        steps,
        None,
        mixer.dt_bias,
        -mixer.A_log.float().exp(),
        groups,
        keys // groups,
        (0, mixed, mixed + keys),
        skip=mixer.D,
        scales=None if scales is None else scales.flatten().float() * float(mixer.ssm_in_multiplier),
        norm=norm,
        norm_size=0 if norm is None else int(size),
        gates_first=norm is None or not getattr(norm, "norm_before_gate", False),
    )


def _short_convolution(mixer: Any) -> RecurrentParts:
    """The parts of a convolution over the product of two inputs, gated by a third (LFM2)."""
    linears = _linears(mixer, (("in_proj",),))
    none = torch.empty(0, dtype=torch.int64)
    multipliers, gates, channels = torch.arange(linears[0].out_features).chunk(3)
    return RecurrentParts(
        linears, mixer.out_proj, mixer.conv, channels, gates, none, None, none, none, multipliers=multipliers
    )


def _linears(mixer: Any, names: tuple[tuple[str, ...], ...]) -> tuple[Any, ...]:
    """The linears of a layer's input, named by one of the series in `names`, if the mixer has no unknown children."""
    children = {name for name, _ in mixer.named_children()}
    found = next((each for each in names if set(each) == children - _OTHER_PARTS), None)
    if found is None:
        raise UnsupportedModelError(f"{type(mixer).__name__} has the parts {sorted(children)}")
    return tuple(getattr(mixer, name) for name in found)
