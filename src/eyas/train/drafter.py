"""From a target and chats to a trained EAGLE-3 drafter directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from eyas.config import StrictModel
from eyas.data.batches import ChatBatches
from eyas.data.chats import held_out, read_chats
from eyas.data.features import FeatureBatch, OnlineSource
from eyas.data.tokenize import TokenRow, tokenize_chat
from eyas.drafters.eagle3 import Eagle3Config, Eagle3Module, save_module
from eyas.errors import ConfigError, DataError
from eyas.target import Target, load_target, load_tokenizer
from eyas.target.architecture import default_taps
from eyas.train.checkpoint import Progress
from eyas.train.distributed import joined
from eyas.train.loop import LoopConfig, train
from eyas.train.loss_config import LossConfig
from eyas.train.metrics import Means
from eyas.train.objective import DraftObjective
from eyas.train.provenance import file_hash, fingerprint, versions
from eyas.train.vocab_map import choose_draft_vocabulary, count_answer_tokens, set_draft_vocabulary


class DrafterShape(StrictModel):
    """Sizes and toggles of the drafter; what is left out is taken from the target."""

    hidden_size: int | None = None
    intermediate_size: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    layers: int = Field(default=1, ge=1)
    draft_vocab_size: int | None = None
    taps: tuple[int, ...] | None = None
    fc_norm: bool = False
    norm_output: bool = False
    default_tree: str | None = None


class DrafterTrainConfig(StrictModel):
    """Recipe of an EAGLE-3 drafter, trained with the target in the loop."""

    target: str
    chats: Path
    output: Path
    device: str = "cpu"
    target_dtype: str = "bfloat16"
    drafter: DrafterShape = DrafterShape()
    unroll: int = Field(default=7, ge=1)  # steps of the training-time test
    step_decay: float = Field(default=0.8, gt=0, le=1)
    train_embedding: bool = False
    batch_tokens: int = Field(default=4096, gt=0)  # a micro-batch, padding counted
    max_length: int = Field(default=2048, gt=2)
    held_out_share: float = Field(default=0.02, gt=0, lt=1)
    validation_batches: int = Field(default=4, gt=0)
    loop: LoopConfig


def drafter_config(shape: DrafterShape, target: Target) -> Eagle3Config:
    """Fill what the recipe leaves open from the target's own config."""
    own = target.config
    heads = shape.heads or own.num_attention_heads
    hidden = shape.hidden_size or own.hidden_size
    taps = shape.taps or default_taps(target.num_layers)
    rope = dict(getattr(own, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0})
    return Eagle3Config(
        hidden_size=hidden,
        intermediate_size=shape.intermediate_size or own.intermediate_size,
        num_attention_heads=heads,
        num_key_value_heads=shape.kv_heads or min(heads, getattr(own, "num_key_value_heads", heads)),
        head_dim=shape.head_dim or getattr(own, "head_dim", None) or hidden // heads,
        vocab_size=target.vocab_size,
        draft_vocab_size=shape.draft_vocab_size or target.vocab_size,
        target_hidden_size=target.hidden_size,
        num_aux_hidden_states=len(taps),
        num_hidden_layers=shape.layers,
        rms_norm_eps=getattr(own, "rms_norm_eps", 1e-6),
        max_position_embeddings=target.max_length or own.max_position_embeddings,
        rope_parameters=rope,
        fc_norm=shape.fc_norm,
        norm_output=shape.norm_output,
        taps=taps,
        default_tree=shape.default_tree,
    )


def fresh_module(config: Eagle3Config, target: Target, draft_ids: torch.Tensor, train_embedding: bool) -> Eagle3Module:
    """New weights; embedding and head start from the target's where the widths agree. draft_ids [Vd]."""
    module = Eagle3Module(config)
    set_draft_vocabulary(module, draft_ids)
    if config.hidden_size == target.hidden_size:
        with torch.no_grad():
            module.embed_tokens.weight.copy_(target.model.get_input_embeddings().weight)
            module.lm_head.weight.copy_(target.model.get_output_embeddings().weight[draft_ids.to(target.device)])
    elif not train_embedding:
        raise ConfigError(
            f"the drafter is {config.hidden_size} wide, the target {target.hidden_size}: the target's "
            "embedding doesn't fit, so set train_embedding to true"
        )
    module.embed_tokens.weight.requires_grad_(train_embedding)
    return module.to(target.device)


