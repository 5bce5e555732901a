"""The corpus of a small language model: given chats, chats of the standard library, its source; tokenized and packed.

Its tokenizer is a small byte-level BPE, with a chat template that other engines load unchanged.

Chats of the given file are held out by id, those of the standard library by module, together with its source: a
function whose source is trained on would not be a held-out prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import Field
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from eyas.config import StrictModel
from eyas.data.chats.stdlib import LibraryModule, chats_of, library_modules
from eyas.data.tokens.tokenize import TokenRow, pack, tokenize_chat, tokenize_document
from eyas.errors import DataError
from eyas.files import writing_folder
from eyas.text.chats import Chat, held_out, read_chats

Source = Literal["chats", "library", "source"]
"""The given chats, chats made from the standard library, and its plain source."""

HELD_OUT_SHARE = 0.02
_WEIGHTS: dict[Source, float] = {"chats": 0.45, "library": 0.35, "source": 0.20}


DOCUMENT_END = "<|endoftext|>"
TURN_END = "<|end|>"
ROLES = ("system", "user", "assistant")
SPECIALS = (DOCUMENT_END, TURN_END, *(f"<|{role}|>" for role in ROLES))

# The split used by Qwen2: words with their leading space, digits one by one (arithmetic stays regular),
# runs of spaces whole (Python indentation), and blank lines with the line break they end in.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (Path(__file__).with_name("chat_template.jinja")).read_text(encoding="utf-8")


class CorpusConfig(StrictModel):
    """Where the chats come from, which are left out, and how the sources are mixed, in shares of tokens."""

    chats: Path  # JSON Lines of chats, e.g. grade-school maths
    vocab_size: int = Field(default=4096, ge=512)
    length: int = Field(default=1024, gt=1)
    held_out_share: float = Field(default=HELD_OUT_SHARE, ge=0, lt=1)
    longest_answer: int | None = Field(default=None, gt=0)  # tokens; chats with longer answers are not trained on
    seed: int = 0
    weights: dict[Source, float] = Field(default_factory=lambda: dict(_WEIGHTS))


@dataclass(frozen=True)
class Corpus:
    """A tokenizer, and text packed into N blocks of S tokens."""

    tokenizer: Any
    train: dict[Source, Tensor]  # name -> [N, S], for the sources that have a weight
    held_out: Tensor  # [N, S] held-out chats, alternately given ones and the library's


class CorpusSplit(NamedTuple):
    """The chats of a source: those to train on, and those held out."""

    train: list[Chat]
    held_out: list[Chat]


def split_chats(
    path: Path, held_out_share: float = HELD_OUT_SHARE, modules: Iterable[LibraryModule] | None = None
) -> dict[Source, CorpusSplit]:
    """Split the chats of the file `path` by id, and those of the standard library by module."""
    library = {chat.id: (chat, module.name) for module in modules or library_modules() for chat in chats_of(module)}
    keyed: dict[Source, Iterable[tuple[Chat, str]]] = {
        "chats": ((chat, chat.id) for chat in read_chats(path)),
        "library": library.values(),
    }
    splits = {source: CorpusSplit([], []) for source in keyed}
    for source, chats in keyed.items():
        for chat, key in chats:
            splits[source][held_out(key, held_out_share)].append(chat)
    return splits


def build_corpus(config: CorpusConfig, folder: Path, tokenizer_from: Path | None = None) -> Corpus:
    """Make the corpus with the tokenizer in `tokenizer_from`, or the one kept in `folder`, or a new one."""
    folder.mkdir(parents=True, exist_ok=True)
    modules = list(library_modules())
    splits = split_chats(config.chats, config.held_out_share, modules)
    tokenizer = _tokenizer(config, folder, tokenizer_from, splits, modules)
    train: dict[Source, Tensor] = {}
    unseen: list[Tensor] = []
    for name, split in splits.items():
        rows = [tokenize_chat(tokenizer, chat) for chat in split.train]
        longest = config.longest_answer
        train[name] = _blocks([row for row in rows if longest is None or row.loss_mask.sum() <= longest], config)
        unseen.append(_blocks([tokenize_chat(tokenizer, chat) for chat in split.held_out], config))
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
    splits: Mapping[Source, CorpusSplit],
    modules: Sequence[LibraryModule],
) -> Any:
    """The tokenizer of a trained model's folder, or one trained on the corpus and kept in `folder`."""
    path = tokenizer_from or folder / "tokenizer"
    if not path.exists():
        # Chats count twice and source once, so that merges favour what the model mostly generates.
        chats = [chat for split in splits.values() for chat in (*split.train, *split.held_out)]
        reading = [m.content or "" for chat in (*chats, *chats) for m in chat.messages]
        texts = [module.text for module in modules]
        with writing_folder(path) as made:
            train_tokenizer([*reading, *texts], config.vocab_size, 2048).save_pretrained(made)
    return AutoTokenizer.from_pretrained(path, trust_remote_code=False)


def _blocks(rows: list[TokenRow], config: CorpusConfig) -> Tensor:
    order = np.random.default_rng(config.seed).permutation(len(rows))
    return torch.from_numpy(pack([rows[i] for i in order], config.length))


class Mixture:
    """Blocks of several sources in fixed proportions; batch n is a pure function of n and the seed.

    Sources are interleaved by largest remainder, and each goes through shuffled epochs of its own.
    """

    def __init__(self, sources: Mapping[Source, Tensor], weights: Mapping[Source, float], seed: int) -> None:
        if sources.keys() != weights.keys():
            raise DataError(f"the weights name {sorted(weights)}, but the corpus holds {sorted(sources)}")
        self._names = sorted(sources)
        self._blocks = [sources[name] for name in self._names]  # each [N, S]
        total = sum(weights.values())
        self._shares = [weights[name] / total for name in self._names]
        self._seed = seed
        self._turns: list[tuple[int, int]] = []  # source of draw n, and how often it was drawn before
        self._drawn = [0] * len(self._names)

    def batch(self, number: int, size: int) -> Tensor:
        """The `number`th batch of `size` blocks: [size, S]."""
        return torch.stack([self._block(n) for n in range(number * size, (number + 1) * size)])

    def _block(self, n: int) -> Tensor:
        while len(self._turns) <= n:  # a cache: draw n doesn't depend on which draws were made before
            k = len(self._turns) + 1
            source = max(range(len(self._names)), key=lambda s: self._shares[s] * k - self._drawn[s])
            self._turns.append((source, self._drawn[source]))
            self._drawn[source] += 1
        source, index = self._turns[n]
        epoch, offset = divmod(index, len(self._blocks[source]))
        order = np.random.default_rng([self._seed, source, epoch]).permutation(len(self._blocks[source]))
        return self._blocks[source][int(order[offset])]


def train_tokenizer(texts: Iterable[str], vocab_size: int, context: int) -> PreTrainedTokenizerFast:
    """A BPE tokenizer with `vocab_size` entries, special tokens first; fewer if the texts don't have enough merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=DOCUMENT_END,
        additional_special_tokens=[f"<|{role}|>" for role in ROLES],
        chat_template=CHAT_TEMPLATE,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )
