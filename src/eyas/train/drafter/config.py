"""The section `drafter` of a recipe: data, shape, loss, validation and training loop."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from eyas.config import StrictModel
from eyas.data.tokens.batches import SegmentConfig
from eyas.train.drafter.data import SourceKind
from eyas.train.drafter.shape import DrafterShape
from eyas.train.drafter.validation import ValidationConfig
from eyas.train.loop.loop import LoopConfig
from eyas.train.loss.config import LossConfig


class DrafterTrainConfig(StrictModel):
    """The settings of a drafter's training run. Omitted `loss` values default to those of the kind's paper."""

    target: str  # a folder, a Hub id, or `smollm2`
    source: SourceKind = "online"
    store: Path | None = None  # a store made by `eyas data capture`; for offline and hybrid
    chats: Path | None = None  # a chat folder or a .jsonl file; for online and hybrid
    held_out_share: float | None = Field(default=None, gt=0, lt=1)  # share of a .jsonl; folders and stores have splits
    data_share: float = Field(default=1.0, gt=0, le=1)  # share of the training chats, from the first: for data curves
    output: Path
    device: str | None = None  # None: the accelerator if there is one
    target_dtype: str = "auto"  # auto: the checkpoint's, float32 on CPUs without kernels for it
    shape: DrafterShape = DrafterShape()
    loss: LossConfig
    warm_start: str | None = None  # a drafter of the same sizes, and this kind or the one it extends; or `smollm2`
    batch_tokens: Annotated[int, Field(gt=0)] | Literal["auto"] = "auto"  # tokens of a micro-batch, padding included
    max_length: Annotated[int, Field(gt=2)] | Literal["auto"] = "auto"  # chats are cut to this many tokens
    segments: SegmentConfig | None = None  # how longer chats are split into rows; None: one row each
    validation: ValidationConfig = ValidationConfig()
    keep_checkpoints: int | None = Field(default=None, ge=1)  # how many of the newest to keep, plus the best; None: all
    loop: LoopConfig

    @model_validator(mode="before")
    @classmethod
    def _loss_of_the_kind(cls, values: Any) -> Any:
        if not isinstance(values, dict) or isinstance(values.get("loss"), LossConfig):
            return values
        shape = values.get("shape") or {}
        shape = shape if isinstance(shape, DrafterShape) else DrafterShape.model_validate(shape)
        usual = LossConfig(**shape.default_loss).model_dump()
        guesses = shape.medusa_heads or shape.num_depths
        if guesses is not None:
            usual["unroll"] = guesses  # step j trains guess j
        return {**values, "loss": {**usual, **(values.get("loss") or {})}}

    @model_validator(mode="after")
    def _source_has_what_it_needs(self) -> DrafterTrainConfig:
        wants = {"store": self.source != "online", "chats": self.source != "offline"}
        for name, wanted in wants.items():
            if (getattr(self, name) is not None) != wanted:
                need = "needs" if wanted else "doesn't read"
                raise ValueError(f"the {self.source} source {need} {name}")
        if self.source == "offline" and self.held_out_share is not None:
            raise ValueError("a store has a validation split of its own: remove held_out_share")
        return self


ELSEWHERE = {
    "target", "source", "store", "chats", "held_out_share", "data_share", "output", "device", "validation",
    "keep_checkpoints", "loop",
}  # fmt: skip
"""Settings that may differ when a run is resumed: paths, device, validation, and the loop (which checks its own).
The data may move, because its contents are compared by hash."""