class ValidatedObjective(DraftObjective):
    """Scores fixed batches for validation."""

    held_out: list[FeatureBatch]

    def validate(self, progress: Progress) -> dict[str, float]:  # noqa: ARG002
        means = Means()
        with torch.no_grad():
            for batch in self.held_out:
                part = self.score(batch)
                means.add_part(part)
        return {f"validation_{name}": value for name, value in means.means().items()}


def train_drafter(config: DrafterTrainConfig) -> Path:
    """Train and save; returns the drafter's directory. An interrupted run goes on from its last state."""
    target = load_target(config.target, dtype=config.target_dtype, device=config.device)
    tokenizer = load_tokenizer(config.target)
    seen, unseen = split_rows(tokenizer, config.chats, config.held_out_share)
    shape = drafter_config(config.drafter, target)
    counts = count_answer_tokens(seen, target.vocab_size)
    ids = choose_draft_vocabulary(counts, shape.draft_vocab_size, end_tokens(target, tokenizer))

    torch.manual_seed(config.loop.seed)
    module = fresh_module(shape, target, ids, config.train_embedding)
    taps = shape.taps or ()
    source = OnlineSource(target, batches(seen, config), taps)
    judge = OnlineSource(target, batches(unseen, config), taps)
    objective = ValidatedObjective(
        module, target.head, target.vocab_size, source,
        LossConfig(unroll=config.unroll, decay=config.step_decay), config.loop.bf16,
    )  # fmt: skip
    objective.held_out = [judge(n) for n in range(config.validation_batches)]
    identity = config.model_dump(mode="json", exclude={"loop", "output", "device", "validation_batches"})
    identity |= {"target_fingerprint": fingerprint(target.model), "chats_hash": file_hash(config.chats)}
    with joined(config.loop.parallel, target.device) as team:
        train(objective, config.loop, config.output, team, identity)

    local = Path(config.target).exists()
    provenance: dict[str, Any] = {
        **identity,
        # a checkpoint travels, the folders of the machine it was made on don't
        "target": Path(config.target).name if local else config.target,
        "chats": config.chats.name,
        "objective": "training-time test, soft cross entropy over the draft vocabulary / unmasked positions",
        "steps": config.loop.steps,
        "covered": round(float(counts[ids].sum() / counts.sum()), 4),
        "versions": versions(),
        "validation": {name: round(value, 4) for name, value in objective.validate(Progress()).items()},
    }
    place = config.output / "drafter"
    save_module(module.to(torch.bfloat16), place, provenance)
    return place


def split_rows(tokenizer: Any, path: Path, share: float) -> tuple[list[TokenRow], list[TokenRow]]:
    """Training and held-out rows of a chat file."""
    split: tuple[list[TokenRow], list[TokenRow]] = ([], [])
    for chat in read_chats(path):
        split[held_out(chat.id, share)].append(tokenize_chat(tokenizer, chat))
    if not split[0] or not split[1]:
        raise DataError(
            f"{path} gives {len(split[0])} training and {len(split[1])} held-out chats: "
            "add chats or change held_out_share"
        )
    return split


def batches(rows: list[TokenRow], config: DrafterTrainConfig) -> ChatBatches:
    """Batches under the recipe's token budget."""
    return ChatBatches(rows, config.batch_tokens, config.max_length, config.loop.seed)


def end_tokens(target: Target, tokenizer: Any) -> list[int]:
    """Every id that ends an answer."""
    found: set[int] = set()
    generation = getattr(target.model, "generation_config", None)
    for ids in (
        getattr(generation, "eos_token_id", None),
        target.config.eos_token_id,
        tokenizer.eos_token_id,
    ):
        found.update([ids] if isinstance(ids, int) else ids or [])
    return sorted(found)
