"""Trials at load: which of the faster ways to run a model's passes give the logits of its own padded ones.

A native decoder, ragged rows and CUDA graphs are each kept only if they do; otherwise the model runs without.

Where tokens are routed to experts, a rounding may choose another expert for a token, after which all of its states
differ; that happens to a model's own modules with every other kernel. So there are several trials there, of which half
must agree, and a token also agrees that has gone astray after the first layers only.

Shapes: R rows, V vocabulary, H hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from eyas.errors import EyasError
from eyas.targets.architecture import logits_agree
from eyas.targets.attention import intercept, set_attention
from eyas.targets.graphs import PassGraphs
from eyas.targets.native.experts import NativeExperts
from eyas.tree import DraftTree

if TYPE_CHECKING:
    from eyas.targets.target import Target

_LOG = logging.getLogger("eyas")
_ROUTED_TRIALS = 8
"""Trials of passes where tokens are routed to experts."""
_FIRST = (1, 2)
"""The boundaries after the first layers."""
_NEAR, _RELATED = 3e-2, 0.7
"""The largest differences, as shares of a vector's length, of bfloat16's rounding and of logits that are related."""


class PassTrial(NamedTuple):
    """What a pass made of four tokens."""

    logits: Tensor  # [4, V]
    first: Tensor  # [4, 2, H] the states after the first layers, where tokens are routed; else [4, 0, H]


def choose_passes(target: Target) -> None:
    """Set `native`, `ragged` and `graphs` of a target, keeping only what gives the logits of the model's own passes."""
    native, ragged, own = target.native, target.ragged, target.model.config._attn_implementation
    target.native, target.ragged = None, False
    expected = _trials(target)
    if native is not None:
        target.native, target.ragged = native, ragged
        if _agrees(target, expected):
            return
        _LOG.info("native passes differ from those of %s: its modules are run", type(target.model).__name__)
        target.native, target.ragged = None, False
    if ragged and intercept(target.model):
        target.ragged = True
        if not _agrees(target, expected):
            target.ragged = False
            set_attention(target.model, own)
    if target.record is not None:
        target.graphs = PassGraphs(target.record, uses=1)
        if _agrees(target, expected) and target.graphs.failure is None:
            target.graphs = PassGraphs(target.record)
            return
        if target.graphs.failure is None:
            _LOG.warning("CUDA graphs of %s give other logits: its passes aren't recorded", type(target.model).__name__)
        target.graphs = target.record = None


def _agrees(target: Target, expected: Sequence[PassTrial]) -> bool:
    """Whether the trials run, and half of them give the expected logits of each token but for rounding."""
    try:
        found = _trials(target)
    except (RuntimeError, ValueError, TypeError, IndexError, EyasError):
        return False  # whatever the model raises, it can't run like this
    close = [
        [token_agrees(trial, wanted, token, target.dtype) for token in range(4)]
        for trial, wanted in zip(found, expected, strict=True)
    ]
    return all(2 * sum(of_token) >= len(close) for of_token in zip(*close, strict=True))


def token_agrees(found: PassTrial, expected: PassTrial, token: int, dtype: torch.dtype) -> bool:
    """Whether a token's logits are the expected ones but for rounding, or for what rounding may do to its routing."""
    if logits_agree(found.logits[token], expected.logits[token], dtype):
        return True
    if dtype == torch.float32 or not expected.first.shape[1]:
        return False
    apart = [(a[token] - b[token]).norm() / b[token].norm() for a, b in zip(found, expected, strict=True)]
    return bool(apart[0] <= _RELATED and apart[1] <= _NEAR)


def _trials(target: Target) -> list[PassTrial]:
    routed = any(isinstance(part, NativeExperts) for part in target.model.modules())
    numbers, taps = range(_ROUTED_TRIALS if routed else 1), _FIRST if routed else ()
    return [_trial(target, target.vocab_size // 2 + 4 * number, taps) for number in numbers]


@torch.inference_mode()
def _trial(target: Target, first: int, taps: Sequence[int]) -> PassTrial:
    """A pass over two rows with three and four tokens, the last of which are verified; one has a draft."""
    target.resize(2)
    tokens = (torch.arange(first, first + 4, device=target.device) % target.vocab_size).view(2, 2)
    valid = torch.tensor([[True, True], [False, False]], device=target.device)
    tree = DraftTree(tokens, tokens.new_tensor([[-1, 0]] * 2), valid.float(), valid, 2, counted=2)
    recorded = target.graphs is not None
    for _ in target.prefill(range(2), [tokens[0].tolist() * 2, tokens[1].tolist()], (), chunk=2 if recorded else 512):
        if recorded:  # with other lengths and roots than those whose logits are looked at
            target.verify(range(2), tokens[:, 0], tree, taps)
    done = target.verify(range(2), tokens[:, 1], tree, taps)
    rows = done.logits.index[[0, 0, 0, 1], [0, 1, 2, 0]]  # not the second row's nodes
    return PassTrial(done.logits.rows[rows].float(), done.taps[rows].float())
