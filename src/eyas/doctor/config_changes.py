"""Changes of a reading's config: taps and their order, norms, RoPE, whose embedding and head are used, and blocks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from typing import Any

from eyas.doctor.reading import Change, Reading
from eyas.drafters.block.network import BlockConfig
from eyas.drafters.config import FusedTapsConfig, MaskedConfig, TransformerConfig
from eyas.drafters.formats.fields import Fields
from eyas.drafters.formats.rope import read_rope
from eyas.drafters.formats.tensor_names import EMBEDDING, is_head
from eyas.errors import ConfigError
from eyas.targets import Target

THETAS = (10000.0, 500000.0, 1000000.0)
"""RoPE thetas of common models, which are tried besides the target's."""
_ALL_ORDERS = 3
"""The most taps of which every order is tried; of more, only reversal and swaps of neighbours."""
_SPECIAL = ("pad", "eos", "bos", "unk")
_BLOCK_SIZES = (8, 16)
"""Sizes of published blocks, which are tried besides one more and one less than the file's."""


def taps(reading: Reading, target: Target) -> Iterator[Change]:
    """Taps one layer later, one layer earlier, or the default; for a single tap, before and after the final norm."""
    read, last = reading.taps, target.final_boundary
    config = reading.config
    found = {
        tuple(k + 1 for k in read): "each one layer later, as if layer outputs were written",
        tuple(k - 1 for k in read): "each one layer earlier",
    }
    if isinstance(config, FusedTapsConfig | BlockConfig):
        found.setdefault(config.default_taps(target.num_layers), "the default for this target")
    else:
        found |= {(last,): "the state after the final norm", (last - 1,): "the state before the final norm"}
    written = not reading.kind.fixed_taps
    for other, what in found.items():
        if other != read and len(other) == len(read) and all(0 <= k <= last for k in other):
            repair = f'"taps": {list(other)}' if written else "none: files of this kind can't express it; train again"
            yield Change("taps", f"{list(other)}: {what}", repair, _taps(other), written)


def tap_order(reading: Reading, target: Target) -> Iterator[Change]:  # noqa: ARG001
    """The same taps, read by `fc` in another order."""
    read = reading.taps
    orders = permutations(read) if len(read) <= _ALL_ORDERS else _neighbours_swapped(read)
    for order in orders:
        if order != read:
            rising = list(order) == sorted(order)
            repair = f'"taps": {list(order)}' + (
                "" if rising else ", or reorder fc's columns for ascending taps, as other engines need them"
            )
            yield Change("tap order", f"fc reads {list(order)}", repair, _taps(order))


def norms(reading: Reading, target: Target) -> Iterator[Change]:  # noqa: ARG001
    """The residual, and the state that is fed back, each taken before or after its norm."""
    if isinstance(reading.config, FusedTapsConfig):
        fed_back = ("norm_output",) if reading.config.guesses is None else ()
        for key in ("norm_before_residual", *fed_back):
            value = not getattr(reading.config, key)
            yield Change(key, str(value).lower(), f'"{key}": {str(value).lower()}', _config({key: value}))


def rope(reading: Reading, target: Target) -> Iterator[Change]:
    """The target's RoPE, common thetas, and the file's own RoPE without scaling."""
    if not isinstance(reading.config, TransformerConfig):
        return
    read = reading.config.rope_parameters
    plain = [{"rope_type": "default", "rope_theta": float(theta)} for theta in (read["rope_theta"], *THETAS)]
    tried = [read]
    for section in (*_sections(target), *plain):
        if section not in tried:
            tried.append(section)
            yield Change("rope", _shown(section), f'"rope_parameters": {json.dumps(section)}', _rope(section, target))


def ownership(reading: Reading, target: Target) -> Iterator[Change]:
    """The target's embedding or head instead of the one in the file."""
    config = reading.config
    for part, names, theirs in (
        ("embedding", [EMBEDDING], target.model.get_input_embeddings()),
        ("head", [name for name in reading.tensors if is_head(name)], target.model.get_output_embeddings()),
    ):
        if getattr(config, part) == "own" and tuple(theirs.weight.shape) == (config.vocab_size, config.hidden_size):
            repair = f"remove {', '.join(names)}, so that the target's is used"
            yield Change(part, "the target's own", repair, _shared(part, names))


