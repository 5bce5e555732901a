"""The section `drafter` of a recipe: on which data, of which shape, with which loss, for how long."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from eyas.config import StrictModel
from eyas.train.drafter.data import SourceKind
from eyas.train.drafter.shape import DrafterShape
from eyas.train.drafter.validation import ValidationConfig
from eyas.train.loop.loop import LoopConfig
from eyas.train.loss.config import LossConfig


class DrafterTrainConfig(StrictModel):
    """A drafter's training run. Whatever `loss` leaves out is what the kind's paper trains it with."""

    target: str  # a folder, a Hub id, or `demo`, the embedded target
    source: SourceKind = "online"
    store: Path | None = None  # what `eyas data capture` made; for offline and hybrid
    chats: Path | None = None  # a chat folder or a .jsonl file; for online and hybrid
    held_out_share: float | None = Field(default=None, gt=0, lt=1)  # of a .jsonl file; folders and stores are split
    output: Path
    device: str | None = None  # None: the accelerator if there is one
    target_dtype: str = "auto"  # auto: the checkpoint's, float32 on CPUs without kernels for it
    shape: DrafterShape = DrafterShape()
    loss: LossConfig
    warm_start: str | None = None  # a drafter of the same kind and sizes; `demo` is the embedded one
    batch_tokens: int | Literal["auto"] = Field(default="auto", gt=0)  # a micro-batch, padding counted
    max_length: int | Literal["auto"] = Field(default="auto", gt=2)  # chats are cut to so many tokens
    validation: ValidationConfig = ValidationConfig()
    keep_checkpoints: int | None = Field(default=None, ge=1)  # newest ones that stay beside the best; None: all
    loop: LoopConfig

    @model_validator(mode="before")
    @classmethod
    def _loss_of_the_kind(cls, values: Any) -> Any:
        if not isinstance(values, dict) or isinstance(values.get("loss"), LossConfig):
            return values
        shape = values.get("shape") or {}
        kind = (shape if isinstance(shape, DrafterShape) else DrafterShape.model_validate(shape)).definition.name
        return {**values, "loss": {**LossConfig.for_kind(kind).model_dump(), **(values.get("loss") or {})}}

    @model_validator(mode="after")
    def _source_has_what_it_needs(self) -> DrafterTrainConfig:
        wants = {"store": self.source != "online", "chats": self.source != "offline"}
        for name, wanted in wants.items():
            if (getattr(self, name) is not None) != wanted:
                need = "needs" if wanted else "doesn't read"
                raise ValueError(f"the {self.source} source {need} {name}")
        if self.source == "offline" and self.held_out_share is not None:
            raise ValueError("a store has a validation split of its own: leave out held_out_share")
        return self


ELSEWHERE = {
    "target", "source", "store", "chats", "held_out_share", "output", "device", "validation", "keep_checkpoints",
    "loop",
}  # fmt: skip
"""Settings that may differ when a run is resumed: where things lie and how it is watched. The data has its own hash."""
