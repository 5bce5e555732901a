"""What an MLP drafter is made of; its config.json is our own format and holds exactly these fields."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from eyas.drafters.config import FeatureConfig
from eyas.drafters.formats.fields import Fields

MODEL_TYPE = "eyas_mlp"


class MlpConfig(FeatureConfig):
    """Depth and options; `embedding: none` is a network that reads the state alone."""

    depth: int = Field(default=2, ge=1)
    gate: bool = True
    """Mix the prediction with the state it came from, by one learned number."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """In training only."""
    norm: bool = False
    """A norm before the head: for features taken before the target's own final norm."""
    rms_norm_eps: float = Field(default=1e-6, gt=0)

    @model_validator(mode="after")
    def _one_tap(self) -> MlpConfig:
        if self.taps is not None and len(self.taps) != 1:
            raise ValueError(f"taps {list(self.taps)}: an mlp drafter reads one boundary")
        return self


def read(fields: Fields) -> MlpConfig:
    """Read our own configuration, which itself says what is shared; refuse unknown keys."""
    fields.values["target_hidden_size"] = fields.values.get("hidden_size")
    return fields.finish(MlpConfig)


def config_to_dict(config: MlpConfig) -> dict[str, Any]:
    """The config.json form."""
    values = config.model_dump(mode="json", exclude={"target_hidden_size"}, exclude_none=True)
    return {"model_type": MODEL_TYPE, "architectures": ["EyasMlpDrafter"]} | values
