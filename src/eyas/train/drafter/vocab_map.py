"""The draft vocabulary: the target tokens that answers use most."""

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


@dataclass(frozen=True)
class DraftVocabulary:
    """The tokens a drafter can guess, and how much of the answers they are."""

    ids: Tensor  # [Vd] target ids, rising
    covered: float  # share of answer tokens
    distinct: int  # different tokens among the answers

    @classmethod
    def chosen(cls, rows: Iterable[TokenRow], size: int, target: Target, tokenizer: Any) -> DraftVocabulary:
        """The `size` tokens that answers use most, and always those that end them."""
        counts = count_answer_tokens(rows, target.vocab_size)
        ids = choose_draft_vocabulary(counts, size, end_tokens(target, tokenizer))
        return cls(ids, float(counts[ids].sum() / counts.sum()), int(counts.count_nonzero()))

    def __str__(self) -> str:
        size = len(self.ids)
        spare = f"; {size - self.distinct:,} never occur" if size > self.distinct else ""
        return f"{size:,} tokens cover {self.covered:.2%} of answers ({self.distinct:,} different tokens{spare})"


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


def end_tokens(target: Target, tokenizer: Any) -> list[int]:
    """Every id that ends an answer."""
    found: set[int] = set()
    generation = getattr(target.model, "generation_config", None)
    for ids in (
        getattr(generation, "eos_token_id", None),
        target.config.eos_token_id,
        tokenizer.eos_token_id,
    ):
        found.update([ids] if isinstance(ids, int) else ids or [])
    return sorted(found)
