"""The two ends of a target, embedding and head, without what lies between: all that training from a store needs.

transformers builds the model with its first layer only and reads no other tensors, so a 32B target takes about 2 GB.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from eyas.assets import named_target
from eyas.target.loading import read_config, read_model, resolve_device, resolve_dtype
from eyas.target.target import Target


class TargetEnds(Target):
    """Sizes, embedding and head of a target; passing tokens through it would mean nothing."""


def load_ends(model: str | Path, *, dtype: str | torch.dtype, device: str | torch.device | None = None) -> TargetEnds:
    """Load embedding, final norm and head. ModelError as `load_target`."""
    name = named_target(model)
    config = read_config(name)
    short = _shortened(config)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # it would list the layers left out
    try:
        loaded = read_model(name, short, resolve_dtype(dtype))
    finally:
        logging.set_verbosity(verbosity)
    ends = TargetEnds(loaded.to(resolve_device(device)).eval().requires_grad_(False))
    ends.config = config.get_text_config()
    ends.num_layers = ends.config.num_hidden_layers
    return ends


def _shortened(config: Any) -> Any:
    """A copy that has one layer; lists with an entry a layer keep their first."""
    short = copy.deepcopy(config)
    text = short.get_text_config()
    layers = text.num_hidden_layers
    for key, value in text.to_dict().items():
        if isinstance(value, list | tuple) and len(value) == layers and key != "architectures":
            setattr(text, key, value[:1])
    text.num_hidden_layers = 1
    return short
