"""The search for the reading that the weights were trained for, and the changes that it tries.

Every other reading is tried on a part of the answers, and on all of them if it may still be the best. The best winner
is adopted, and the search continues from it, so that several faults are found one after another. Changes that were
clearly worse are not tried again: one that does harm while another fault remains isn't needed.

Some changes concern the config: taps and their order, norms, RoPE, whose embedding and head are used, and blocks.
Others concern the tensors, and undo possible mistakes of converters: maps, layouts, orders and names.

Shapes: N heads, D head size, H hidden.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import torch
from torch import Tensor

from eyas.doctor.measure import Aspect, Change, Gain, Measurement, Reading, Transcript, gain, measure
from eyas.drafters.block.network import BlockConfig
from eyas.drafters.checkpoint import names_tokens
from eyas.drafters.config import FusedTapsConfig, GroupedConfig, MaskedConfig, TransformerConfig
from eyas.drafters.formats.decoder import read_rope
from eyas.drafters.formats.fields import Fields
from eyas.drafters.formats.gguf_layout import to_halves, to_interleaved
from eyas.drafters.formats.tensor_names import EMBEDDING, is_head
from eyas.errors import ConfigError
from eyas.targets import Target

THETAS = (10000.0, 500000.0, 1000000.0)
"""RoPE thetas of common models, which are tried in addition to the target's."""
_ALL_ORDERS = 3
"""Maximum number of taps for which every order is tried; for more, only reversal and swaps of neighbors."""
_SPECIAL = ("pad", "eos", "bos", "unk")
_BLOCK_SIZES = (8, 16)
"""Sizes of published blocks, which are tried in addition to one more and one less than the file's."""


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
    orders = permutations(read) if len(read) <= _ALL_ORDERS else _neighbors_swapped(read)
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
    """The target's special tokens, the neighbors of the token in the file, and the ends of the vocabulary."""
    config = reading.config
    if not isinstance(config, MaskedConfig):
        return
    read = config.mask_token_id
    last = config.vocab_size - 1
    found: dict[int, str] = {}
    for name in _SPECIAL:
        written = getattr(target.config, f"{name}_token_id", None)
        for token in written if isinstance(written, list) else [written]:
            if isinstance(token, int):
                found.setdefault(token, f"the target's {name} token")
    neighbors = ((read + 1, "one more"), (read - 1, "one less"))
    for token, what in ((last, "the last token"), (0, "the first token"), *neighbors):
        found.setdefault(token, what)
    for token, what in found.items():
        if token != read and 0 <= token <= last:
            yield _setting("mask token", f"{token}: {what}", "mask_token_id", token)


def anchor(reading: Reading, target: Target) -> Iterator[Change]:  # noqa: ARG001
    """Every slot, the anchor's too, predicts the next token; or each predicts its own, and the anchor's nothing."""
    config = reading.config
    if isinstance(config, BlockConfig):
        other = not config.sample_from_anchor
        what = "the token after it, the anchor's slot too" if other else "its own token, the anchor's slot nothing"
        yield _setting("anchor", f"a slot predicts {what}", "sample_from_anchor", other)


def block_size(reading: Reading, target: Target) -> Iterator[Change]:  # noqa: ARG001
    """Blocks of one slot more or less, and of published sizes unless they are smaller than that."""
    config = reading.config
    if isinstance(config, BlockConfig):
        read = config.block_size
        for size in sorted({read - 1, read + 1, *_BLOCK_SIZES} - {read}):
            if size >= max(2, read - 1):
                yield _setting("block size", f"{size} slots", "block_size", size)


