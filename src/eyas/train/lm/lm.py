"""The causal language model objective, and the training of a small model from scratch.

A shallow model can be grown in depth (`grow_depth`): training a shallow model first and growing it costs a fraction of
training the deep one throughout. The reverse (`cut_depth`) is the starting point of a small model that drafts for a
deep one.

The corpus consists of the given chats, chats made from Python's standard library, and the library's source, tokenized
and packed. Its tokenizer is a small byte-level BPE, with a chat template that other engines load unchanged.

Given chats are held out by id. Chats from the standard library are held out by module, together with the module's
source: a function whose source is trained on would not be a held-out prompt.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from eyas.config import StrictModel
from eyas.data.chats.stdlib import LibraryModule, chats_of, library_modules
from eyas.data.tokens.tokenize import TokenRow, pack, tokenize_chat, tokenize_document
from eyas.errors import ConfigError, DataError
from eyas.files import writing_folder
from eyas.text.chats import Chat, held_out, read_chats
from eyas.train.loop.checkpoint import TrainingProgress
from eyas.train.loop.distributed import join_processes
from eyas.train.loop.log import Advance, MicroBatchLoss
from eyas.train.loop.loop import LoopConfig, ResolvedLoop, resolved, train

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

    chats: Path  # JSON Lines of chats, e.g. grade-school math
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
        # Chats count twice and source once, so that merges favor what the model mostly generates.
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
    """A BPE tokenizer with `vocab_size` entries, special tokens first; fewer if the texts don't yield enough merges."""
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


class LmModelConfig(StrictModel):
    """The sizes of a Llama model; a head is hidden_size / heads wide."""

    hidden_size: int = 256
    layers: int = 32
    heads: int = 4
    kv_heads: int = 2
    intermediate_size: int = 512
    context: int = 2048


class RepetitionConfig(StrictModel):
    """Training against answers that loop: DITTO (Xu et al. 2022, arXiv 2206.02369)."""

    share: float = Field(default=0.5, gt=0, lt=1)  # share of blocks that end in repetitions of one span
    decay: float = Field(default=0.5, ge=0, lt=1)  # target ratio of a token's probability to the same one span earlier


class LmConfig(StrictModel):
    """The section `lm` of a recipe: a target trained from scratch."""

    output: Path
    device: str = "cpu"
    batch: int = 8  # blocks in a micro-batch
    short_length: int = 512  # tokens that blocks are cut to at first: cheaper attention, more varied steps
    short_share: float = Field(default=0.0, ge=0, le=1)  # share of the run with short blocks
    validation_blocks: int = 16
    repetition: RepetitionConfig | None = None
    model: LmModelConfig = LmModelConfig()
    start_from: Path | None = None  # a trained folder, grown or cut to `model.layers`
    corpus: CorpusConfig
    loop: LoopConfig

    @model_validator(mode="after")
    def _counts_steps(self) -> LmConfig:
        if self.loop.steps is None:
            raise ValueError("a mixture of sources has no epochs: give loop.steps")
        return self


def build_lm(config: LmModelConfig, vocab: int, eos: int, pad: int) -> LlamaForCausalLM:
    """A Llama with fresh weights.

    Output projections are scaled down with the number of layers, so that the initial size of the residual stream
    doesn't depend on depth.
    """
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab,
            hidden_size=config.hidden_size,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            intermediate_size=config.intermediate_size,
            max_position_embeddings=config.context,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=eos,
            pad_token_id=pad,
            initializer_range=0.02,
        )
    )
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "embed" not in name:
                nn.init.normal_(weight, std=1 / math.sqrt(weight.shape[1]))
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.div_(math.sqrt(2 * config.layers))
    return model


