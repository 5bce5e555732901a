"""Drafts by kernels in Triton on a GPU: which networks have them, and trials of whether they compute the same.

Each layer runs alone in float32, as a target's layers do (`targets/native/layer_trials.py`). Then the network drafts in
its own dtype: it reads pairs and runs the levels of a tree, whose logits must be those of the modules up to rounding.

Shapes: R rows, T tokens, W nodes of a level, H draft hidden, Vd draft vocabulary.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eyas.drafters.decoding import NetworkPairs, Proposer
from eyas.drafters.levels import DraftLogits
from eyas.drafters.network import DecoderBlock, decoder_blocks
from eyas.errors import UnsupportedModelError
from eyas.runtime import LOADING, inference
from eyas.targets.architecture import logits_agree
from eyas.targets.attention import grouped_attention
from eyas.targets.draft_kernels import UnreadLogits
from eyas.targets.native.layer_trials import MAGNITUDES, MAX_SEEN, probed_positions, shortened, spread, widened
from eyas.targets.roundings import RoundingTrial
from eyas.tree import Frontier

if TYPE_CHECKING:  # importing it imports triton, which most machines lack
    from eyas.targets.triton.drafter import TritonDrafter

_LOG = logging.getLogger("eyas")
_PAIRS = 3, 20
"""How many pairs the rows have read in the two drafts of a trial."""
_WIDTHS = 1, 2, 2
"""Nodes of the levels of these drafts."""


def use_kernels(proposer: Proposer) -> None:
    """Let a proposer run its passes by kernels in Triton if they compute what the modules do; the log says if not."""
    from eyas.targets.triton.drafter import TritonDrafter

    try:
        description = proposer.network.description()
        if description is None:
            raise UnsupportedModelError(f"{type(proposer.network).__name__} isn't made of layers that they know")
        kernels = TritonDrafter(description)
    except UnsupportedModelError as error:
        LOADING.info("the drafter runs its modules, not passes in Triton: %s", error)
        return
    try:
        refused = _refusal(proposer, kernels)
    except UnsupportedModelError as error:
        refused = str(error)
    if refused is None:
        proposer.kernels = kernels
    else:
        _LOG.warning("the drafter runs its modules, not passes in Triton: %s", refused)


@inference
def _refusal(proposer: Proposer, kernels: TritonDrafter) -> str | None:
    """Why kernels don't compute what a proposer's modules do, in words; None if they do."""
    for index, block in enumerate(decoder_blocks(proposer.network)):
        for sizes in MAGNITUDES:
            apart = _layer_error(proposer, kernels, index, block, sizes)
            if not apart <= 1:
                return f"layer {index} is {apart:.3g} times as far from its module as rounding allows"
    for pairs in _PAIRS:
        expected = list(_drafted(proposer, pairs))
        proposer.kernels = kernels
        try:
            found = list(_drafted(proposer, pairs))
        finally:
            proposer.kernels = None
        for level, logits in enumerate(zip(found, expected, strict=True)):
            if not logits_agree(*logits, proposer.network.dtype):
                return f"the logits of level {level} differ after {pairs} pairs"
    return None


def _layer_error(
    proposer: Proposer, kernels: TritonDrafter, index: int, block: DecoderBlock, sizes: tuple[int, int]
) -> float:
    """How far a layer alone is from its module in float32, as a multiple of what rounding allows."""
    network: Any = proposer.network
    positions = probed_positions(network.config.model_dump(), network.config.max_position_embeddings)
    positions = positions.to(network.target_ids.device)
    count = len(positions)
    parts = block.parts()
    states, embedded = (
        each.to(positions.device) for each in spread(2 * count, network.config.hidden_size, sizes).chunk(2)
    )
    window = network.layer_windows[index] if network.layer_windows else None
    cut = 0 if window is None else max(0, window.size - MAX_SEEN + 1)
    steps = torch.arange(count, device=positions.device)
    back = steps.unsqueeze(1) - steps
    seen = back >= 0 if window is None else (back >= 0) & (back < shortened(window.size, cut))

    def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return grouped_attention(q, k, v, seen.expand(1, 1, -1, -1))

    module: Any = widened(block)
    given = (states,) if parts.embedding_norm is None else (embedded, states)
    rope = network.rotary(states, positions.unsqueeze(0))

    def run() -> Tensor:
        made: Tensor = module(*(part.unsqueeze(0) for part in given), rope, attend)[0]
        return made

    trial = RoundingTrial(module, torch.float32, run)
    x, wide = (states, None) if parts.embedding_norm is None else kernels.entering(embedded, states)
    return float(trial.relative_error(kernels.alone(index, positions, 0, cut, x, block.kv_shape, wide)).max())


def _drafted(proposer: Proposer, count: int) -> Iterator[Tensor]:
    """The logits [2, W, Vd] of each level of two rows' drafts, which have read `count` pairs and one fewer."""
    network = proposer.network
    config = network.config
    pairs = NetworkPairs(network)
    pairs.resize(2)
    rows = range(2)
    shape = 2, count, config.tap_count, config.target_hidden_size
    taps = torch.linspace(-3.0, 5.0, math.prod(shape), device=pairs.device).cos().to(network.dtype).view(shape)
    tokens = network.target_ids[torch.arange(2 * count, device=pairs.device) % len(network.target_ids)]
    proposer.read(pairs, rows, tokens.view(2, count), taps, [count, count - 1])
    widths = _WIDTHS[: config.guesses]
    levels = proposer.levels(pairs, rows, len(widths))
    yield _read(levels.first())
    for above, width in pairwise(widths):
        nodes = torch.arange(width, device=pairs.device).expand(2, -1)
        yield _read(levels.add(Frontier(network.target_ids[nodes], nodes % above)))


def _read(logits: DraftLogits) -> Tensor:
    return logits.read() if isinstance(logits, UnreadLogits) else logits
