"""Trials at load: which of the faster ways to run a model's passes give the logits of its own padded ones.

A native decoder, ragged rows and CUDA graphs are each kept only if they do; otherwise the model runs without.

Shapes: R rows, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

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


def _agrees(target: Target, expected: Sequence[Tensor]) -> bool:
    """Whether the trials run, and give the expected logits but for rounding.

    Where there are several, rounding may have chosen another expert for a token: half of them say of each token.
    """
    try:
        pairs = list(zip(_trials(target), expected, strict=True))
    except (RuntimeError, ValueError, TypeError, IndexError, EyasError):
        return False  # whatever the model raises, it can't run like this
    close = [[logits_agree(*rows, target.dtype) for rows in zip(*pair, strict=True)] for pair in pairs]
    return all(2 * sum(of_token) >= len(close) for of_token in zip(*close, strict=True))


def _trials(target: Target) -> list[Tensor]:
    routed = any(isinstance(part, NativeExperts) for part in target.model.modules())
    numbers = range(_ROUTED_TRIALS if routed else 1)
    return [_trial(target, target.vocab_size // 2 + 4 * number) for number in numbers]


@torch.inference_mode()
def _trial(target: Target, first: int) -> Tensor:
    """Logits [4, V] of two rows with three and four tokens, the last of which are verified; one has a draft."""
    target.resize(2)
    tokens = (torch.arange(first, first + 4, device=target.device) % target.vocab_size).view(2, 2)
    valid = torch.tensor([[True, True], [False, False]], device=target.device)
    tree = DraftTree(tokens, tokens.new_tensor([[-1, 0]] * 2), valid.float(), valid, 2, counted=2)
    recorded = target.graphs is not None
    for _ in target.prefill(range(2), [tokens[0].tolist() * 2, tokens[1].tolist()], (), chunk=2 if recorded else 512):
        if recorded:  # with other lengths and roots than those whose logits are looked at
            target.verify(range(2), tokens[:, 0], tree, ())
    logits = target.verify(range(2), tokens[:, 1], tree, ()).logits
    return logits.rows[logits.index[[0, 0, 0, 1], [0, 1, 2, 0]]].float()  # not the second row's nodes