class LmObjective:
    """Next-token cross entropy over every position of packed blocks, and a loss against repetition in some of them.

    Legend: B blocks, S length, H width, V vocabulary.
    """

    def __init__(
        self, model: Any, train_blocks: Mixture, held_out: Tensor, config: LmConfig, loop: ResolvedLoop
    ) -> None:
        self.model: nn.Module = model
        self._decoder = model.model
        self._head = model.lm_head
        self._blocks = train_blocks
        self._held_out = held_out  # [N, S]
        self._batch = config.batch
        self._device = torch.device(config.device)
        self._short_length = config.short_length
        self._short_until = round(config.short_share * loop.steps) * loop.accumulate
        self._repetition = config.repetition
        self._bf16 = loop.bf16

    def _losses(self, blocks: Tensor) -> Tensor:
        """blocks [B, S] -> cross entropy of all tokens except the first, [B, S - 1]."""
        tokens = blocks.to(self._device)
        hidden = self._decoder(input_ids=tokens, use_cache=False).last_hidden_state  # [B, S, H]
        logits = self._head(hidden[:, :-1]).flatten(0, 1)  # [B * (S - 1), V]
        losses = F.cross_entropy(logits.float(), tokens[:, 1:].flatten(), reduction="none")
        return losses.view(len(tokens), -1)

    def micro_batch_loss(self, number: int) -> MicroBatchLoss:
        blocks = self._blocks.batch(number, self._batch)
        if number < self._short_until:
            blocks = blocks.reshape(-1, self._short_length)
        if self._repetition is None:
            losses = self._losses(blocks)
            return MicroBatchLoss(losses.sum(), losses.numel())
        count = round(self._repetition.share * len(blocks))
        repeated = [repeat_a_span(block, seed=number * len(blocks) + i) for i, block in enumerate(blocks[:count])]
        losses = self._losses(torch.stack([block for block, _, _ in repeated] + list(blocks[count:])))
        plain = [losses[count:].flatten()]
        against = []
        for row, (_, start, span) in zip(losses, repeated, strict=False):
            plain.append(row[: start - 1])
            against.append(repetition_loss(row, start, span, self._repetition.decay))
        text = torch.cat(plain)
        loops = torch.cat(against)
        metrics = {
            "text_loss": (text.sum().item(), float(text.numel())),
            "repetition_loss": (loops.sum().item(), float(loops.numel())),
        }
        return MicroBatchLoss(text.sum() + loops.sum(), text.numel() + loops.numel(), metrics)

    def validate(self, progress: TrainingProgress, advance: Advance) -> dict[str, float]:  # noqa: ARG002  # no checkpoints
        total, count = 0.0, 0
        with torch.no_grad(), torch.autocast(self._device.type, torch.bfloat16, enabled=self._bf16):
            for blocks in torch.split(self._held_out, self._batch):
                losses = self._losses(blocks)
                total += losses.sum().item()
                count += losses.numel()
                advance("scoring", count, self._held_out.numel())
        return {"validation_loss": total / count}


LONGEST_SPAN = 32


