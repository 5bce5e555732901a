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
from eyas.drafters.checkpoint import save_network
from eyas.errors import DataError
from eyas.target import Target, load_target, load_tokenizer
from eyas.train.checkpoint import Progress
from eyas.train.distributed import joined
from eyas.train.loop import LoopConfig, train
from eyas.train.loss_config import LossConfig
from eyas.train.metrics import Means
from eyas.train.objective import DraftObjective
from eyas.train.provenance import file_hash, fingerprint, versions
from eyas.train.shape import DrafterShape, drafter_config, fresh_network
from eyas.train.vocab_map import choose_draft_vocabulary, count_answer_tokens


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
    batch_tokens: int = Field(default=4096, gt=0)  # a micro-batch, padding counted
    max_length: int = Field(default=2048, gt=2)
    held_out_share: float = Field(default=0.02, gt=0, lt=1)
    validation_batches: int = Field(default=4, gt=0)
    loop: LoopConfig


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
    module = fresh_network(config.drafter, target, ids)
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
    save_network(module.to(torch.bfloat16), place, provenance)
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
