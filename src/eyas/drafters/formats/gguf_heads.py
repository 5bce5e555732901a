"""MTP heads in GGUF files: inside the target's own, or in a companion that has nothing but them.

llama.cpp counts them among the layers: of `block_count` layers, the last `nextn_predict_layers` are heads. A head has
the tensors of an ordinary layer, and `nextn.*`, which are those of DeepSeek-V3's module. An embedding, head or final
norm that it lacks is the target's. The projection reads the embedding first in every architecture.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from eyas.drafters.formats.tensor_names import EMBEDDING, HEAD
from eyas.errors import CheckpointError, DrafterMismatchError
from eyas.gguf import Gguf
from eyas.gguf_companions import companions
from eyas.gguf_config import Model, heads_of, is_companion
from eyas.gguf_target import gguf_in, weights_file
from eyas.targets import Target
from eyas.targets.gguf_layouts import TensorLayout, layout_of
from eyas.targets.gguf_weights import LAYER, check_parts, read_tensors

_OUTER = {
    "nextn.enorm.weight": "enorm.weight", "nextn.hnorm.weight": "hnorm.weight",
    "nextn.eh_proj.weight": "eh_proj.weight", "nextn.shared_head_norm.weight": "norm.weight",
    "nextn.shared_head_head.weight": HEAD, "nextn.embed_tokens.weight": EMBEDDING,
}  # fmt: skip
"""Tensors around a head's layer -> native names."""
_PROJECTION = "nextn.eh_proj.weight"
_FALLBACKS = {HEAD: ("output.weight", "token_embd.weight"), EMBEDDING: ("token_embd.weight",)}
"""The target's tensors in the same file that a head may repeat; of several the first that exists."""


def find_heads(path: Path) -> Path | None:
    """The GGUF file with the heads of the target, or in the drafter's file, at `path`; None if it isn't GGUF.

    Raises CheckpointError if there are none, neither in the target's file nor in a companion next to it.
    """
    own = weights_file(path)
    file = gguf_in(path) if own is None else own
    if file is None or holds_heads(opened := Gguf(file)):
        return file
    if own is not None and (companion := companion_of(opened)) is not None:
        return companion
    if heads := heads_of(opened):
        raise CheckpointError(
            f"{file} says that its last {len(heads)} layers are MTP heads, and holds no blk.{heads[-1]}.{_PROJECTION}: "
            "it was made without them; use a file with them, or a companion (mtp-*.gguf) next to it"
        )
    raise CheckpointError(f"{file} has no MTP heads, and there is no companion (mtp-*.gguf) next to it")


def holds_heads(opened: Gguf) -> bool:
    """Whether a file holds all the MTP heads that its keys announce, at least one."""
    heads = heads_of(opened)
    return bool(heads) and all(f"blk.{layer}.{_PROJECTION}" in opened.tensors for layer in heads)


def companion_of(target: Gguf) -> Path | None:
    """The companion with MTP heads next to a target's file, of the same architecture and sizes; None if absent."""
    for found in companions(target.path):
        try:
            theirs = Gguf(found)
        except CheckpointError:
            continue  # a broken file next to the target is ignored
        if is_companion(theirs) and holds_heads(theirs) and _sizes(theirs) == _sizes(target):
            return found
    return None


def _sizes(file: Gguf) -> list[object]:
    name = file.metadata.get("general.architecture")
    embedding = file.tensors.get("token_embd.weight")
    layers = int(heads_of(file).start) or file.metadata.get(f"{name}.block_count")
    return [name, layers, None if embedding is None else embedding.shape]


def read_heads(file: Path, target: Target, block: Mapping[str, Sequence[int]]) -> list[dict[str, Tensor]]:
    """The tensors of each head in a file, under native names, with those of its layer under the names in `block`.

    `block` has the shapes of a layer's parameters.

    Raises DrafterMismatchError for heads of another model, CheckpointError or ModelError for tensors that a head
    doesn't have or that don't fit each other.
    """
    opened = Gguf(file)
    config = _check_model(opened, target)
    layout = layout_of(str(opened.metadata["general.architecture"]), config.get_text_config().to_dict())
    if layout is None:
        raise CheckpointError(f"{file}: eyas knows no MTP heads of its architecture")
    heads = heads_of(opened)
    placed = [name for name in opened.tensors if (layer := LAYER.match(name)) is not None and int(layer[1]) in heads]
    read = []
    for number in heads:
        prefix = f"blk.{number}."
        mine = [name for name in placed if name.startswith(prefix)]
        names = {prefix + tensor: name for name in block for tensor in _tensors(layout, name)}
        if left := [name for name in mine if name not in names and name.removeprefix(prefix) not in _OUTER]:
            raise CheckpointError(f"{file} holds {len(left)} tensors that an MTP head has no place for: {left[:3]}")
        check_parts(opened, {name: names[name] for name in mine if name in names}, block)
        tensors = read_tensors(opened, [name for name in mine if name in names], layout, names)
        outer = {tensor: name for tensor, name in _OUTER.items() if prefix + tensor in opened.tensors}
        tensors |= {
            name: opened.load(prefix + tensor)
            for tensor, name in outer.items()
            if not any(opened.same(prefix + tensor, other) for other in _FALLBACKS.get(name, ()))
        }
        if "norm.weight" not in tensors and "output_norm.weight" in opened.tensors:
            tensors["norm.weight"] = opened.load("output_norm.weight")
        read.append(tensors)
    return read


def _tensors(layout: TensorLayout, name: str) -> tuple[str, ...]:
    """The tensors of a parameter of a head's layer; Nemotron's second layer has its own norm in the same block."""
    number, dot, rest = name.partition(".")
    if not (dot and number.isdecimal()):
        return layout.tensors(name)
    return ("post_attention_norm.weight",) if number == "1" and rest == "norm.weight" else layout.tensors(rest)


def _check_model(opened: Gguf, target: Target) -> Any:
    """The config of the model that a file's heads draft for. Raises DrafterMismatchError if that isn't the target."""
    config = Model.read(opened).config()
    theirs = target.config
    different = [
        f"{what} {ours!r}, and the target's is {other!r}"
        for what, ours, other in (
            ("type", config.model_type, theirs.model_type),
            ("layers", config.num_hidden_layers, theirs.num_hidden_layers),
            ("width", config.hidden_size, theirs.hidden_size),
            ("vocabulary", config.vocab_size, theirs.vocab_size),
            ("RoPE", _theta(config), _theta(theirs)),
        )
        if ours != other
    ]
    if different:
        raise DrafterMismatchError(
            f"the MTP heads in {opened.path} are of another model: {'; '.join(different)}. Use the target's own"
        )
    return config


def _theta(config: Any) -> object:
    rope = getattr(config, "rope_parameters", None) or {}
    return rope.get("rope_theta")
