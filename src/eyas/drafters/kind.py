"""What describes a drafter kind. Each file in `kinds/` fills in one `Kind`; everybody else asks it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from eyas.drafters.config import DrafterConfig
from eyas.drafters.formats.fields import Fields, architectures
from eyas.drafters.formats.speculators import MODEL_TYPE_KEY
from eyas.drafters.formats.tensor_names import FIRST_LAYER, native_name
from eyas.drafters.network import DraftNetwork


class Family(NamedTuple):
    """A published draft network, which other engines can run."""

    method: str
    """What engines call the way it drafts: `eagle` or `eagle3`."""
    attention: str
    """`grouped` for grouped-query attention, `latent` for multi-head latent attention."""


EAGLE = Family("eagle", "grouped")
EAGLE3 = Family("eagle3", "grouped")
EAGLE3_MLA = Family("eagle3", "latent")


class FileSigns:
    """What a drafter's files say about its kind."""

    def __init__(self, config: Mapping[str, Any], tensors: Collection[str]) -> None:
        """Take config.json and the names of the tensors, as the file has them."""
        self.config = config
        self.tensors = {native_name(name) for name in tensors}
        self.architectures = [name.lower() for name in architectures(config)]

    @property
    def eagle_generation(self) -> int | None:
        """1 or 3; None if nothing points to EAGLE. Tensors are the surest sign, then architectures, then keys."""
        if "fc.weight" in self.tensors and any(name.endswith("hidden_norm.weight") for name in self.tensors):
            return 3
        if any("eagle" in name for name in self.architectures):
            return 3 if any("eagle3" in name for name in self.architectures) else 1
        if "draft_vocab_size" in self.config or MODEL_TYPE_KEY in self.config:
            return 3
        return 1 if "fc.weight" in self.tensors and "norm.weight" not in self.tensors else None

    @property
    def latent_attention(self) -> bool:
        """Whether the network has DeepSeek's multi-head latent attention."""
        return "kv_lora_rank" in self.config or any("deepseek" in name for name in self.architectures)


@dataclass(frozen=True)
class Kind:
    """A way to draft: its config, its network, how its files are recognised, read and written, who else can run it."""

    name: str
    config: type[DrafterConfig]
    network: Callable[[Any], DraftNetwork]
    read: Callable[[Fields], DrafterConfig]
    """From a configuration in native keys."""
    write: Callable[[Any], dict[str, Any]]
    """To the contents of config.json."""
    architectures: frozenset[str]
    """The architectures by which published config.json files name this network."""
    model_type: str | None = None
    """A `model_type` that this kind alone has in config.json; None = `recognises` decides."""
    recognises: Callable[[FileSigns], bool] = lambda _: False
    """Whether files that no `model_type` settles are of this kind."""
    family: Family | None = None
    """The published network that this is, all fields of which its config has; None = only eyas runs it."""
    first_layer: str = FIRST_LAYER
    """What the first layer's tensors are called in the files that eyas writes."""
    full_map: bool = False
    """Write the vocabulary map also where it maps every token to itself, as this kind's readers expect."""
    fixed_taps: bool = False
    """It always reads the default boundaries: its config.json can't name others."""
    paired_inputs: tuple[str, ...] = ()
    """The tensors that read the token embedding beside the state: one half of their columns each, in this order."""

    def blank(self, config: DrafterConfig) -> DraftNetwork:
        """The network on the meta device: names and shapes, no numbers."""
        with torch.device("meta"):
            return self.network(config)
