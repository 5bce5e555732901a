"""The objective of all drafter kinds: the training-time test against the target's own distribution.

The loss mask belongs to the token that is predicted, so the first token of an answer is trained. For every step, the
divisor is the number of answer tokens that step 0 predicts. Rows whose greedy target token is outside the draft
vocabulary count like any other. Later steps have fewer rows, because no chain starts before the first token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eyas.data.features import FeatureBatch, FeatureSource
from eyas.drafters.config import TransformerConfig
from eyas.drafters.network import DraftNetwork
from eyas.errors import ConfigError
from eyas.train.loop.log import MicroBatchLoss
from eyas.train.loss.config import LossConfig
from eyas.train.loss.cpu_linear import fast_linears
from eyas.train.loss.draft_loss import (
    Sums,
    TokenLoss,
    TokenScores,
    context_metrics,
    draft_metrics,
    head_parameters,
    teacher_of,
)
from eyas.train.loss.ttt import ChainRows, PositionSampling, chain_rows, unrolled

if TYPE_CHECKING:
    from eyas.drafters.block.network import BlockNetwork


class LossOutput(NamedTuple):
    """The sums of one batch; a tuple, so that DDP and FSDP find the loss in the output of `forward`."""

    loss: Tensor  # [] weighted sum over tokens and steps
    weight: float  # the number of answer tokens that step 0 predicts
    metrics: Sums


class DraftLoss(nn.Module):
    """The network with its loss, which DDP or FSDP2 wraps; `head` is the target's."""

    def __init__(self, network: DraftNetwork, head: Callable[[Tensor], Tensor], vocab_size: int, config: LossConfig,
                 by_context: bool = False):  # fmt: skip
        """`by_context`: whether metrics are also reported by context."""
        super().__init__()
        self.network = network
        self._by_context = by_context
        self._head = head
        self._vocab_size = vocab_size
        self._config = config

    def forward(
        self,
        batch: FeatureBatch,
        noise: Tensor | None = None,
        key: tuple[int, ...] = (0,),
        starts: Tensor | None = None,
    ) -> LossOutput:
        """The sums over a batch; `noise` [B, S, A, Ht] is added to the taps that the network reads.

        `starts` [B] are the positions that the network sees for the rows' first tokens; None = the true ones. `key`
        seeds the draw of a block drafter's anchors and of P-EAGLE's chains.

        The feature loss compares with the taps without noise. The caller's autocast decides precision. Raises
        ConfigError if the feature loss doesn't fit the network.
        """
        taps = batch.taps.to(self.network.dtype)
        seen = taps if noise is None else taps + noise
        starts = batch.starts if starts is None else starts
        with fast_linears(taps.device):
            if self.network.config.is_block:
                from eyas.train.loss.block import block_loss, sampled_anchors

                network = cast("BlockNetwork", self.network)
                head = (self._head, self._vocab_size)
                anchors = sampled_anchors(batch.loss_mask, self._config.anchors, key)
                scores, rows = block_loss(network, *head, self._config, batch, seen, anchors, starts)
                return self._output(scores.loss, rows, scores, batch)
            ratio, least = self._config.down_sample_ratio, self._config.down_sample_ratio_min
            sampling = None if ratio is None else PositionSampling(ratio, least or 0.0, key)
            return self._run(batch, seen, taps, chain_rows(batch.loss_mask, self._config.unroll, sampling), starts)

    def _output(self, loss: Tensor, rows: ChainRows, scores: TokenScores, batch: FeatureBatch) -> LossOutput:
        metrics = draft_metrics(rows, scores.right, scores.overlap)
        if self._by_context:
            starts = torch.zeros_like(batch.tokens[:, 0]) if batch.starts is None else batch.starts
            metrics |= context_metrics(rows, scores, starts)
        return LossOutput(loss, metrics["accept_length"][1], metrics)

    def _run(
        self, batch: FeatureBatch, seen: Tensor, taps: Tensor, rows: ChainRows, starts: Tensor | None
    ) -> LossOutput:
        network = self.network
        config = self._config
        ids = self.network.target_ids
        steps = list(unrolled(network, batch.tokens, seen, rows, starts))
        token_loss = TokenLoss(
            teacher_of(batch, self._head, ids, self._vocab_size),
            network.logits,
            head_parameters(network),
            ids,
            self._vocab_size,
            config,
        )
        scores = token_loss([normed for _, normed in steps], rows)
        loss = scores.loss
        if config.feature != "none":
            loss = loss + self._feature_loss([fed for fed, _ in steps], taps, rows)
        return self._output(loss, rows, scores, batch)

    def _feature_loss(self, fed: list[Tensor], taps: Tensor, rows: ChainRows) -> Tensor:
        """The summed distance between the states fed back [., H] and the target's states that they approximate."""
        config = self._config
        width = fed[0].shape[-1]
        if taps.shape[2] != 1 or taps.shape[3] != width:
            raise ConfigError(
                f"feature loss {config.feature} compares states of width {width} with {taps.shape[2]} taps of width "
                f"{taps.shape[3]}: it needs a drafter that reads one tap of its own width; set loss.feature to none"
            )
        truth = taps.flatten(0, 2).index_select(0, rows.answers)  # [M, H]
        distance = F.smooth_l1_loss if config.feature == "smooth_l1" else F.mse_loss
        total = truth.new_zeros((), dtype=torch.float32)
        for step, states in enumerate(fed):
            at = rows.guesses[step]
            guess = states.index_select(0, at.clamp(min=0)).float()
            by_row = distance(guess, truth.float(), reduction="none").mean(-1)
            total = total + config.feature_weight * config.decay**step * (by_row * (at >= 0)).sum()
        return total