def rotary_pairs(reading: Reading, target: Target) -> Iterator[Change]:  # noqa: ARG001
    """For latent attention: the channels of a rotated pair are adjacent, or half a head apart."""
    interleaved = getattr(reading.config, "rope_interleave", None)
    if interleaved is not None:
        value = not interleaved
        repair = f'"rope_interleave": {str(value).lower()}'
        yield Change("rotary layout", repair, repair, _config({"rope_interleave": value}))


def mask_token(reading: Reading, target: Target) -> Iterator[Change]:
    """The target's special tokens, the neighbours of the token in the file, and the ends of the vocabulary."""
    config = reading.config
    if not isinstance(config, MaskedConfig):
        return
    read, last = config.mask_token_id, config.vocab_size - 1
    found: dict[int, str] = {}
    for name in _SPECIAL:
        written = getattr(target.config, f"{name}_token_id", None)
        for token in written if isinstance(written, list) else [written]:
            if isinstance(token, int):
                found.setdefault(token, f"the target's {name} token")
    neighbours = ((read + 1, "one more"), (read - 1, "one less"))
    for token, what in ((last, "the last token"), (0, "the first token"), *neighbours):
        found.setdefault(token, what)
    for token, what in found.items():
        if token != read and 0 <= token <= last:
            yield _setting("mask token", f"{token}: {what}", "mask_token_id", token)


def anchor(reading: Reading, target: Target) -> Iterator[Change]:  # noqa: ARG001
    """Each slot predicts the token after it, the anchor's too; or its own token, and the anchor's none."""
    config = reading.config
    if isinstance(config, BlockConfig):
        other = not config.sample_from_anchor
        what = "the token after it, the anchor's slot too" if other else "its own token, the anchor's slot none"
        yield _setting("anchor", f"a slot predicts {what}", "sample_from_anchor", other)


def block_size(reading: Reading, target: Target) -> Iterator[Change]:  # noqa: ARG001
    """Blocks of one slot more or less, and of published sizes if they aren't smaller than that."""
    config = reading.config
    if isinstance(config, BlockConfig):
        read = config.block_size
        for size in sorted({read - 1, read + 1, *_BLOCK_SIZES} - {read}):
            if size >= max(2, read - 1):
                yield _setting("block size", f"{size} slots", "block_size", size)


def _neighbours_swapped(read: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    yield read[::-1]
    for i in range(len(read) - 1):
        yield (*read[:i], read[i + 1], read[i], *read[i + 2 :])


def _sections(target: Target) -> Iterator[dict[str, Any]]:
    """The target's RoPE sections that a drafter can have, of every attention type, and each without scaling."""
    whole = getattr(target.config, "rope_parameters", None) or {}
    for section in (whole, *(part for part in whole.values() if isinstance(part, dict))):
        if isinstance(section.get("rope_theta"), int | float):
            theta = float(section["rope_theta"])
            yield from _readable({**section, "rope_theta": theta})
            yield {"rope_type": "default", "rope_theta": theta}


def _readable(section: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The section in the form that drafters use; nothing if drafters don't support it."""
    try:
        yield read_rope(Fields({"rope_parameters": dict(section)}, "the target"))
    except ConfigError:  # for example if only some of the channels are rotated
        return


def _shown(section: Mapping[str, Any]) -> str:
    kind, theta = section["rope_type"], f"theta {section['rope_theta']:g}"
    return theta + (", unscaled" if kind == "default" else f", {kind} by {section.get('factor', 'its factors')}")


def _setting(aspect: str, name: str, key: str, value: Any) -> Change:
    return Change(aspect, name, f'"{key}": {str(value).lower()}', _config({key: value}))


def _taps(value: tuple[int, ...]) -> Any:
    return lambda reading: reading.changed(taps=value)


def _config(values: Mapping[str, Any]) -> Any:
    return lambda reading: reading.changed(values)


def _rope(section: dict[str, Any], target: Target) -> Any:
    def apply(reading: Reading) -> Reading:
        longest = max(getattr(reading.config, "max_position_embeddings", 0), target.max_length or 0)
        return reading.changed({"rope_parameters": section, "max_position_embeddings": longest})

    return apply


def _shared(part: str, names: Sequence[str]) -> Any:
    return lambda reading: reading.changed({part: "shared"}, dict.fromkeys(names))
