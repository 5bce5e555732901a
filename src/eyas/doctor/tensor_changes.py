"""Changes of a reading's tensors, which undo possible mistakes of converters: maps, layouts, orders and names.

Shapes: N heads, D head size, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from eyas.doctor.reading import Change, Reading
from eyas.drafters.config import FusedTapsConfig, GroupedConfig
from eyas.drafters.formats.gguf_layout import to_halves, to_interleaved
from eyas.drafters.formats.vocabulary import names_tokens
from eyas.targets import Target


def vocabulary(reading: Reading, target: Target) -> Iterator[Change]:  # noqa: ARG001
    """`d2t` holds target ids that were read as offsets, or offsets that were read as target ids."""
    d2t, config = reading.tensors["d2t"], reading.config
    if config.draft_vocab_size == config.vocab_size:
        return
    steps = torch.arange(len(d2t), device=d2t.device)
    for ids, name, repair in (
        (d2t, "target ids, read as offsets", "subtract the index from every entry of d2t"),
        (d2t + 2 * steps, "offsets, read as target ids", "add the index to every entry of d2t"),
    ):
        if names_tokens(ids, config.vocab_size):
            yield Change("d2t", name, repair, _mapped(ids))


def rotary_layout(reading: Reading, target: Target) -> Iterator[Change]:  # noqa: ARG001
    """The rows of queries and keys are in llama.cpp's order (adjacent pairs), or were reordered once too often."""
    config = reading.config
    if not isinstance(config, GroupedConfig) or any(name.endswith("q_norm.weight") for name in reading.tensors):
        return
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for order, name in (
        (to_halves, "adjacent pairs in the file"),
        (to_interleaved, "halves, separated once too often"),
    ):
        repair = "reorder the rows of q_proj and k_proj so that pairs are half a head apart"
        yield Change("rotary layout", name, repair, _rows(heads, order))


def input_order(reading: Reading, target: Target) -> Iterator[Change]:  # noqa: ARG001
    """State and embedding are in the other order in tensors that read both, concatenated."""
    names = [name for name in reading.kind.paired_inputs if name in reading.tensors]
    if reading.config.embedding == "none" or not names:
        return
    repair = f"swap the two halves of the columns of {', '.join(names)}"
    yield Change("input order", "state first, then embedding", repair, _each(names, _halves_swapped))


def swapped_norms(reading: Reading, target: Target) -> Iterator[Change]:  # noqa: ARG001
    """The names of the norms of the first layer's two inputs are swapped."""
    one, other = "layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight"
    if isinstance(reading.config, FusedTapsConfig):
        yield Change(
            "input norms",
            "input_layernorm and hidden_norm swapped",
            "swap the names of the two tensors",
            lambda read: read.changed(tensors={one: read.tensors[other], other: read.tensors[one]}),
        )


def centred_norms(reading: Reading, target: Target) -> Iterator[Change]:  # noqa: ARG001
    """Norm weights are stored minus 1, as in Gemma's models."""
    names = [name for name in reading.tensors if name.endswith("norm.weight")]
    if names:
        yield Change(
            "norm weights", "stored minus 1, as in Gemma", "add 1 to the weights of all norms", _each(names, _plus_one)
        )


def _mapped(ids: Tensor) -> Callable[[Reading], Reading]:
    def apply(reading: Reading) -> Reading:
        d2t, t2d = reading.tensors["d2t"], reading.tensors["t2d"]
        ids_here = ids.to(d2t.device)
        covered = torch.zeros_like(t2d)
        covered[ids_here] = True
        return reading.changed(tensors={"d2t": ids_here - torch.arange(len(d2t), device=d2t.device), "t2d": covered})

    return apply


def _rows(heads: Mapping[str, int], order: Callable[[Tensor, int], Tensor]) -> Callable[[Reading], Reading]:
    def apply(reading: Reading) -> Reading:
        changed: dict[str, Tensor | None] = {
            name: order(tensor, count)
            for part, count in heads.items()
            for name, tensor in reading.tensors.items()
            if f".{part}." in name
        }
        return reading.changed(tensors=changed)

    return apply


def _each(names: list[str], function: Callable[[Tensor], Tensor]) -> Callable[[Reading], Reading]:
    return lambda reading: reading.changed(tensors={name: function(reading.tensors[name]) for name in names})


def _halves_swapped(weight: Tensor) -> Tensor:
    """The weight [., 2H] with the two halves of its columns swapped."""
    return weight.roll(weight.shape[1] // 2, dims=1)


def _plus_one(weight: Tensor) -> Tensor:
    return weight + 1
