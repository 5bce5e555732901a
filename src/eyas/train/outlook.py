"""What a run is going to do, told before it starts."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from torch import nn

from eyas.data.batches import ChatBatches, learnable
from eyas.drafters.network import DraftNetwork
from eyas.target import Target
from eyas.train.drafter_recipe import DrafterTrainConfig
from eyas.train.vocab_map import DraftVocabulary

_ADAM_BYTES = 4 + 4 + 8
"""A trained float32 weight, its gradient and Adam's two moments."""


def outlook(
    config: DrafterTrainConfig,
    network: DraftNetwork,
    batches: ChatBatches,
    vocabulary: DraftVocabulary,
    target: Target,
    started: str | None,
) -> list[str]:
    """Lines: what is trained, on what, how long, in how much memory."""
    trained = _count(p for p in network.parameters() if p.requires_grad)
    frozen = _count(p for p in network.parameters() if not p.requires_grad)
    rows = [row for row in batches.rows if learnable(row)]
    tokens, answers = sum(len(row.tokens) for row in rows), sum(int(row.loss_mask.sum()) for row in rows)
    loop = config.loop
    epochs = loop.steps * loop.accumulate / batches.per_epoch
    held = trained * _ADAM_BYTES + frozen * 4
    lines = [
        f"{config.shape.kind} drafter: {trained:,} parameters trained, {frozen:,} frozen; "
        f"taps {list(network.config.taps or network.config.default_taps(target.num_layers))}",
        f"draft vocabulary: {vocabulary}",
        f"{config.source}: {len(rows):,} chats, {tokens:,} tokens, {answers:,} of them answers; "
        f"{batches.per_epoch:,} batches of up to {config.batch_tokens:,} tokens an epoch",
        f"{loop.steps:,} steps of {loop.accumulate} batches = {epochs:.2f} epochs",
        f"weights, gradients and optimizer: {held / 2**20:,.0f} MiB; activations and the target come on top",
    ]
    return lines if started is None else [*lines, f"starting from {started}"]


def show(lines: Iterable[str]) -> None:
    """Print to standard error."""
    console = Console(stderr=True)
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def _count(parameters: Iterable[nn.Parameter]) -> int:
    return sum(p.numel() for p in parameters)
