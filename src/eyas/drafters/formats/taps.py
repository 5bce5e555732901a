"""Reading the taps (aux hidden states) of a checkpoint: which boundaries its layer numbers mean.

Boundary k is the residual stream entering layer k. Two numberings are written under the same key: boundaries (vLLM,
speculators, llama.cpp, ATOM, and eyas's own key `taps`) and layer outputs (SGLang, SpecForge), where the output of
layer k is boundary k + 1. A file that doesn't show which numbering it uses is read as boundaries, with a doubt in the
report that names both readings.
"""

from __future__ import annotations

from typing import Any

from eyas.drafters.config import MAX_TAPS
from eyas.drafters.formats.fields import Fields
from eyas.errors import ConfigError

IDS = "eagle_aux_hidden_state_layer_ids"

BOUNDARIES = "boundaries: k = the residual entering target layer k"
BLOCK_OUTPUTS = "layer outputs, as DFlash numbers them: k -> boundary k + 1"
OUTPUTS = "layer outputs, as SGLang and SpecForge number them: k -> boundary k + 1"


def read_taps(fields: Fields) -> tuple[int, ...] | None:
    """The boundaries, or None if the file names none; `fields` records how they were read. Raises ConfigError."""
    nested = dict(fields.take("eagle_config", dict, default={}))
    if not nested.pop("use_aux_hidden_state", True):
        raise ConfigError(
            f"{fields.where}: use_aux_hidden_state is false, but an EAGLE-3 drafter reads the target's taps"
        )
    own = _ids(fields, fields.values.pop("taps", None), "taps")
    flat = _ids(fields, fields.values.pop(IDS, None), IDS)
    inner = _ids(fields, nested.pop(IDS, None), f"eagle_config.{IDS}")
    other = _ids(fields, nested.pop("layer_ids", None), "eagle_config.layer_ids")
    _lift(fields, nested)
    found = [ids for ids in (flat, inner, other) if ids is not None]
    if own is not None:
        _agree(fields, [own, *(ids for ids in found if ids != _outputs(own))])
        fields.convention = BOUNDARIES
        return own
    _agree(fields, found)
    if not found:
        return None
    ids = found[0]
    nested_only = flat is None and other is None
    return _interpret(fields, ids, nested_only)


def read_layer_outputs(fields: Fields, nested: dict[str, Any]) -> tuple[int, ...] | None:
    """The boundaries of a block drafter, whose files number layer outputs; None if the file names none.

    `target_layer_ids`, taken from the top level or the section `nested`, holds layer outputs; -1 is the embeddings.
    speculators' `aux_hidden_state_layer_ids` and eyas's own `taps` are boundaries. Raises ConfigError.
    """
    own = _ids(fields, fields.values.pop("taps", None), "taps")
    theirs = _ids(fields, fields.values.pop("aux_hidden_state_layer_ids", None), "aux_hidden_state_layer_ids")
    found = [ids for ids in (own, theirs) if ids is not None]
    for key, written in (
        ("target_layer_ids", fields.values.pop("target_layer_ids", None)),
        ("dflash_config.target_layer_ids", nested.pop("target_layer_ids", None)),
    ):
        numbers = [k + 1 for k in written] if isinstance(written, list) and all(map(_is_number, written)) else written
        outputs = _ids(fields, numbers, key)
        if outputs is not None:
            found.append(outputs)
            fields.convention = BLOCK_OUTPUTS
    _agree(fields, found)
    if own is not None or theirs is not None:
        fields.convention = BOUNDARIES
    return found[0] if found else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _interpret(fields: Fields, ids: tuple[int, ...], nested_only: bool) -> tuple[int, ...]:
    """The boundaries that the numbers under the common key mean, which depends on the project that wrote the file."""
    n = fields.layers
    shifted = tuple(k + 1 for k in ids)
    if nested_only and _is_default(shifted, n):
        fields.convention = OUTPUTS
        fields.notes.append(
            f"taps: {list(ids)} are SpecForge's default layer outputs for a target of {shifted[2] + 3} layers, so "
            f"boundaries {list(shifted)}"
        )
        return shifted
    fields.convention = BOUNDARIES
    if not _is_default(ids, n) and (nested_only or _is_default(shifted, n)):
        fields.doubts.append(
            f"taps {list(ids)} are read as boundaries, as vLLM, ATOM and llama.cpp do; if the file was written for "
            f"SGLang or by SpecForge they are layer outputs, boundaries {list(shifted)}: `eyas doctor` measures "
            'which; "taps": [...] (boundaries) in config.json settles it'
        )
    return ids


def _is_default(taps: tuple[int, ...], layers: int | None) -> bool:
    """Whether these are EAGLE-3's default boundaries [2, n // 2, n - 3] for this target, or for any if unknown."""
    if len(taps) != 3:
        return False
    n = taps[2] + 3 if layers is None else layers
    return n >= 7 and taps == (2, n // 2, n - 3)


def _outputs(taps: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(k - 1 for k in taps)


def _ids(fields: Fields, value: Any, key: str) -> tuple[int, ...] | None:
    """The list of layer numbers under `key`; None if there is none, or an empty one. Raises ConfigError."""
    if value is None or value == []:
        return None
    if (
        not isinstance(value, list | tuple)
        or not 1 <= len(value) <= MAX_TAPS
        or not all(isinstance(k, int) and not isinstance(k, bool) and 0 <= k < 2**20 for k in value)
    ):
        raise ConfigError(f"{fields.where}: {key} must be a list of up to {MAX_TAPS} layer numbers")
    return tuple(value)


def _agree(fields: Fields, found: list[tuple[int, ...]]) -> None:
    if len(set(found)) > 1:
        raise ConfigError(f"{fields.where}: contradicting tap lists {[list(ids) for ids in found]}: keep one")


_FIXED = {
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "next_layer_regular": True,
    "parallel_draft_step": 1,
    "eh_proj_before_attn": False,
    "eagle_decoder_type": "llama",
}
"""Keys by which some exporters describe EAGLE-3, and their only values: any other means another network."""


def _lift(fields: Fields, nested: dict[str, Any]) -> None:
    """Move toggles that some exporters nest, such as norm_before_fc, to the top level. Raises ConfigError."""
    for key, only in _FIXED.items():
        if nested.pop(key, only) != only:
            raise ConfigError(f"{fields.where}: eagle_config.{key} is not {only!r}: that is no EAGLE-3 network")
    if "return_hidden_post_norm" in nested:
        nested.setdefault("norm_output", nested.pop("return_hidden_post_norm"))
    for key, value in nested.items():
        if fields.values.setdefault(key, value) != value:
            raise ConfigError(
                f"{fields.where}: {key} is {fields.values[key]} at the top level and {value} in eagle_config"
            )
