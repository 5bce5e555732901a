"""The demo target's corpus: maths chats, standard-library chats and plain source, tokenized and packed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from transformers import AutoTokenizer

from eyas.config import StrictModel
from eyas.data.chats.stdlib import chats_of, sources
from eyas.data.tokens.tokenize import TokenRow, pack, tokenize_chat, tokenize_document
from eyas.errors import DataError
from eyas.text.chats import Chat, held_out, read_chats, write_chats
from eyas.train.lm.tokenizer import DOCUMENT_END, train_tokenizer


class CorpusConfig(StrictModel):
    """Where the chats come from and how the three sources are mixed (by tokens)."""

    chats: Path  # JSON Lines of chats, e.g. grade-school maths
    vocab_size: int = Field(default=4096, ge=512)
    length: int = Field(default=1024, gt=1)
    held_out_share: float = Field(default=0.02, ge=0, lt=1)
    seed: int = 0
    weights: dict[str, float] = Field(default_factory=lambda: {"chats": 0.45, "library": 0.35, "source": 0.20})


@dataclass(frozen=True)
class Corpus:
    """Packed blocks. Legend: N blocks of length S."""

    tokenizer: Any
    train: dict[str, Tensor]  # name -> [N, S]
    held_out: Tensor  # [N, S] held-out chats, sources alternating


def build_corpus(config: CorpusConfig, folder: Path, tokenizer_from: Path | None = None) -> Corpus:
    """Cut, tokenize, pack; the tokenizer is that of `tokenizer_from`, or in `folder`, or a new one."""
    folder.mkdir(parents=True, exist_ok=True)
    modules = list(sources())
    library = list({chat.id: chat for module in modules for chat in chats_of(module)}.values())
    chats = list(read_chats(config.chats))
    write_chats(folder / "library_chats.jsonl", library)
    texts = [module.text for module in modules]
    place = tokenizer_from or folder / "tokenizer"
    if not place.exists():
        # Twice the chats, once the source: the merges should serve what is asked most.
        reading = [m.content or "" for chat in (*chats, *chats, *library, *library) for m in chat.messages]
        train_tokenizer([*reading, *texts], config.vocab_size, 2048).save_pretrained(place)
    tokenizer = AutoTokenizer.from_pretrained(place)
    end_id = tokenizer.convert_tokens_to_ids(DOCUMENT_END)
    train: dict[str, Tensor] = {}
    unseen: list[Tensor] = []
    for name, group in (("chats", chats), ("library", library)):
        kept = [chat for chat in group if not held_out(chat.id, config.held_out_share)]
        train[name] = _pack(tokenizer, kept, config)
        unseen.append(_pack(tokenizer, [c for c in group if held_out(c.id, config.held_out_share)], config))
    documents = [tokenize_document(tokenizer, text, end_id) for text in texts]
    train["source"] = _blocks(documents, config)
    count = min(len(blocks) for blocks in unseen)
    return Corpus(tokenizer, train, torch.stack([b[:count] for b in unseen], dim=1).flatten(0, 1))


def _pack(tokenizer: Any, chats: Iterable[Chat], config: CorpusConfig) -> Tensor:
    return _blocks([tokenize_chat(tokenizer, chat) for chat in chats], config)


def _blocks(rows: list[TokenRow], config: CorpusConfig) -> Tensor:
    order = np.random.default_rng(config.seed).permutation(len(rows))
    return torch.from_numpy(pack([rows[i] for i in order], config.length))


# Blocks of several sources in fixed proportions; batch n is a pure function of n and the seed.


class Mixture:
    """Sources take turns by largest remainder; each goes through its own shuffled epochs."""

    def __init__(self, sources: Mapping[str, Tensor], weights: Mapping[str, float], seed: int) -> None:
        if sources.keys() != weights.keys():
            raise DataError(f"weights name {sorted(weights)}, the corpus holds {sorted(sources)}")
        self._names = sorted(sources)
        self._blocks = [sources[name] for name in self._names]  # each [N, S]
        total = sum(weights.values())
        self._shares = [weights[name] / total for name in self._names]
        self._seed = seed
        self._turns: list[tuple[int, int]] = []  # of draw n: source, and how often it was drawn before
        self._drawn = [0] * len(self._names)

    def batch(self, number: int, size: int) -> Tensor:
        """The `number`th batch of `size` blocks: [size, S]."""
        return torch.stack([self._block(n) for n in range(number * size, (number + 1) * size)])

    def _block(self, n: int) -> Tensor:
        while len(self._turns) <= n:  # a cache of a pure sequence, not state: draw n never depends on who asked
            k = len(self._turns) + 1
            source = max(range(len(self._names)), key=lambda s: self._shares[s] * k - self._drawn[s])
            self._turns.append((source, self._drawn[source]))
            self._drawn[source] += 1
        source, index = self._turns[n]
        epoch, offset = divmod(index, len(self._blocks[source]))
        order = np.random.default_rng([self._seed, source, epoch]).permutation(len(self._blocks[source]))
        return self._blocks[source][int(order[offset])]
