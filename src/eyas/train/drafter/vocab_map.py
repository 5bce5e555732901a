"""The draft vocabulary: the tokens of the target that are most frequent in answers."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eyas.data.tokens.tokenize import TokenRow
from eyas.errors import ConfigError
from eyas.targets import Target
from eyas.targets.tokenizers import eos_token_ids, turn_end_ids


@dataclass(frozen=True)
class DraftVocabulary:
    """The tokens that a drafter can draft, and the share of the answers that they cover."""

    ids: Tensor  # [Vd] target ids, ascending
    covered: float  # share of all answer tokens
    distinct: int  # different tokens in the answers

    @classmethod
    def chosen(cls, rows: Iterable[TokenRow], size: int, target: Target, tokenizer: Any) -> DraftVocabulary:
        """The `size` most frequent tokens of the answers, always with those that end an answer."""
        counts = count_answer_tokens(rows, target.vocab_size)
        stop_ids = {*eos_token_ids(target.model), *turn_end_ids(tokenizer)}
        ids = choose_draft_vocabulary(counts, size, stop_ids)
        return cls(ids, float(counts[ids].sum() / counts.sum()), int(counts.count_nonzero()))

    def __str__(self) -> str:
        size = len(self.ids)
        spare = f"; {size - self.distinct:,} never occur" if size > self.distinct else ""
        return f"{size:,} tokens cover {self.covered:.2%} of answers ({self.distinct:,} different tokens{spare})"


def count_answer_tokens(rows: Iterable[TokenRow], vocab_size: int) -> Tensor:
    """The number of times that each token is an answer token, [V]."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for row in rows:
        counts += np.bincount(row.tokens[row.loss_mask], minlength=vocab_size)
    return torch.from_numpy(counts)


def choose_draft_vocabulary(counts: Tensor, size: int, always: Collection[int]) -> Tensor:
    """The draft ids [size], ascending: `always` (the end tokens) and the most frequent of counts [V], ties by id.

    If fewer than `size` tokens occur, the lowest unused ids are added. Raises ConfigError for a size that is too small
    for `always` or exceeds V.
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