def repeat_a_span(block: Tensor, seed: int) -> tuple[Tensor, int, int]:
    """Make a block [S] repeat a span to its end; returns the block, the start of repetition and the span's length."""
    draw = torch.Generator().manual_seed(seed)
    span = int(torch.randint(2, min(LONGEST_SPAN, len(block) // 4) + 1, (), generator=draw))
    start = int(torch.randint(span + 1, len(block) // 2 + 1, (), generator=draw))
    times = -(-(len(block) - start) // span)
    return torch.cat((block[:start], block[start - span : start].repeat(times)))[: len(block)], start, span


def repetition_loss(losses: Tensor, start: int, span: int, decay: float) -> Tensor:
    """DITTO's loss at positions that repeat: -log(1 - |p - decay * p'|), p' being p one repetition earlier.

    losses [S - 1] are the cross entropies of the tokens from the second on: p = exp(-loss). Tokens from position
    `start` on equal those `span` positions before them. No gradient flows through p'.
    """
    p = losses.neg().exp()
    now = p[start - 1 :]
    before = p[start - 1 - span : len(p) - span].detach()
    return -torch.log1p(-(now - decay * before).abs().clamp(max=1 - 1e-4))


def train_lm(config: LmConfig) -> None:
    """Train a model and save it with its tokenizer, in bf16, as a Hugging Face folder `model`."""
    corpus = build_corpus(config.corpus, config.output, config.start_from)
    torch.manual_seed(config.loop.seed)
    tokenizer = corpus.tokenizer
    if config.start_from is None:
        model = build_lm(config.model, len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id)
    else:
        trained = LlamaForCausalLM.from_pretrained(config.start_from, dtype=torch.float32, trust_remote_code=False)
        cuts = config.model.layers < trained.config.num_hidden_layers
        model = (cut_depth if cuts else grow_depth)(trained, config.model.layers)
    train_model(model, corpus, config)


def train_model(model: Any, corpus: Corpus, config: LmConfig) -> None:
    """Train a transformers causal LM on a corpus as `config` says (except for its model sizes), and save both."""
    model.to(config.device)
    mixture = Mixture(corpus.train, config.corpus.weights, config.loop.seed)
    identity = config.model_dump(
        mode="json", include={"batch", "short_length", "repetition", "model", "corpus", "start_from"}
    )
    with join_processes(config.loop.parallel, torch.device(config.device)) as processes:
        if processes.world_size > 1:
            raise ConfigError("lm recipes run in a single process: start them without torchrun")
        loop = resolved(config.loop, 0, model.config.hidden_size, config.output, processes)
        objective = LmObjective(model, mixture, corpus.held_out[: config.validation_blocks], config, loop)
        train(objective, loop, config.output, processes, identity, "lm")
    with writing_folder(config.output / "model") as final:
        model.to(torch.bfloat16).save_pretrained(final)
        corpus.tokenizer.save_pretrained(final)


def grow_depth(model: LlamaForCausalLM, layers: int) -> LlamaForCausalLM:
    """A model with `layers` layers, a multiple of those of `model`, that computes the same function.

    Each layer is followed by copies of itself whose output projections are zero, so that they add nothing to the
    residual stream at first. The idea of stacking is from arXiv 1906.02341 and 2405.15319; zero outputs instead of
    plain copies keep the loss unchanged.
    """
    have = model.config.num_hidden_layers
    if layers % have:
        raise ConfigError(f"can't grow {have} layers to {layers}, which must be a multiple of {have}")
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = layers
    grown = LlamaForCausalLM(config)
    times = layers // have
    state = {}
    for name, tensor in model.state_dict().items():
        head, _, tail = name.partition("model.layers.")
        if head or not tail:
            state[name] = tensor
            continue
        index, _, rest = tail.partition(".")
        writes = rest in ("self_attn.o_proj.weight", "mlp.down_proj.weight")
        for copy_number in range(times):
            value = torch.zeros_like(tensor) if writes and copy_number else tensor
            state[f"model.layers.{int(index) * times + copy_number}.{rest}"] = value
    grown.load_state_dict(state)
    return grown


def cut_depth(model: LlamaForCausalLM, layers: int) -> LlamaForCausalLM:
    """A model with `layers` of the layers of `model`: the first, the last and evenly spaced ones between them.

    Such a student learns faster than one with fresh weights (DistilBERT, arXiv 1910.01108).
    """
    have = model.config.num_hidden_layers
    kept = [round(i * (have - 1) / max(1, layers - 1)) for i in range(layers)]
    config = copy.deepcopy(model.config)
    config.num_hidden_layers = layers
    short = LlamaForCausalLM(config)
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("model.layers.")}
    for index, source in enumerate(kept):
        layer = model.model.layers[source].state_dict()
        state |= {f"model.layers.{index}.{name}": tensor for name, tensor in layer.items()}
    short.load_state_dict(state)
    return short
