"""The settings of a run: resolves `auto` values, shows all settings as a table, and warns about unusual ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from eyas.config import StrictModel
from eyas.data.tokens.batches import ChatBatches, learnable
from eyas.data.tokens.tokenize import TokenRow
from eyas.drafters.config import FusedTapsConfig, GroupedConfig, TransformerConfig, WindowedConfig
from eyas.drafters.network import DraftNetwork
from eyas.drafters.window.window import SINKS
from eyas.errors import ConfigError
from eyas.files import write_text
from eyas.hub import ModelFiles
from eyas.tables import show_table
from eyas.targets.loading import resolve_dtype
from eyas.train.drafter.config import DrafterTrainConfig
from eyas.train.drafter.data import CutOff, DraftVocabulary, count_answer_tokens
from eyas.train.drafter.shape import DrafterShape, TargetModel, mlp_width
from eyas.train.loop.checkpoint import saved_identity
from eyas.train.loop.distributed import ProcessGroup
from eyas.train.loop.loop import ResolvedLoop
from eyas.train.loss.config import LossConfig

LENGTH = 4096
"""The `auto` length that chats are cut to, in tokens, as in SpecForge's examples; SafeAILab/EAGLE uses half."""
CHATS = 2
"""Chats of full length that fit into an `auto` micro-batch."""
MIN_BATCHES = 160
"""Minimum `auto` micro-batches per epoch, if the longest chat allows it. With little data, larger micro-batches would
leave a few dozen steps, in which a drafter learns hardly anything."""
PADDED = 1.5
"""Positions of a micro-batch for each token in it, for estimates: chats of unequal length are padded. 357 chats filled
249 micro-batches, where their tokens alone would fill 160."""
VOCABULARY_STEP = 1024
"""An `auto` draft vocabulary is a multiple of this if fewer distinct tokens than allowed occur in the answers."""


class SizedConfig(DrafterTrainConfig):
    """A drafter's training run with `auto` sizes resolved, as kept in its config.yaml and compared on resuming."""

    target_dtype: str
    batch_tokens: int
    max_length: int


def resolved_dtype(config: DrafterTrainConfig, files: ModelFiles, processes: ProcessGroup) -> str:
    """The target's dtype. `auto` is the dtype that a resumed run began with, else rank 0's `resolve_dtype`."""
    if config.target_dtype != "auto":
        return config.target_dtype
    began = saved_identity(config.output / "state").get("target_dtype")
    chosen = began or str(resolve_dtype("auto", files, processes.device)).removeprefix("torch.")
    return str(processes.all_gather(chosen)[0])


def cut_length(config: DrafterTrainConfig, target: TargetModel) -> int:
    """The number of tokens that chats are cut to; `auto` is 4,096, or the target's context if that is shorter.

    Raises ConfigError for a length beyond the context.
    """
    length = min(LENGTH, target.max_length or LENGTH) if config.max_length == "auto" else config.max_length
    if target.max_length is not None and length > target.max_length:
        raise ConfigError(
            f"max_length {length} is beyond the target's context of {target.max_length} tokens: set that, or auto"
        )
    return length


def sized(
    config: DrafterTrainConfig, target: TargetModel, dtype: str, rows: Sequence[TokenRow] | None = None
) -> SizedConfig:
    """Resolve every `auto` size for a target loaded in `dtype`, and for the training `rows` if they are known.

    A micro-batch holds two chats of full length or two segments, and less with little data, so that an epoch has
    enough steps. A draft vocabulary has at most 32,000 tokens, and hardly more than occur in the answers; None still
    means the target's whole vocabulary.
    """
    length = cut_length(config, target)
    row = length if config.segments is None else min(length, config.segments.length + config.segments.context)
    shape = config.shape
    if shape.draft_vocab_size == "auto":
        size = _vocabulary(shape, target.vocab_size, rows)
        shape = shape.model_copy(update={"draft_vocab_size": None if size == target.vocab_size else size})
    filled = {
        "target_dtype": dtype,
        "max_length": length,
        "batch_tokens": _micro_batch(row, rows) if config.batch_tokens == "auto" else config.batch_tokens,
        "shape": shape,
    }
    return SizedConfig.model_validate({**dict(config), **filled})


