"""Names of tensors in drafter files.

Native names follow the `layers.{i}.*` layout: the networks' own parameter names, without a leading `model.`. Some
projects call the first layer `midlayer`.
"""

from __future__ import annotations

FIRST_LAYER, MIDLAYER = "layers.0.", "midlayer."

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
HEADS = "lm_heads."
"""The prefix of the heads' names, in kinds with one head per guess."""
SHAREABLE = frozenset({EMBEDDING, HEAD})
"""Tensors that a file may omit: the target's are then used."""

VOCABULARY_MAP = frozenset({"d2t", "t2d"})
"""Which target token each draft token stands for; a file may omit `t2d`, and `d2t` if it is the identity."""


def native_name(name: str) -> str:
    """The native name of a tensor in a file."""
    name = name.removeprefix("model.")
    return FIRST_LAYER + name.removeprefix(MIDLAYER) if name.startswith(MIDLAYER) else name


def name_in_file(name: str, first_layer: str) -> str:
    """The name of a native tensor in a file whose first layer has the prefix `first_layer` (with its dot)."""
    return first_layer + name.removeprefix(FIRST_LAYER) if name.startswith(FIRST_LAYER) else name


def is_head(name: str) -> bool:
    """Whether this is the native name of a head, or of one of several."""
    return name == HEAD or name.startswith(HEADS)


def is_computed(name: str) -> bool:
    """Whether this is a table that some checkpoints store but every reader computes."""
    return name.endswith("rotary_emb.inv_freq")
