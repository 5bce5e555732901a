"""The data of a drafter's run: token rows from a store or from chats, and the target's features for each batch.

Whatever the source, the same chats give the same rows, the same batches and, up to rounding, the same features.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from eyas.data.capture.shard import read_rows
from eyas.data.chats.folder import SPLITS
from eyas.data.features import FeatureSource, OnlineSource
from eyas.data.store import FeatureStore, HybridSource, StoreSource
from eyas.data.tokens.batches import ChatBatches
from eyas.data.tokens.tokenize import TokenRow
from eyas.errors import ConfigError, DataError
from eyas.targets import Target
from eyas.targets.fingerprint import fingerprint
from eyas.targets.passes import EmbeddingAndHead
from eyas.targets.tokenizers import eos_token_ids, turn_end_ids


@dataclass(frozen=True)
class DraftVocabulary:
    """The tokens that a drafter can draft, and the share of the answers that they cover."""

    ids: Tensor  # [Vd] target ids, ascending
    covered: float  # share of all answer tokens
    distinct: int  # different tokens in the answers

    @classmethod
    def chosen(
        cls, rows: Iterable[TokenRow], size: int, target: EmbeddingAndHead, tokenizer: Any, known: Tensor | None = None
    ) -> DraftVocabulary:
        """Choose the `size` most frequent tokens of the answers, always including those that end an answer.

        `known` ids are the vocabulary of the warm-start drafter. Each counts as seen `KNOWN` times more, so that little
        data displaces only known tokens that it hardly contains.
        """
        counts = count_answer_tokens(rows, target.vocab_size)
        stop_ids = {*eos_token_ids(target.model), *turn_end_ids(tokenizer)}
        seen = counts.clone()
        if known is not None:
            seen[known.cpu()] += KNOWN
        ids = choose_draft_vocabulary(seen, size, stop_ids)
        return cls(ids, float(counts[ids].sum() / counts.sum()), int(counts.count_nonzero()))

    def __str__(self) -> str:
        size = len(self.ids)
        spare = f"; {size - self.distinct:,} never occur" if size > self.distinct else ""
        return f"{size:,} tokens cover {self.covered:.2%} of answers ({self.distinct:,} different tokens{spare})"


KNOWN = 4
"""Occurrences credited in advance to each token of the warm-start drafter's vocabulary."""


def count_answer_tokens(rows: Iterable[TokenRow], vocab_size: int) -> Tensor:
    """The number of times that each token is an answer token, [V]."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for row in rows:
        counts += np.bincount(row.tokens[row.loss_mask], minlength=vocab_size)
    return torch.from_numpy(counts)


def choose_draft_vocabulary(counts: Tensor, size: int, always: Collection[int]) -> Tensor:
    """The draft ids [size], ascending: `always` (the end tokens) and the most frequent of counts [V]; ties go by id.

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


SourceKind = Literal["offline", "online", "hybrid"]

HELD_OUT_SHARE = 0.02
"""Share of a single chat file that is held out for validation, unless the recipe gives one."""


class CutOff(NamedTuple):
    """The training data that a run loses because chats are cut to a maximum length."""

    chats: int
    """Training chats longer than that."""
    tokens: int
    """Their tokens beyond that length."""


@dataclass(frozen=True)
class TrainingData:
    """Rows of both splits, and `features(batches, taps)`, which makes the source of their features."""

    rows: dict[str, list[TokenRow]]
    left_out: tuple[str, ...]
    """One line for each chat that couldn't be used."""
    cut: CutOff
    served_taps: tuple[int, ...]
    """The taps (aux hidden states) that the store holds; empty without a store."""
    fingerprint: str
    """The fingerprint of the target's weights."""
    features: Callable[[ChatBatches, tuple[int, ...]], FeatureSource]

    def __post_init__(self) -> None:
        for name in SPLITS:
            if not self.rows.get(name):
                raise DataError(f"there is no chat for {name}: add chats, or change the held-out share")

    def beginning(self, share: float) -> TrainingData:
        """The same data with only the first `share` of the training rows, at least one."""
        rows = self.rows["train"]
        return replace(self, rows=self.rows | {"train": rows[: max(1, round(share * len(rows)))]})


def open_data(
    kind: SourceKind,
    store: Path | None,
    chats: Path | None,
    share: float | None,
    longest: int,
    target: EmbeddingAndHead,
    tokenizer: Any,
) -> TrainingData:
    """Open the store or chats that a recipe names; chats are cut to `longest` tokens.

    Raises DataError or StoreError if data is missing or was made for another target.
    """
    opened = None if store is None else FeatureStore.open(store)
    if opened is not None:
        opened.check_target(target)

    def features(batches: ChatBatches, taps: tuple[int, ...]) -> FeatureSource:
        if opened is not None and kind != "hybrid":
            return StoreSource(opened, batches, taps, target.device)
        assert isinstance(target, Target), "computing states needs a target with all layers loaded"
        return OnlineSource(target, batches, taps) if opened is None else HybridSource(opened, target, batches, taps)

    served = () if opened is None else opened.served_taps
    if chats is None:
        if opened is None:
            raise DataError("the recipe names neither a store nor chats")
        rows = {name: opened.rows(name) for name in SPLITS}
        beyond = [len(row.tokens) - longest for row in rows["train"] if len(row.tokens) > longest]
        cut = CutOff(len(beyond), sum(beyond))
        return TrainingData(rows, (), cut, served, opened.settings.target.fingerprint, features)
    if chats.is_dir() and share is not None:
        raise ConfigError(f"{chats} is a chat folder, which has a validation split of its own: remove held_out_share")
    found = read_rows(tokenizer, chats, HELD_OUT_SHARE if share is None else share, longest, target.vocab_size)
    cut = CutOff(found.cut["train"], found.lost["train"])
    return TrainingData(found.rows, tuple(found.reasons), cut, served, fingerprint(target.model), features)
