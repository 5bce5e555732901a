"""Noise on the features a drafter reads, as EAGLE-1 trains with: its own states, later, won't be exact either."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from eyas.data.features import FeatureBatch


def feature_noise(batch: FeatureBatch, scale: float, key: tuple[int, ...]) -> Tensor:
    """[B, S, A, Ht] of (U - 0.5) * scale * 512 / T, U uniform in [0, 1), T a chat's tokens up to its last answer token.

    The same `key` gives the same noise, whatever was drawn before, so a resumed run goes on as if never stopped.
    """
    device = batch.taps.device
    seed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> np.uint64(1))
    generator = torch.Generator(device).manual_seed(seed)
    uniform = torch.rand(batch.taps.shape, generator=generator, device=device)
    ends = torch.arange(1, batch.loss_mask.shape[1] + 1, device=device) * batch.loss_mask
    lengths = ends.amax(1).clamp(min=1)[:, None, None, None]
    return (uniform - 0.5) * (scale * 512) / lengths