def _vocabulary(shape: DrafterShape, vocab_size: int, rows: Sequence[TokenRow] | None) -> int:
    """The size of an `auto` draft vocabulary. The drafter's own head learns nothing about tokens that never occur."""
    most = shape.draft_vocabulary(vocab_size)
    if rows is None or shape.head_owner != "own":
        return most
    occurring = int(count_answer_tokens(rows, vocab_size).count_nonzero())
    return min(most, (occurring // VOCABULARY_STEP + 1) * VOCABULARY_STEP)


def _micro_batch(row: int, rows: Sequence[TokenRow] | None) -> int:
    """The tokens of an `auto` micro-batch, for rows of at most `row` tokens."""
    lengths = [min(row, len(each.tokens)) for each in rows or () if learnable(each)]
    if not lengths:
        return CHATS * row
    return min(CHATS * row, max(*lengths, sum(lengths) // MIN_BATCHES))


FILE = "settings.txt"

_ADAM_BYTES = 4 + 4 + 8
"""Bytes of a trained float32 weight, its gradient and AdamW's two moments."""

# Sizes from which a target is no longer a toy, and limits beyond which settings for it look wrong.
_REAL_VOCABULARY = 32_000
_REAL_CONTEXT = 4096
_REAL_WIDTH = 1024
_MIN_COVERED = 0.99
_MIN_LENGTH = 1024
_MIN_EPOCHS = 0.5
_MIN_DEPTH = 0.6
_MIN_ANSWERS = 1_000_000
"""With fewer answer tokens, a drafter is only a trial: published ones were trained on 10 to 100 million."""
_MAX_LR = 5e-4
"""Five times the highest rate that EAGLE, SpecForge and speculators publish for AdamW (5e-5 to 1e-4)."""
_MAX_MATRIX_LR = 0.02
"""Keller Jordan's rate for Muon; speculators uses 0.001. tests/toy's 0.08 was tuned for matrices of 256 x 512."""


class Setting(NamedTuple):
    """A row of the table: a setting, its value, and where the value comes from."""

    name: str
    value: str
    origin: str


@dataclass(frozen=True)
class Outlook:
    """Everything known about a run before its first step."""

    written: DrafterTrainConfig
    """The settings as the recipe has them, before `auto` values are resolved."""
    config: SizedConfig
    loop: ResolvedLoop
    target: TargetModel
    network: DraftNetwork
    vocabulary: DraftVocabulary
    batches: ChatBatches
    started: str | None = None
    """The drafter of a warm start and how much of it was used; None without a warm start."""
    cut: CutOff | None = None
    left_out: tuple[str, ...] = ()
    """One line for each chat that couldn't be used."""

    def settings(self) -> Iterator[Setting]:
        """The rows of the table: everything that determines the drafter, the training time and the memory use."""
        config = self.config
        loop = self.loop
        target = self.target
        written = self.written
        context = "any length" if target.max_length is None else f"context {target.max_length:,}"
        yield Setting(
            "target",
            f"{config.target}: {target.num_layers} layers, {target.hidden_size:,} wide, {target.vocab_size:,} tokens, "
            f"{context}",
            "recipe",
        )
        yield Setting("target dtype", config.target_dtype, _origin(written, "target_dtype", "checkpoint and device"))
        yield from self._network()
        rows = [row for row in self.batches.rows if learnable(row)]
        tokens = sum(len(row.tokens) for row in rows)
        answers = sum(int(row.loss_mask.sum()) for row in rows)
        yield Setting("data", f"{len(rows):,} chats, {tokens:,} tokens, {answers:,} of them answers", config.source)
        yield Setting("max length", f"{config.max_length:,} tokens", _origin(written, "max_length", "context"))
        if config.segments is not None:
            parts = config.segments
            value = f"{parts.length:,} tokens after {parts.context:,} of context, {len(self.batches.segments):,} rows"
            yield Setting("segments", value, "recipe")
        yield Setting(
            "micro-batch",
            f"up to {config.batch_tokens:,} tokens, {self.batches.per_epoch:,} an epoch",
            _origin(written, "batch_tokens", "max length and data"),
        )
        yield Setting(
            "steps",
            f"{loop.steps:,} of {loop.accumulate} micro-batches = {self.epochs:.2f} epochs",
            "recipe" if written.loop.epochs is None else f"{written.loop.epochs:g} epochs",
        )
        loss = config.loss
        yield Setting(
            "loss",
            f"{loss.token} x {loss.token_weight:g}"
            + (f", {loss.feature} x {loss.feature_weight:g}" if loss.feature != "none" else "")
            + f"; {loss.unroll} steps, each x {loss.decay:g} of the one before",
            "kind" if loss == LossConfig(**written.shape.default_loss) else "recipe",
        )
        rate = f"{loop.optimizer.kind}, lr {loop.optimizer.lr:g}"
        if loop.optimizer.kind == "muon":
            rate += f", {loop.optimizer.matrix_lr:g} for matrices"
        automatic = "auto" in (written.loop.optimizer.kind, written.loop.optimizer.lr, written.loop.optimizer.matrix_lr)
        origin = "target's width" if automatic else _origin(written.loop, "optimizer", "default")
        yield Setting("optimizer", f"{rate}, {loop.schedule.kind}", origin)
        precision = "bfloat16 (autocast)" if loop.bf16 else "float32"
        yield Setting("precision", precision, _origin(written.loop, "bf16", "device"))

    def _network(self) -> Iterator[Setting]:
        network, shape = self.network.config, self.written.shape
        yield Setting("kind", shape.kind, _origin(shape, "kind", "default"))
        taps = network.taps_of(self.target.num_layers)
        yield Setting("taps", ", ".join(map(str, taps)), _origin(shape, "taps", "target and store"))
        if isinstance(network, TransformerConfig):
            heads = f"{network.num_attention_heads} heads"
            if isinstance(network, GroupedConfig):
                heads += f" of {network.head_dim} on {network.num_key_value_heads}"
            value = f"{network.num_hidden_layers} of {heads}, {network.hidden_size:,} wide"
            yield Setting("layers", value, _origin(shape, "heads", "target"))
            yield Setting("MLP", f"{network.intermediate_size:,} wide", _origin(shape, "intermediate_size", "target"))
            if network.draft_window is not None:
                yield Setting("window", f"the first {SINKS} pairs and the last {network.draft_window:,}", "recipe")
            if isinstance(network, WindowedConfig) and network.sliding_window is not None:
                count = sum(window is not None for window in network.layer_windows)
                value = f"{network.sliding_window:,} positions in {count} of {network.num_hidden_layers} layers"
                yield Setting("window", value, "recipe")
        yield Setting("draft vocabulary", str(self.vocabulary), _origin(shape, "draft_vocab_size", "target and data"))
        for part, owner in (("embedding", network.embedding), ("head", network.head)):
            yield Setting(
                part, {"own": "its own", "shared": "the target's"}.get(owner, owner), _origin(shape, part, "kind")
            )
        trained, frozen = (
            sum(p.numel() for p in self.network.parameters() if p.requires_grad is trains) for trains in (True, False)
        )
        if network.default_tree is not None:
            yield Setting("default tree", network.default_tree, "recipe")
        yield Setting("parameters", f"{trained:,} trained, {frozen:,} frozen", "")
        held = trained * _ADAM_BYTES + frozen * 4
        on_top = "activations and the target on top"
        if self.loop.parallel == "fsdp":
            on_top = "sharded over the processes like the target's layers, activations on top"
        yield Setting("memory", f"{held / 2**20:,.0f} MiB, {on_top}", "")
        if self.started is not None:
            yield Setting("starts from", self.started, "recipe")

    @property
    def epochs(self) -> float:
        """The number of passes over the data."""
        return self.loop.steps * self.loop.accumulate / self.batches.per_epoch

    def warnings(self) -> Iterator[str]:
        """Warnings about settings that seem to be meant for another model, with advice."""
        config = self.config
        loop = self.loop
        target = self.target
        network = self.network.config
        yield from self._about_data()
        if target.vocab_size >= _REAL_VOCABULARY and self.vocabulary.covered < _MIN_COVERED:
            yield (
                f"a draft vocabulary of {network.draft_vocab_size:,} tokens covers {self.vocabulary.covered:.2%} of "
                "the answers; the others can't be drafted (set shape.draft_vocab_size to auto, or higher)"
            )
        if isinstance(network, TransformerConfig) and network.intermediate_size < mlp_width(target.config) / 2:
            yield (
                f"an MLP {network.intermediate_size:,} wide suits a small model: the target's is "
                f"{mlp_width(target.config):,} wide (remove shape.intermediate_size)"
            )
        if config.max_length < _MIN_LENGTH and (target.max_length or _REAL_CONTEXT) >= _REAL_CONTEXT:
            yield (
                f"chats are cut to {config.max_length:,} tokens, so the drafter doesn't learn from longer contexts "
                "(set max_length to auto)"
            )
        if self.cut is not None and self.cut.chats:
            advice = "raise max_length; segments keep a step's memory as it is"
            if config.max_length == target.max_length:
                advice = "it is the target's context: chats prepared with too_long cut end after an answer instead"
            yield (
                f"{self.cut.chats:,} training chats have more than {config.max_length:,} tokens (max_length), and the "
                f"{self.cut.tokens:,} tokens after that are not trained on ({advice})"
            )
        if self.left_out:
            yield f"{len(self.left_out):,} chats can't be used; the first of them: {self.left_out[0]}"
        if isinstance(network, FusedTapsConfig):
            highest = max(network.taps_of(target.num_layers))
            if highest < _MIN_DEPTH * target.num_layers:
                yield (
                    f"the highest tap is boundary {highest} of {target.num_layers}: these look like the taps of a "
                    "shallower model (remove shape.taps)"
                )
        if target.hidden_size >= _REAL_WIDTH:
            given, optimizer = self.written.loop.optimizer, loop.optimizer
            if given.lr != "auto" and optimizer.lr > _MAX_LR:
                yield (
                    f"loop.optimizer.lr is {optimizer.lr:g}: drafters of targets this wide are trained with "
                    "5e-5 to 1e-4 (or set it to auto)"
                )
            if given.matrix_lr != "auto" and optimizer.kind == "muon" and optimizer.matrix_lr > _MAX_MATRIX_LR:
                yield (
                    f"loop.optimizer.matrix_lr is {optimizer.matrix_lr:g}: that suits matrices a few hundred "
                    f"wide; for larger ones {_MAX_MATRIX_LR:g} or less is published (or set it to auto)"
                )
        if self.epochs < _MIN_EPOCHS:
            yield (
                f"{loop.steps:,} steps are {self.epochs:.2f} epochs, so many chats are never seen (give loop.epochs "
                "instead of loop.steps)"
            )

    def _about_data(self) -> Iterator[str]:
        """Warn if there is too little data for a drafter worth serving, and say what to expect."""
        answers = sum(int(row.loss_mask.sum()) for row in self.batches.rows)
        if answers >= _MIN_ANSWERS or self.target.vocab_size < _REAL_VOCABULARY:
            return
        yield (
            f"{answers:,} answer tokens are few: 60,000 gave a target of 135 million parameters an accept length of "
            "2.6, and published drafters were trained on 10 to 100 million. More chats help most; the method "
            "ngram needs no training and may be as fast (`eyas bench methods` compares them)"
        )


def _origin(section: StrictModel, name: str, otherwise: str) -> str:
    """The origin of a setting: `recipe` if the recipe gives a value, else `otherwise`."""
    given = name in section.model_fields_set and getattr(section, name) not in (None, "auto")
    return "recipe" if given else otherwise


def announce(outlook: Outlook) -> None:
    """Print the settings and warnings to standard error, and write them to the run's folder."""
    table = Table("setting", "value", "from", title=f"Training {outlook.config.output}", box=box.SIMPLE_HEAD)
    for setting in outlook.settings():
        table.add_row(*setting)
    warnings = [f"warning: {warning}" for warning in outlook.warnings()]
    kept = StringIO()
    for console in (Console(stderr=True), Console(file=kept, width=120)):
        show_table(console, table)
        for warning in warnings:
            console.print(warning, highlight=False, soft_wrap=True)
    write_text(Path(outlook.config.output) / FILE, kept.getvalue())
