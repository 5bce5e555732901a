"""Resolves the `auto` settings of a recipe for the target and the machine."""

from __future__ import annotations

from eyas.errors import ConfigError
from eyas.targets.loading import resolve_dtype
from eyas.train.drafter.config import DrafterTrainConfig
from eyas.train.drafter.shape import TargetModel
from eyas.train.loop.checkpoint import saved_identity
from eyas.train.loop.distributed import ProcessGroup

LENGTH = 4096
"""Tokens to which chats are cut if the length is `auto`, as in SpecForge's examples; SafeAILab/EAGLE uses half."""
CHATS = 2
"""Chats of full length that fit into an `auto` micro-batch."""


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


def sized(config: DrafterTrainConfig, target: TargetModel, dtype: str) -> SizedConfig:
    """Resolve every `auto` size for a target that is loaded in `dtype`.

    Chats are cut to 4,096 tokens or the target's context, and a micro-batch holds two such chats, or two segments. A
    draft vocabulary of None remains the target's whole one. Raises ConfigError for chats longer than the context.
    """
    length = min(LENGTH, target.max_length or LENGTH) if config.max_length == "auto" else config.max_length
    if target.max_length is not None and length > target.max_length:
        raise ConfigError(
            f"max_length {length} is beyond the target's context of {target.max_length} tokens: set that, or auto"
        )
    row = length if config.segments is None else min(length, config.segments.length + config.segments.context)
    shape = config.shape
    if shape.draft_vocab_size == "auto":
        size = shape.draft_vocabulary(target.vocab_size)
        shape = shape.model_copy(update={"draft_vocab_size": None if size == target.vocab_size else size})
    filled = {
        "target_dtype": dtype,
        "max_length": length,
        "batch_tokens": CHATS * row if config.batch_tokens == "auto" else config.batch_tokens,
        "shape": shape,
    }
    return SizedConfig.model_validate({**dict(config), **filled})
