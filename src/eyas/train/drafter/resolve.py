"""Resolves the `auto` settings of a recipe for the target, the data and the machine."""

from __future__ import annotations

from collections.abc import Sequence

from eyas.data.tokens.batches import learnable
from eyas.data.tokens.tokenize import TokenRow
from eyas.errors import ConfigError
from eyas.targets.loading import resolve_dtype
from eyas.train.drafter.config import DrafterTrainConfig
from eyas.train.drafter.shape import DrafterShape, TargetModel
from eyas.train.drafter.vocab_map import count_answer_tokens
from eyas.train.loop.checkpoint import saved_identity
from eyas.train.loop.distributed import ProcessGroup

LENGTH = 4096
"""Tokens to which chats are cut if the length is `auto`, as in SpecForge's examples; SafeAILab/EAGLE uses half."""
CHATS = 2
"""Chats of full length that fit into an `auto` micro-batch."""
LEAST_BATCHES = 160
"""`auto` micro-batches of an epoch at least, if the longest chat allows: with little data, longer ones would leave a
few dozen steps, which teach next to nothing."""
VOCABULARY_STEP = 1024
"""What an `auto` draft vocabulary is a multiple of where the answers have fewer tokens than the target."""


class SizedConfig(DrafterTrainConfig):
    """A drafter's training run without `auto` sizes; compared when a run is resumed, and kept in its config.yaml."""

    target_dtype: str
    batch_tokens: int
    max_length: int


def resolved_dtype(config: DrafterTrainConfig, processes: ProcessGroup) -> str:
    """The target's dtype. `auto` is the one a resumed run began with, or else that of `resolve_dtype` on rank 0."""
    if config.target_dtype != "auto":
        return config.target_dtype
    began = saved_identity(config.output / "state").get("target_dtype")
    chosen = began or str(resolve_dtype("auto", config.target, processes.device)).removeprefix("torch.")
    return str(processes.all_gather(chosen)[0])


def cut_length(config: DrafterTrainConfig, target: TargetModel) -> int:
    """The tokens to which chats are cut: 4,096 or the target's context if that is `auto`.

    Raises ConfigError for more than the context.
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
    """Resolve every `auto` size for a target that is loaded in `dtype`, and for the training `rows` if they are known.

    A micro-batch holds two chats of full length, or two segments; with little data less, so that an epoch has steps
    enough. A draft vocabulary has at most 32,000 tokens, and hardly more than occur in the answers; None remains the
    target's whole one.
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
    """The tokens of an `auto` draft vocabulary; a head of its own learns nothing about tokens that never occur."""
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
    return min(CHATS * row, max(*lengths, sum(lengths) // LEAST_BATCHES))
