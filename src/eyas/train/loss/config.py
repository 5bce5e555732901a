"""The section `loss` of a recipe: token loss, feature loss, number of steps, and their weights."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from eyas.config import StrictModel

TokenLoss = Literal["ce", "kl", "lk", "l1"]
FeatureLoss = Literal["none", "smooth_l1", "mse"]


class LossConfig(StrictModel):
    """loss = sum over steps j of decay^j * (token_weight * token + feature_weight * feature) / answer tokens.

    Token losses compare q, the drafter's distribution over the draft vocabulary, with the target's:

    - `ce`: soft cross entropy with p', the target's softmax over the draft vocabulary alone; `kl` is `ce` minus the
      entropy of p', so that a perfect drafter scores 0.
    - `lk`: optimizes acceptance (LK losses). p is the target's softmax over the *full* vocabulary, and
      alpha = sum over the draft vocabulary of min(p, q) is the probability that a sampled guess is accepted; tokens
      outside the draft vocabulary count as rejected. The loss is -log alpha or, with `kl_decay` set,
      w * KL + (1 - w) * (1 - alpha), where w = exp(-kl_decay * mean alpha) of the step in the batch, so that KL
      dominates while the drafter is bad.

    - `l1` (DSpark): 0.1 * ce + 0.9 * the sum of |p - q|, which is 2 - 2 alpha.

    The feature loss compares the state that the drafter feeds back with the target's state at the next position,
    averaged over the width.
    """

    token: TokenLoss = "ce"
    token_weight: float = Field(default=1.0, ge=0)
    kl_decay: float | None = Field(default=None, ge=0)
    feature: FeatureLoss = "none"
    feature_weight: float = Field(default=0.0, ge=0)
    unroll: int = Field(default=7, ge=1)  # steps of the training-time test
    decay: float = Field(default=0.8, gt=0, le=1)  # weight of a step relative to the one before
    dpace: float | None = Field(default=None, ge=0, le=1)
    """Alpha of D-PACE's weights (arXiv 2605.18810): a guess's token loss also weighs the number of guesses from it on
    that are likely to be right. 1 = all of them; None = no such weights. The paper's `decay` is 1."""
    noise: float = Field(default=0.0, ge=0)
    """Uniform noise (U - 0.5) * noise * 512 / T on the features of a row of T tokens (EAGLE-1: 0.2)."""

    down_sample_ratio: float | None = Field(default=None, gt=0, le=1)
    """r of P-EAGLE's position sampling: step j is trained on about r^j of the chains, drawn again for every batch;
    None = all. A chain that is left out of a step is left out of all later ones."""
    down_sample_ratio_min: float | None = Field(default=None, gt=0, le=1)
    """Minimum share of the chains that a step is trained on; None = no minimum."""
    anchors: int | None = Field(default=None, ge=1)
    """Maximum blocks per chat that block drafters are trained on, drawn again for every batch; None = all."""
    confidence_weight: float | None = Field(default=None, ge=0)
    """Weight of the binary cross entropy that trains a confidence head, if the drafter has one; None = 1."""

    base_weight: float | None = Field(default=None, ge=0)
    """Weight of an additional token loss on a block drafter's logits before correction; None = 0."""

    random_start: int | None = Field(default=None, ge=1)
    """Training rows begin at a position drawn from 0 to this, again for every batch, so that the drafter learns
    positions beyond the rows' length; None = at their true positions."""

    @model_validator(mode="after")
    def _nothing_is_ignored(self) -> LossConfig:
        if self.kl_decay is not None and self.token != "lk":
            raise ValueError(f"kl_decay belongs to the token loss lk, not {self.token}: remove it")
        if self.dpace is not None and self.token_weight == 0:
            raise ValueError("dpace weighs the token loss, and token_weight is 0: remove it")
        if self.down_sample_ratio is None and self.down_sample_ratio_min is not None:
            raise ValueError("down_sample_ratio_min limits down_sample_ratio, which isn't set: set both or neither")
        if (self.feature == "none") != (self.feature_weight == 0):
            raise ValueError("feature_weight must be above 0 if a feature loss is chosen, and 0 otherwise")
        if self.token_weight == 0 and self.feature_weight == 0:
            raise ValueError("token_weight and feature_weight are both 0: nothing would be trained")
        return self
