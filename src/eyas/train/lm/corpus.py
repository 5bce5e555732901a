"""The demo target's corpus: maths chats, standard-library chats and plain source, tokenized and packed.

Held out are chats of the given file by their ids, and of the standard library whole modules, with their source: a
function whose source was read in training would be no held-out prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from transformers import AutoTokenizer

from eyas.config import StrictModel
from eyas.data.chats.stdlib import LibraryModule, chats_of, library_modules
from eyas.data.tokens.tokenize import TokenRow, pack, tokenize_chat, tokenize_document
from eyas.errors import DataError
from eyas.files import writing_folder
from eyas.text.chats import Chat, held_out, read_chats, write_chats
from eyas.train.lm.tokenizer import DOCUMENT_END, train_tokenizer

Source = Literal["chats", "library", "source"]
"""The sources of text: the given chats, chats cut from the standard library, and its plain source."""


_WEIGHTS: dict[Source, float] = {"chats": 0.45, "library": 0.35, "source": 0.20}


class CorpusConfig(StrictModel):
    """Where the chats come from, which are left out, and how the sources are mixed (by tokens)."""

    chats: Path  # JSON Lines of chats, e.g. grade-school maths
    vocab_size: int = Field(default=4096, ge=512)
    length: int = Field(default=1024, gt=1)
    held_out_share: float = Field(default=0.02, ge=0, lt=1)
    longest_answer: int | None = Field(default=None, gt=0)  # tokens; chats with longer answers are not trained on
    seed: int = 0
    weights: dict[Source, float] = Field(default_factory=lambda: dict(_WEIGHTS))


@dataclass(frozen=True)
class Corpus:
    """Packed blocks. Legend: N blocks of length S."""

    tokenizer: Any
    train: dict[Source, Tensor]  # name -> [N, S], for the sources that have a weight
    held_out: Tensor  # [N, S] held-out chats, given ones and the library's alternating


def build_corpus(config: CorpusConfig, folder: Path, tokenizer_from: Path | None = None) -> Corpus:
    """Cut, tokenize, pack; the tokenizer is that of `tokenizer_from`, or in `folder`, or a new one."""
    folder.mkdir(parents=True, exist_ok=True)
    modules = list(library_modules())
    library = {chat.id: (chat, module.name) for module in modules for chat in chats_of(module)}
    chats = list(read_chats(config.chats))
    write_chats(folder / "library_chats.jsonl", [chat for chat, _ in library.values()])
    tokenizer = _tokenizer(config, folder, tokenizer_from, chats, [chat for chat, _ in library.values()], modules)

    groups: dict[Source, list[tuple[Chat, str]]] = {
        "chats": [(chat, chat.id) for chat in chats],  # each with the name that decides whether it is held out
        "library": list(library.values()),
    }
    train: dict[Source, Tensor] = {}
    unseen: list[Tensor] = []
    for name, group in groups.items():
        kept, left_out = [], []
        for chat, key in group:
            row = tokenize_chat(tokenizer, chat)
            if held_out(key, config.held_out_share):
                left_out.append(row)
            elif config.longest_answer is None or row.loss_mask.sum() <= config.longest_answer:
                kept.append(row)
        train[name] = _blocks(kept, config)
        unseen.append(_blocks(left_out, config))
    end_id = tokenizer.convert_tokens_to_ids(DOCUMENT_END)
    texts = [module.text for module in modules if not held_out(module.name, config.held_out_share)]
    train["source"] = _blocks([tokenize_document(tokenizer, text, end_id) for text in texts], config)
    count = min(len(blocks) for blocks in unseen)
    return Corpus(
        tokenizer,
        {name: blocks for name, blocks in train.items() if name in config.weights},
        torch.stack([blocks[:count] for blocks in unseen], dim=1).flatten(0, 1),
    )


def _tokenizer(
    config: CorpusConfig,
    folder: Path,
    tokenizer_from: Path | None,
    chats: Sequence[Chat],
    library: Sequence[Chat],
    modules: Sequence[LibraryModule],
) -> Any:
    """The tokenizer of a trained model's folder, or one trained on the corpus and kept in `folder`."""
    path = tokenizer_from or folder / "tokenizer"
    if not path.exists():
        # Twice the chats, once the source: the merges should serve what is asked most.
        reading = [m.content or "" for chat in (*chats, *chats, *library, *library) for m in chat.messages]
        texts = [module.text for module in modules]
        with writing_folder(path) as made:
            train_tokenizer([*reading, *texts], config.vocab_size, 2048).save_pretrained(made)
    return AutoTokenizer.from_pretrained(path)


def _blocks(rows: list[TokenRow], config: CorpusConfig) -> Tensor:
    order = np.random.default_rng(config.seed).permutation(len(rows))
    return torch.from_numpy(pack([rows[i] for i in order], config.length))


class Mixture:
    """Blocks of several sources in fixed proportions; batch n is a pure function of n and the seed.

    Sources take turns by largest remainder; each goes through its own shuffled epochs.
    """

    def __init__(self, sources: Mapping[Source, Tensor], weights: Mapping[Source, float], seed: int) -> None:
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
