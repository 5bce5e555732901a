"""The draft vocabulary: the target tokens that answers use most."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
import torch
from torch import Tensor

from eyas.data.tokenize import TokenRow
from eyas.errors import ConfigError


def count_answer_tokens(rows: Iterable[TokenRow], vocab_size: int) -> Tensor:
    """[V] how often each token occurs where the loss mask is on."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for row in rows:
        counts += np.bincount(row.tokens[row.loss_mask], minlength=vocab_size)
    return torch.from_numpy(counts)


def choose_draft_vocabulary(counts: Tensor, size: int, always: Collection[int]) -> Tensor:
    """[size] ids in rising order: `always` (what ends an answer), then the most frequent, ties by id.

    counts [V]. With fewer distinct tokens than `size`, the lowest unused ids fill it up.
    """
    vocab = len(counts)
    if not len(set(always)) <= size <= vocab:
        raise ConfigError(
            f"draft_vocab_size {size} must hold the {len(set(always))} tokens that end an answer "
            f"and can't exceed the target's vocabulary of {vocab}"
        )
    ranked = counts.clone()
    ranked[list(always)] = torch.iinfo(counts.dtype).max
    return ranked.argsort(descending=True, stable=True)[:size].sort().values