def _check_confidence(has_head: bool, weight: float | None) -> None:
    """Raise ConfigError for a weight without a head, and for a head that would never be trained."""
    if weight is not None and not has_head:
        raise ConfigError("loss.confidence_weight trains a confidence head, and this drafter has none: leave it out")
    if has_head and weight == 0:
        raise ConfigError(
            "loss.confidence_weight is 0, so the drafter's confidence head would never be trained: set "
            "drafter.shape.enable_confidence_head to false, or give it a weight"
        )


class DraftObjective:
    """The loop's objective for a drafter: trains `model` on the batches of `source`; `core` may be wrapped by DDP."""

    core: nn.Module

    def __init__(
        self,
        network: DraftNetwork,
        head: Callable[[Tensor], Tensor],
        vocab_size: int,
        source: FeatureSource,
        config: LossConfig,
        bf16: bool,
        seed: int = 0,
        by_context: bool = False,
    ) -> None:
        """`head` maps the target's final states [..., Ht] to its logits [..., V]; `seed` is for all random draws.

        `by_context`: also report metrics by the number of tokens before.

        Raises ConfigError if the number of steps isn't the number of guesses that the network makes in one pass, and
        for settings that apply to other networks only.
        """
        if network.config.guesses not in (None, config.unroll):
            raise ConfigError(
                f"loss.unroll is {config.unroll}, but the drafter makes {network.config.guesses} guesses in one pass: "
                "step j trains guess j, so the two must be equal"
            )
        if network.config.is_block and config.down_sample_ratio is not None:
            raise ConfigError("loss.down_sample_ratio thins out chains, and this drafter has blocks: set loss.anchors")
        if config.random_start is not None and not isinstance(network.config, TransformerConfig):
            raise ConfigError("loss.random_start draws positions, and this drafter has none: remove it")
        if not network.config.is_block and config.anchors is not None:
            raise ConfigError("loss.anchors limits the blocks of block drafters, and this one has none: leave it out")
        if config.base_weight and not (network.config.is_block and cast("BlockNetwork", network).corrects):
            raise ConfigError(
                "loss.base_weight is for drafters that correct their logits, and this one doesn't: leave it out"
            )
        _check_confidence(bool(getattr(network.config, "enable_confidence_head", False)), config.confidence_weight)
        self.model = network
        self.core = DraftLoss(network, head, vocab_size, config, by_context)
        self._source = source
        self._noise = config.noise
        self._bf16 = bf16
        self._seed = seed
        self._random_start = config.random_start

    def micro_batch_loss(self, number: int) -> MicroBatchLoss:
        """Loss and metrics of training batch `number`."""
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            batch = self._source(number)  # an online target keeps its own precision
        key = (self._seed, number)
        starts = None
        if self._random_start is not None:
            draw = np.random.default_rng(np.random.SeedSequence((*key, 1)))
            drawn = torch.from_numpy(draw.integers(0, self._random_start + 1, len(batch.tokens)))
            starts = drawn.to(batch.tokens.device)
        return self._run(batch, feature_noise(batch, self._noise, key) if self._noise else None, key, starts)

    def score(self, batch: FeatureBatch) -> MicroBatchLoss:
        """Loss and metrics of a given batch without feature noise; the caller's grad mode applies."""
        return self._run(batch, None, (0,))

    def _run(
        self, batch: FeatureBatch, noise: Tensor | None, key: tuple[int, ...], starts: Tensor | None = None
    ) -> MicroBatchLoss:
        with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=self._bf16):
            outcome: LossOutput = self.core(batch, noise, key, starts)
        return MicroBatchLoss(outcome.loss, outcome.weight, outcome.metrics)


def feature_noise(batch: FeatureBatch, scale: float, key: tuple[int, ...]) -> Tensor:
    """EAGLE-1's noise on features, [B, S, A, Ht]: (U - 0.5) * scale * 512 / T with U uniform in [0, 1).

    T is the number of a chat's tokens up to its last answer token. Noise prepares the drafter for reading its own
    inexact states in later steps. It depends only on `key`, so a resumed run gets the same noise.
    """
    device = batch.taps.device
    seed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1))
    generator = torch.Generator(device).manual_seed(seed)
    uniform = torch.rand(batch.taps.shape, generator=generator, device=device)
    positions = torch.arange(1, batch.loss_mask.shape[1] + 1, device=device) * batch.loss_mask
    lengths = positions.amax(1).clamp(min=1)[:, None, None, None]
    return (uniform - 0.5) * (scale * 512) / lengths
