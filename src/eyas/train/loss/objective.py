"""The objective of all drafter kinds: the training-time test against the target's own distribution.

The loss mask belongs to the token that is predicted, so the first token of an answer is trained. The divisor is the
number of answer tokens that step 0 predicts, for every step. Rows whose greedy target token is outside the draft
vocabulary count like any other. Later steps have fewer rows, because no chain starts before the first token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eyas.data.features import FeatureBatch, FeatureSource
from eyas.drafters.block.network import BlockNetwork
from eyas.drafters.network import DraftNetwork
from eyas.errors import ConfigError
from eyas.train.loop.metrics import MicroBatchLoss
from eyas.train.loss.block import block_guesses, sampled_anchors
from eyas.train.loss.config import LossConfig
from eyas.train.loss.cpu_linear import fast_linears
from eyas.train.loss.draft_loss import Sums, TokenLoss, TokenScores, draft_metrics
from eyas.train.loss.token_loss import teacher_of
from eyas.train.loss.ttt import ChainRows, PositionSampling, chain_rows, unrolled


class LossOutput(NamedTuple):
    """The sums of one batch; a tuple, so that DDP and FSDP find the loss in the output of `forward`."""

    loss: Tensor  # [] weighted sum over tokens and steps
    weight: float  # the number of answer tokens that step 0 predicts
    metrics: Sums


class DraftLoss(nn.Module):
    """The network with its loss, which DDP or FSDP2 wraps; `head` is the target's."""

    def __init__(self, network: DraftNetwork, head: Callable[[Tensor], Tensor], vocab_size: int, config: LossConfig):
        super().__init__()
        self.network = network
        self._head, self._vocab_size, self._config = head, vocab_size, config

    def forward(self, batch: FeatureBatch, noise: Tensor | None = None, key: tuple[int, ...] = (0,)) -> LossOutput:
        """The sums over a batch; `noise` [B, S, A, Ht] is added to the taps that the network reads.

        By `key` a block drafter draws its anchors, and P-EAGLE the chains of each step.

        The feature loss compares with the taps themselves. The caller's autocast decides precision. Raises ConfigError
        if the feature loss doesn't fit the network.
        """
        taps = batch.taps.to(self.network.dtype)
        seen = taps if noise is None else taps + noise
        with fast_linears(taps.device):
            if isinstance(self.network, BlockNetwork):
                return self._run_blocks(self.network, batch, seen, key)
            ratio, least = self._config.down_sample_ratio, self._config.down_sample_ratio_min
            sampling = None if ratio is None else PositionSampling(ratio, least or 0.0, key)
            return self._run(batch, seen, taps, chain_rows(batch.loss_mask, self._config.unroll, sampling))

    def _run_blocks(self, network: BlockNetwork, batch: FeatureBatch, seen: Tensor, key: tuple[int, ...]) -> LossOutput:
        config, ids = self._config, network.target_ids
        anchors = sampled_anchors(batch.loss_mask, config.anchors, key)
        guesses = block_guesses(network, batch.tokens, seen, batch.loss_mask, anchors, config.unroll)
        token_loss = TokenLoss(
            teacher_of(batch, self._head, ids, self._vocab_size), network.joined_logits, network.joined_parameters(),
            ids, self._vocab_size, config,
        )  # fmt: skip
        joined = network.joined(guesses.states, guesses.before)
        scores = token_loss(list(joined.unbind(1)), guesses.rows)
        loss = scores.loss
        confidence = network.confidence(guesses.states, guesses.before)  # [n, K], None without such a head
        weight = 1.0 if config.confidence_weight is None else config.confidence_weight
        if confidence is not None and weight:
            loss = loss + weight * _confidence_loss(confidence, scores, guesses.rows, config.decay)
        metrics = draft_metrics(guesses.rows, scores.right, scores.overlap)
        return LossOutput(loss, metrics["accept_length"][1], metrics)

    def _run(self, batch: FeatureBatch, seen: Tensor, taps: Tensor, rows: ChainRows) -> LossOutput:
        network, config, ids = self.network, self._config, self.network.target_ids
        steps = list(unrolled(network, batch.tokens, seen, rows))
        token_loss = TokenLoss(
            teacher_of(batch, self._head, ids, self._vocab_size), network.logits, head_parameters(network),
            ids, self._vocab_size, config,
        )  # fmt: skip
        scores = token_loss([normed for _, normed in steps], rows)
        loss = scores.loss
        if config.feature != "none":
            loss = loss + self._feature_loss([fed for fed, _ in steps], taps, rows)
        metrics = draft_metrics(rows, scores.right, scores.overlap)
        return LossOutput(loss, metrics["accept_length"][1], metrics)

    def _feature_loss(self, fed: list[Tensor], taps: Tensor, rows: ChainRows) -> Tensor:
        """The summed distance of the states fed back [., H] from the target's states that they approximate."""
        config, width = self._config, fed[0].shape[-1]
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