def _neighbors_swapped(read: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
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
    kind = section["rope_type"]
    theta = f"theta {section['rope_theta']:g}"
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


def vocabulary(reading: Reading, target: Target) -> Iterator[Change]:  # noqa: ARG001
    """`d2t` holds target ids that were read as offsets, or offsets that were read as target ids."""
    d2t = reading.tensors["d2t"]
    config = reading.config
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
    """In tensors that read state and embedding concatenated, the two are in the other order."""
    names = [name for name in reading.kind.paired_inputs if name in reading.tensors]
    if reading.config.embedding == "none" or not names:
        return
    repair = f"swap the two halves of the columns of {', '.join(names)}"

    def swapped(weight: Tensor) -> Tensor:  # [., 2H]
        return weight.roll(weight.shape[1] // 2, dims=1)

    yield Change("input order", "state first, then embedding", repair, _each(names, swapped))


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


def centered_norms(reading: Reading, target: Target) -> Iterator[Change]:  # noqa: ARG001
    """Norm weights are stored minus 1, as in Gemma's models."""
    names = [name for name in reading.tensors if name.endswith("norm.weight")]
    if names:
        repair = "add 1 to the weights of all norms"
        yield Change("norm weights", "stored minus 1, as in Gemma", repair, _each(names, lambda weight: weight + 1))


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


PART = 4
"""Readings are first tried on one in this many answers."""
_SURE = 3.0
"""Standard errors by which the gain measured on that part may be off."""
MAX_FAULTS = 4
"""Maximum number of faults that are searched for, one after another."""

ASPECTS: tuple[Aspect, ...] = (
    taps,
    tap_order,
    norms,
    rope,
    ownership,
    rotary_pairs,
    mask_token,
    anchor,
    block_size,
    vocabulary,
    rotary_layout,
    input_order,
    swapped_norms,
    centered_norms,
)
"""The aspects that may have been misread, in the order in which they are tried."""

Progress = Callable[[str, int, int | None], None]
"""Called with the stage's name, the number of its steps done, and their total (None if unknown)."""


@dataclass(frozen=True)
class TriedChange:
    """A change of a reading and its gain."""

    change: Change
    gain: Gain
    accepted: tuple[float, ...]
    """Acceptance rate by chain position; for a change dropped early, the base's plus the difference on the part,
    clamped to [0, 1]."""
    wins: bool
    """Whether the gain is convincing."""


@dataclass(frozen=True)
class Adopted:
    """A change that won, and the measurement of the reading with it."""

    trial: TriedChange
    measured: Measurement


@dataclass(frozen=True)
class SearchResult:
    """The best reading and how it was found."""

    as_is: Measurement
    """Measurement of the reading that the search began with."""
    tried: tuple[TriedChange, ...]
    """All changes of that reading that were tried."""
    adopted: tuple[Adopted, ...]
    """The changes that led to the best reading, in order."""
    reading: Reading
    """The best reading, which may be the one that the search began with."""
    measured: Measurement
    """Measurement of the best reading on all answers."""


class ReadingSearch:
    """Searches the readings of one drafter on one transcript, with chains of `length` tokens."""

    def __init__(self, target: Target, transcript: Transcript, length: int, progress: Progress = lambda *_: None):
        self._target = target
        self._length = length
        self._progress = progress
        self._whole = transcript
        self._part = transcript.every(PART) if len(transcript.tokens) >= 2 * PART else transcript
        self._given_up: set[tuple[str, str]] = set()

    def measure(self, reading: Reading) -> Measurement:
        """Measure the reading on all answers."""
        return measure(reading, self._whole, self._target, self._length)

    def run(self, reading: Reading) -> SearchResult:
        """Search from `reading`, the one with which eyas loads the files, until no change wins."""
        as_is = here = self.measure(reading)
        adopted: list[Adopted] = []
        first: tuple[TriedChange, ...] = ()
        while len(adopted) < MAX_FAULTS:
            trials = self._try_all(reading, here, [each.trial.change.aspect for each in adopted])
            first = first or tuple(trials)
            winners = [trial for trial in trials if trial.wins]
            if not winners:
                break
            best = max(winners, key=lambda trial: trial.gain.mean)
            reading = best.change.apply(reading)
            here = self.measure(reading)
            adopted.append(Adopted(best, here))
        return SearchResult(as_is, first, tuple(adopted), reading, here)

    def _try_all(self, reading: Reading, base: Measurement, settled: list[str]) -> list[TriedChange]:
        """Try all changes of `reading` except in `settled` aspects; `base` is its measurement on all answers."""
        found = other_readings(reading, self._target, settled)
        changes = [change for change in found if (change.aspect, change.name) not in self._given_up]
        before = measure(reading, self._part, self._target, self._length)
        on_part = []
        for number, change in enumerate(changes):
            self._progress(f"readings, round {len(settled) + 1}", number, len(changes))
            other = measure(change.apply(reading), self._part, self._target, self._length)
            on_part.append((change, other, gain(other, before)))
        # measure on all answers only the changes that may gain more than the best one certainly does
        least = max((gained.mean - _SURE * gained.error for _, _, gained in on_part), default=0.0)
        trials = []
        for change, other, gained in on_part:
            most = gained.mean + _SURE * gained.error
            if most < 0:
                self._given_up.add((change.aspect, change.name))
            if gained.error and most >= max(least, 0.0):
                whole = self.measure(change.apply(reading))
                final = gain(whole, base)
                trials.append(TriedChange(change, final, whole.accepted, final.convincing(len(changes))))
            else:
                shifted = estimated(base.accepted, before.accepted, other.accepted)
                trials.append(TriedChange(change, gained, shifted, wins=False))
        return trials


def estimated(base: Sequence[float], before: Sequence[float], after: Sequence[float]) -> tuple[float, ...]:
    """Acceptance on all answers, from `base` without the change and `before` and `after` it on a part of them."""
    moved = (whole + new - old for whole, old, new in zip(base, before, after, strict=True))
    return tuple(min(max(rate, 0.0), 1.0) for rate in moved)


def other_readings(reading: Reading, target: Target, settled: Collection[str] = ()) -> list[Change]:
    """All changes of a reading, except in `settled` aspects."""
    return [change for aspect in ASPECTS for change in aspect(reading, target) if change.aspect not in settled]


def needed_boundaries(reading: Reading, target: Target) -> set[int]:
    """All boundaries read by a reading, or by any other that the search may reach from it."""
    shifted = [change.apply(reading).taps for change in taps(reading, target)]
    return set(reading.taps).union(*shifted)
