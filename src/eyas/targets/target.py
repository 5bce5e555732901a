"""The target: a model whose passes run in the fastest way that trials at load have shown to be correct.

It also does teacher forcing: it computes the hidden states of whole chats, on which drafters are trained.

Long rows are read in chunks over a cache, so that no mask grows with the square of the length; only the resulting
states grow with it.

Shapes: B rows, S positions, N states, A taps, Ht hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from eyas.errors import UnsupportedModelError
from eyas.runtime import without_cudnn_attention
from eyas.targets.architecture import unsupported_if_it_fails
from eyas.targets.parameters import weight_formats
from eyas.targets.passes import EmbeddingAndHead, Passes
from eyas.targets.taps import caught_taps, stacked
from eyas.targets.trials import check_states, choose_passes, find_odd_steps

MAX_UNCHUNKED = 4096
"""Maximum number of positions of a row that are read in one pass."""
CHUNK, NATIVE_CHUNK = 1024, 128
"""Positions per pass over longer rows, and over any rows if passes are native: their states stay in the caches."""


class Trace(NamedTuple):
    """The hidden states of teacher-forced tokens, for training."""

    taps: Tensor  # [B, S, A, Ht]
    final: Tensor  # [B, S, Ht], after the final norm: the head's input


class Target(Passes):
    """A model that verifies draft trees. Raises UnsupportedModelError for models that can't."""

    def __post_init__(self) -> None:
        super().__post_init__()
        with unsupported_if_it_fails(self.model):
            choose_passes(self)
            if self.states:
                if self.native is None:
                    find_odd_steps(self)
                check_states(self)

    @property
    def precision(self) -> dict[str, str]:
        """Its dtype, and the precision of its weights: 4-bit and 8-bit formats, or the same dtype."""
        dtype = str(self.dtype).removeprefix("torch.")
        return {"dtype": dtype, "weights": weight_formats(self.model) or dtype}

    @torch.no_grad()
    def trace(self, tokens: Tensor, lengths: Tensor, taps: Sequence[int]) -> Trace:
        """Teacher-force right-padded `tokens` [B, S] of `lengths` [B], without using the slots.

        The states at padded positions are meaningless.
        """
        with self.backend.running(), without_cudnn_attention():
            if self.native is not None:  # native passes are two to six times as fast as the modules
                return _in_chunks(self, tokens, lengths.tolist(), taps, NATIVE_CHUNK)
            if tokens.shape[1] <= MAX_UNCHUNKED:
                return _whole(self, tokens, lengths, taps)
            # padding follows all real tokens, so it needs no mask
            return _in_chunks(self, tokens, [tokens.shape[1]] * len(tokens), taps, CHUNK)


def _whole(target: Passes, tokens: Tensor, lengths: Tensor, taps: Sequence[int]) -> Trace:
    """`trace` rows of at most `MAX_UNCHUNKED` tokens in one pass."""
    steps = torch.arange(tokens.shape[1], device=tokens.device)
    positions = steps.expand_as(tokens)
    seen = (steps.unsqueeze(1) >= steps).unsqueeze(0) & (
        (steps < lengths.unsqueeze(1)).unsqueeze(1) | torch.eye(len(steps), dtype=torch.bool, device=tokens.device)
    )
    mask = target.masks(torch.zeros_like(lengths), 0, seen, positions)
    with caught_taps(target.model.base_model, target.layers, taps) as caught:
        out = target.model.base_model(input_ids=tokens, attention_mask=mask, position_ids=positions, use_cache=False)
    return Trace(stacked(caught, tokens, target.hidden_size, target.dtype), out[0])


def _in_chunks(target: Passes, tokens: Tensor, lengths: Sequence[int], taps: Sequence[int], chunk: int) -> Trace:
    """`trace` a chunk at a time, over a cache."""
    rows = range(len(tokens))
    longest = max(lengths)
    cache = target.allocate(len(rows), longest)
    finals = list[Tensor]()
    taken = list[Tensor]()
    for start in range(0, longest, chunk):
        piece = tokens[:, start : min(start + chunk, longest)]
        counts = [min(max(length - start, 0), piece.shape[1]) for length in lengths]
        final, caught = target.read(cache, rows, piece, counts, taps)
        finals.append(final)
        taken.append(caught)
    beyond = (0, tokens.shape[1] - longest)
    return Trace(pad(torch.cat(taken, dim=1), (0, 0, 0, 0, *beyond)), pad(torch.cat(finals, dim=1), (0, 0, *beyond)))


class FinalNorm:
    """What a model does after its layers, applied to states that another engine's layers have computed.

    It runs the model's own pass with the layers left out, so it needn't know how a model names its last norm. Raises
    UnsupportedModelError for a model whose final states are more than its last layer's states after a norm.
    """

    def __init__(self, target: EmbeddingAndHead) -> None:
        self.target = target
        outputs = list[Any]()
        self._pass, self._layer = _without_layers(target.model.base_model, target.layers)
        handle = target.layers[-1].register_forward_hook(lambda _module, _args, output: outputs.append(output))
        try:
            with torch.no_grad():
                expected = target.model.base_model(input_ids=target.an_ordinary_token(), use_cache=False)[0][0]
        finally:
            handle.remove()
        self._layer.wraps = not isinstance(outputs[-1], Tensor)
        leaving = outputs[-1][0] if self._layer.wraps else outputs[-1]
        if leaving.shape != (1, 1, target.hidden_size) or not torch.allclose(self(leaving[0]), expected):
            raise UnsupportedModelError(
                f"{target.config.model_type} does more to its last layer's states than to norm them: capture with "
                "eyas's own pass (leave out `engine=`)"
            )

    @torch.no_grad()
    def __call__(self, leaving: Tensor) -> Tensor:
        """The final states [N, Ht] of the states [N, Ht] that leave the last layer."""
        self._layer.states = leaving.to(self.target.device, self.target.dtype).unsqueeze(1)  # [N, 1, Ht]
        final: Tensor = self._pass(input_ids=self.target.an_ordinary_token(len(leaving)), use_cache=False)[0]
        return final[:, 0]


class _GivenStates(nn.Module):
    """Replaces a layer: outputs `states` whatever its input, and has the layer's attributes."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.states: Tensor | None = None
        self.wraps = False
        """Whether the model's layers output a tuple."""

    def forward(self, *_args: Any, **_options: Any) -> Any:
        """Return the given states [N, 1, Ht] as the layers would have output them."""
        return (self.states,) if self.wraps else self.states

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name) if name in ("layer", "states") else getattr(self.layer, name)


def _without_layers(model: nn.Module, layers: nn.ModuleList) -> tuple[nn.Module, _GivenStates]:
    """A copy of a model that shares all modules but its `layers`, and the module that replaces them."""
    given = _GivenStates(layers[-1])
    *path, name = next(found for found, module in model.named_modules() if module is layers).split(".")
    shell = inner = _shared_copy(model)
    for part in path:
        inner._modules[part] = inner = _shared_copy(inner._modules[part])
    inner._modules[name] = nn.ModuleList([given])
    return shell, given


def _shared_copy(module: Any) -> Any:
    """A shallow copy of a module, in which submodules can be replaced without changing the original."""
    made = copy.copy(module)
    made._modules = dict(module._modules)
    return made
