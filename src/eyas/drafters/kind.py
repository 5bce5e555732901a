"""What describes a drafter kind. Each file in `kinds/` fills in one `Kind`; everybody else asks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from eyas.drafters.config import DrafterConfig
from eyas.drafters.decoding import Proposer
from eyas.drafters.formats.fields import Fields
from eyas.drafters.formats.tensor_names import FIRST_LAYER
from eyas.drafters.network import DraftNetwork


class Family(NamedTuple):
    """A published draft network, which other engines may run, too."""

    method: str
    """What engines call the way it drafts, such as `eagle3`."""
    attention: str
    """`grouped` for grouped-query attention, `latent` for multi-head latent attention."""
    variant: str = ""
    """What tells it from another network that drafts in the same way."""


EAGLE = Family("eagle", "grouped")
EAGLE3 = Family("eagle3", "grouped")
EAGLE3_MLA = Family("eagle3", "latent")
PEAGLE = Family("peagle", "grouped")
DFLASH = Family("dflash", "grouped")
DFLASH2 = Family("dflash", "grouped", "convolved")
DSPARK = Family("dspark", "grouped")


@dataclass(frozen=True)
class Kind:
    """A way to draft: its config and network, how its files are recognised, read and written, who else can run it."""

    name: str
    config: type[DrafterConfig]
    network: Callable[[Any], DraftNetwork]
    read: Callable[[Fields], DrafterConfig]
    """Makes the config of a configuration in native keys."""
    write: Callable[[Any], dict[str, Any]]
    """Makes the contents of config.json of a config."""
    architectures: frozenset[str]
    """The architectures by which published config.json files name this network."""
    model_type: str | None = None
    """The `model_type` in config.json that this kind alone has; None = its files are recognised by their family."""
    family: Family | None = None
    """The published network that this is, all fields of which its config has; None = only eyas runs it."""
    marks: tuple[str, ...] = ()
    """What begins the native names of tensors that this kind alone has, of all kinds with the same layers."""
    first_layer: str = FIRST_LAYER
    """What the first layer's tensors are called in the files that eyas writes."""
    full_map: bool = False
    """Write the vocabulary map also where it maps every token to itself, as this kind's readers expect."""
    fixed_taps: bool = False
    """It always reads the default boundaries: its config.json can't name others."""
    paired_inputs: tuple[str, ...] = ()
    """The tensors that read embedding and state side by side: one half of their columns is for each, in that order."""
    proposer: Callable[[Any], Proposer] = Proposer
    """Makes what runs the network."""

    def blank(self, config: DrafterConfig) -> DraftNetwork:
        """The network on the meta device: names and shapes, no numbers."""
        with torch.device("meta"):
            return self.network(config)
