"""P-EAGLE (arXiv 2602.01469): EAGLE-3's layers, which make all guesses of a draft in one causal pass.

Slot 0 is the last true pair, as in EAGLE-3. Slot d is d positions further and always reads the same masked pair: the
embedding of the mask token and `fc(mask_hidden)`. It sees the true pairs and the slots before it, and predicts the
token that follows d guesses without knowing them.

config.json is EAGLE-3's plus the mask token, under any of the names that vLLM reads. Configurations of speculators are
translated (`formats/speculators.py`).

Shapes: A taps, Ht target hidden, H draft hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from pydantic import Field
from torch import nn

from eyas.drafters.block.decoding import ParallelProposer
from eyas.drafters.config import MAX_LAYERS, MaskedConfig
from eyas.drafters.formats.fields import Fields
from eyas.drafters.formats.speculators import PEAGLE_ARCHITECTURES
from eyas.drafters.kind import PEAGLE, Kind
from eyas.drafters.kinds.eagle3 import PAIRED_INPUTS, Eagle3Config, Eagle3Network, grouped_dict, read_grouped
from eyas.drafters.network import MaskedPair
from eyas.errors import ConfigError

_LLAMA, _QWEN3 = (PEAGLE_ARCHITECTURES[layer] for layer in ("llama", "qwen3"))
_QWEN3_EAGLE3 = "Eagle3Qwen3ForCausalLM"
"""The architecture with query and key norms in vLLM's own form: EAGLE-3 with `parallel_drafting`."""
_MASK = ("mask_token_id", "pard_token", "ptd_token_id")
"""The names of the mask token in published files."""


class PEagleConfig(Eagle3Config, MaskedConfig):
    """EAGLE-3's sizes and toggles, and the number of slots of one pass."""

    num_depths: int = Field(default=8, ge=1, le=MAX_LAYERS)
    """K, the guesses of one pass. Files of other projects may omit it; speculators trains 8."""

    @property
    def guesses(self) -> int:
        return self.num_depths


def read(fields: Fields) -> PEagleConfig:
    """The configuration in a checkpoint's config.json. Raises ConfigError, also for keys of unknown meaning."""
    named = {key: token for key in _MASK if (token := fields.take(key, int)) is not None}
    if len(set(named.values())) > 1:
        raise ConfigError(f"{fields.where}: {named} are different mask tokens: keep one")
    if named:
        fields.values["mask_token_id"] = next(iter(named.values()))
    fields.ignore("parallel_drafting", "P-EAGLE always drafts so")
    fields.ignore("norm_output", "P-EAGLE feeds no state back")
    read_grouped(fields, _QWEN3, _QWEN3_EAGLE3)
    return fields.finish(PEagleConfig)


def write(config: PEagleConfig) -> dict[str, Any]:
    """The config.json that eyas reads; `eyas export` writes vLLM's name of the architecture."""
    values = grouped_dict(config, _LLAMA, _QWEN3)
    del values["norm_output"]
    return values | {"parallel_drafting": True}


class PEagleNetwork(Eagle3Network):
    """EAGLE-3's network, and the trained taps that stand in for unknown ones."""

    config: PEagleConfig

    def __init__(self, config: PEagleConfig) -> None:
        super().__init__(config)
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, config.tap_count * config.target_hidden_size))

    def masked_pair(self) -> MaskedPair:
        taps = torch.unflatten(self.mask_hidden, 2, (self.config.tap_count, -1))
        return MaskedPair(self.config.mask_token_id, self.fuse(taps))


KIND = Kind(
    "peagle",
    PEagleConfig,
    PEagleNetwork,
    read,
    write,
    architectures=frozenset({_LLAMA, _QWEN3, "PEagleDraftModel", "PEagleSpeculator"}),
    family=PEAGLE,
    paired_inputs=PAIRED_INPUTS,
    proposer=ParallelProposer,
    loss={"unroll": 8, "decay": 1.0, "down_sample_ratio": 0.7, "down_sample_ratio_min": 0.2},
)