def _confidence_loss(confidence: Tensor, scores: TokenScores, rows: ChainRows, decay: float) -> Tensor:
    """Binary cross entropy of the confidences [n, K] with the rates at which sampled guesses are accepted."""
    at = rows.guesses.T  # [M, K]
    said = confidence.gather(0, at.clamp(min=0))
    said = said.to(torch.promote_types(said.dtype, torch.float32))
    found = F.binary_cross_entropy_with_logits(said, scores.overlap.clamp(0, 1), reduction="none")
    weights = decay ** torch.arange(at.shape[1], device=at.device) * (at >= 0)
    return (found * weights).sum()


def head_parameters(network: DraftNetwork) -> tuple[nn.Parameter, ...]:
    """The trained parameters of `network.logits`; empty if the head is the target's."""
    return tuple(p for head in network.heads for p in head.parameters() if p.requires_grad)


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
    ) -> None:
        """`head` maps the target's final states [..., Ht] to its logits [..., V]; `seed` is for feature noise.

        Raises ConfigError for more steps or fewer than a network makes guesses in one pass, and for settings of other
        networks.
        """
        if network.config.guesses not in (None, config.unroll):
            raise ConfigError(
                f"loss.unroll is {config.unroll}, but the drafter makes {network.config.guesses} guesses in one pass: "
                "step j trains guess j, so the two must be equal"
            )
        if isinstance(network, BlockNetwork) and config.down_sample_ratio is not None:
            raise ConfigError("loss.down_sample_ratio thins out chains, and this drafter has blocks: set loss.anchors")
        self.model = network
        self.core = DraftLoss(network, head, vocab_size, config)
        self._source, self._noise, self._bf16, self._seed = source, config.noise, bf16, seed

    def micro_batch_loss(self, number: int) -> MicroBatchLoss:
        """Loss and metrics of training batch `number`."""
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            batch = self._source(number)  # an online target keeps its own precision
        key = (self._seed, number)
        return self._run(batch, feature_noise(batch, self._noise, key) if self._noise else None, key)

    def score(self, batch: FeatureBatch) -> MicroBatchLoss:
        """Loss and metrics of a given batch without feature noise; the caller's grad mode applies."""
        return self._run(batch, None, (0,))

    def _run(self, batch: FeatureBatch, noise: Tensor | None, key: tuple[int, ...]) -> MicroBatchLoss:
        with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=self._bf16):
            outcome: LossOutput = self.core(batch, noise, key)
        return MicroBatchLoss(outcome.loss, outcome.weight, outcome.metrics)


def feature_noise(batch: FeatureBatch, scale: float, key: tuple[int, ...]) -> Tensor:
    """EAGLE-1's noise on features, [B, S, A, Ht]: (U - 0.5) * scale * 512 / T with U uniform in [0, 1).

    T is the number of a chat's tokens up to its last answer token. Noise makes up for the fact that the drafter's own
    states, which it reads later, aren't exact. It depends on `key` alone, so a resumed run has the same.
    """
    device = batch.taps.device
    seed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1))
    generator = torch.Generator(device).manual_seed(seed)
    uniform = torch.rand(batch.taps.shape, generator=generator, device=device)
    positions = torch.arange(1, batch.loss_mask.shape[1] + 1, device=device) * batch.loss_mask
    lengths = positions.amax(1).clamp(min=1)[:, None, None, None]
    return (uniform - 0.5) * (scale * 512) / lengths
