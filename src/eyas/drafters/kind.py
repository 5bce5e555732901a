"""The description of a drafter kind. Each file in `kinds/` fills in one `Kind`; all other code reads it.

Another package's kind is a `Kind`, too, found by its entry point `eyas.drafters` (`docs/new_kind.md` has an example).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from eyas.drafters.config import DrafterConfig
from eyas.drafters.decoding import Proposer
from eyas.drafters.formats.fields import Fields
from eyas.drafters.formats.tensor_names import FIRST_LAYER
from eyas.drafters.network import DraftNetwork


class Family(NamedTuple):
    """A published draft network, which other engines may also run."""

    method: str
    """The engines' name for its drafting method, such as `eagle3`."""
    attention: str
    """`grouped` for grouped-query attention, `latent` for multi-head latent attention."""
    variant: str = ""
    """Distinguishes it from other networks of the same method and attention."""


EAGLE = Family("eagle", "grouped")
EAGLE3 = Family("eagle3", "grouped")
EAGLE3_MLA = Family("eagle3", "latent")
PEAGLE = Family("peagle", "grouped")
DFLASH = Family("dflash", "grouped")
DFLASH2 = Family("dflash", "grouped", "convolved")
DSPARK = Family("dspark", "grouped")


@dataclass(frozen=True)
class Kind:
    """A kind of drafter: its config and network, how its files are recognized, read and written, who can run it.

    The network says how a draft is computed (`DraftNetwork.step`, or a `proposer` of the kind's own), and with which
    tensors. What it guesses changes how fast output comes, never the output.
    """

    name: str
    """As in `shape.kind` and `--method`; the entry point's name, if another package brings it."""
    config: type[DrafterConfig]
    network: Callable[[Any], DraftNetwork]
    read: Callable[[Fields], DrafterConfig]
    """Builds the config from a configuration in native keys."""
    write: Callable[[Any], dict[str, Any]]
    """Builds the contents of config.json from a config."""
    architectures: frozenset[str]
    """The architecture names that stand for this network in published config.json files."""
    model_type: str | None = None
    """The `model_type` in config.json that only this kind has; None = its files are recognized by their family, or, for
    another package's kind, by `marks` and `architectures`."""
    family: Family | None = None
    """The published network that it implements, with all of its config fields; None = only eyas runs it."""
    marks: tuple[str, ...] = ()
    """Prefixes of native tensor names that no other kind with the same layers has."""
    first_layer: str = FIRST_LAYER
    """The prefix of the first layer's tensors in the files that eyas writes."""
    full_map: bool = False
    """Write the vocabulary map even where it maps every token to itself, as this kind's readers expect."""
    fixed_taps: bool = False
    """It always reads the default boundaries: its config.json can't name others."""
    paired_inputs: tuple[str, ...] = ()
    """The weights that read [embedding, state]: the first half of their columns is for the embedding."""
    proposer: Callable[[Any], Proposer] = Proposer
    """Makes the proposer that runs the network."""
    trained: bool = True
    """Whether eyas trains it; other kinds come with their target."""
    loss: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """The settings of a recipe's section `loss` in its paper, where they differ from EAGLE-3's."""

    def blank(self, config: DrafterConfig) -> DraftNetwork:
        """The network on the meta device: names and shapes without weights."""
        with torch.device("meta"):
            return self.network(config)
