"""Names of tensors in drafter files.

Native names are those of the `layers.{i}.*` layout: the networks' own, without a `model.` in front. Some projects call
the first layer `midlayer`.
"""

from __future__ import annotations

FIRST_LAYER, MIDLAYER = "layers.0.", "midlayer."

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
HEADS = "lm_heads."
"""What the names of the heads begin with, in kinds that have one for each guess."""
SHAREABLE = frozenset({EMBEDDING, HEAD})
"""Tensors that a file may leave out: they are then the target's."""

VOCABULARY_MAP = frozenset({"d2t", "t2d"})
"""Which target token each draft token stands for; `d2t` may be left out where it is the identity, `t2d` always."""


def native_name(name: str) -> str:
    """The native name of a tensor in a file."""
    name = name.removeprefix("model.")
    return FIRST_LAYER + name.removeprefix(MIDLAYER) if name.startswith(MIDLAYER) else name


def name_in_file(name: str, first_layer: str) -> str:
    """The name that a native tensor gets in a file whose first layer is called `first_layer` (dot included)."""
    return first_layer + name.removeprefix(FIRST_LAYER) if name.startswith(FIRST_LAYER) else name


def is_head(name: str) -> bool:
    """Whether this is the native name of a head, or of one of several."""
    return name == HEAD or name.startswith(HEADS)


def is_computed(name: str) -> bool:
    """Whether this is a table that some checkpoints store although every reader computes it."""
    return name.endswith("rotary_emb.inv_freq")
