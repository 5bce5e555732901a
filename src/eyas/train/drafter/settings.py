"""The table of settings that a run prints when it starts and keeps as `settings.txt`, and warnings about odd ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table

from eyas.config import StrictModel
from eyas.data.tokens.batches import ChatBatches, learnable
from eyas.drafters.config import FusedTapsConfig, GroupedConfig, TransformerConfig
from eyas.drafters.network import DraftNetwork
from eyas.drafters.window.window import SINKS
from eyas.files import write_text
from eyas.train.drafter.config import DrafterTrainConfig
from eyas.train.drafter.data import CutOff
from eyas.train.drafter.resolve import SizedConfig
from eyas.train.drafter.shape import TargetModel, mlp_width
from eyas.train.drafter.vocab_map import DraftVocabulary
from eyas.train.loop.loop import ResolvedLoop
from eyas.train.loss.config import LossConfig

FILE = "settings.txt"

_ADAM_BYTES = 4 + 4 + 8
"""Bytes of a trained float32 weight, its gradient and AdamW's two moments."""

# Sizes from which a target is no longer a toy, and limits beyond which settings for it are doubtful.
_REAL_VOCABULARY, _REAL_CONTEXT, _REAL_WIDTH = 32_000, 4096, 1024
_LEAST_COVERED, _LEAST_LENGTH, _LEAST_EPOCHS, _LEAST_DEPTH = 0.99, 1024, 0.5, 0.6
_LEAST_ANSWERS = 1_000_000
"""Answer tokens below which a drafter is a trial: published ones have learnt from 10 to 100 million."""
_MOST_LR = 5e-4
"""Five times the highest rate that EAGLE, SpecForge and speculators publish for AdamW (5e-5 to 1e-4)."""
_MOST_MATRIX_LR = 0.02
"""Keller Jordan's rate for Muon; speculators uses 0.001. tests/toy's 0.08 was tuned for matrices of 256 x 512."""


class Setting(NamedTuple):
    """A row of the table: a setting, its value, and where that is from."""

    name: str
    value: str
    origin: str


@dataclass(frozen=True)
class Outlook:
    """Everything that is known of a run before its first step."""

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
        """The rows of the table: everything that decides the drafter, the training time and the memory."""
        config, loop, target, written = self.config, self.loop, self.target, self.written
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
        tokens, answers = sum(len(row.tokens) for row in rows), sum(int(row.loss_mask.sum()) for row in rows)
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
            "kind" if loss == LossConfig.for_kind(written.shape.definition.name) else "recipe",
        )
        rate = f"{loop.optimizer.kind}, lr {loop.optimizer.lr:g}"
        if loop.optimizer.kind == "muon":
            rate += f", {loop.optimizer.matrix_lr:g} for matrices"
        yield Setting("optimizer", f"{rate}, {loop.schedule.kind}", _origin(written.loop, "optimizer", "default"))
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
                yield Setting("window", f"{SINKS} first pairs and the last {network.draft_window:,}", "recipe")
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
            on_top = "shared by the processes as the target's layers are, activations on top"
        yield Setting("memory", f"{held / 2**20:,.0f} MiB, {on_top}", "")
        if self.started is not None:
            yield Setting("starts from", self.started, "recipe")

    @property
    def epochs(self) -> float:
        """The number of passes over the data."""
        return self.loop.steps * self.loop.accumulate / self.batches.per_epoch

    def warnings(self) -> Iterator[str]:
        """Warnings about settings that seem to be meant for another model, with advice."""
        config, loop, target, network = self.config, self.loop, self.target, self.network.config
        yield from self._about_data()
        if target.vocab_size >= _REAL_VOCABULARY and self.vocabulary.covered < _LEAST_COVERED:
            yield (
                f"a draft vocabulary of {network.draft_vocab_size:,} tokens covers {self.vocabulary.covered:.2%} of "
                "the answers; the others can't be drafted (set shape.draft_vocab_size to auto, or higher)"
            )
        if isinstance(network, TransformerConfig) and network.intermediate_size < mlp_width(target.config) / 2:
            yield (
                f"an MLP {network.intermediate_size:,} wide suits a small model: the target's is "
                f"{mlp_width(target.config):,} wide (remove shape.intermediate_size)"
            )
        if config.max_length < _LEAST_LENGTH and (target.max_length or _REAL_CONTEXT) >= _REAL_CONTEXT:
            yield (
                f"chats are cut to {config.max_length:,} tokens, so the drafter doesn't learn from longer contexts "
                "(set max_length to auto)"
            )
        if self.cut is not None and self.cut.chats:
            advice = "raise max_length; segments keep a step's memory as it is"
            if config.max_length == target.max_length:
                advice = "it is the target's context: `eyas data prepare --too-long cut` cuts chats after an answer"
            yield (
                f"{self.cut.chats:,} training chats have more than {config.max_length:,} tokens (max_length), and the "
                f"{self.cut.tokens:,} tokens after that are not trained on ({advice})"
            )
        if self.left_out:
            yield f"{len(self.left_out):,} chats can't be used; the first of them: {self.left_out[0]}"
        if isinstance(network, FusedTapsConfig):
            highest = max(network.taps_of(target.num_layers))
            if highest < _LEAST_DEPTH * target.num_layers:
                yield (
                    f"the highest tap is boundary {highest} of {target.num_layers}: these look like the taps of a "
                    "shallower model (remove shape.taps)"
                )
        if target.hidden_size >= _REAL_WIDTH:
            if loop.optimizer.lr > _MOST_LR:
                yield (
                    f"loop.optimizer.lr is {loop.optimizer.lr:g}: drafters of targets this wide are trained with "
                    "5e-5 to 1e-4"
                )
            if loop.optimizer.kind == "muon" and loop.optimizer.matrix_lr > _MOST_MATRIX_LR:
                yield (
                    f"loop.optimizer.matrix_lr is {loop.optimizer.matrix_lr:g}: that suits matrices a few hundred "
                    f"wide; for larger ones {_MOST_MATRIX_LR:g} or less is published"
                )
        if self.epochs < _LEAST_EPOCHS:
            yield (
                f"{loop.steps:,} steps are {self.epochs:.2f} epochs, so many chats are never seen (give loop.epochs "
                "instead of loop.steps)"
            )

    def _about_data(self) -> Iterator[str]:
        """Warn of data that is too little for a drafter worth serving, and say what to expect."""
        answers = sum(int(row.loss_mask.sum()) for row in self.batches.rows)
        if answers >= _LEAST_ANSWERS or self.target.vocab_size < _REAL_VOCABULARY:
            return
        yield (
            f"{answers:,} answer tokens are few: expect an accept length below 2; published drafters have "
            "learnt from 10 to 100 million. More chats help most; --method ngram needs no training and may be as fast "
            "(`eyas bench methods` compares them)"
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
        console.print(table, highlight=False)
        for warning in warnings:
            console.print(warning, highlight=False, soft_wrap=True)
    write_text(Path(outlook.config.output) / FILE, kept.getvalue())
