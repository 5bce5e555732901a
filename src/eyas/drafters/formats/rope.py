"""Reading the RoPE section of config.json, which is in one of two places and has old or new names."""

from __future__ import annotations

from typing import Any

from eyas.drafters.formats.fields import Fields
from eyas.errors import ConfigError

_NUMBERS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("original_max_position_embeddings",),
}
"""Every type that eyas computes, with the numbers that it needs."""
_KNOWN = frozenset(
    "rope_type rope_theta factor low_freq_factor high_freq_factor original_max_position_embeddings attention_factor "
    "beta_fast beta_slow mscale mscale_all_dim truncate short_factor long_factor".split()
)
"""The keys of the section whose meaning is known."""
_LARGEST = 1e15
"""No number beyond this is accepted."""
_MULTIMODAL = ("mrope_section", "mrope_interleaved")
"""Keys of rotations with three positions a token, for images. Those of text are equal: that is the plain rotation."""


def read_rope(fields: Fields) -> dict[str, Any]:
    """Read `rope_parameters` (new), or `rope_theta` and `rope_scaling` (old); theta may be in either place.

    Raises ConfigError for what eyas doesn't compute.
    """
    new, old = fields.take("rope_parameters", dict), fields.take("rope_scaling", dict)
    rope = dict(new or old or {})
    flat = fields.values.pop("rope_theta", None)
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = flat
    elif flat is not None and flat != rope["rope_theta"]:
        raise ConfigError(
            f"{fields.where}: rope_theta is {flat} at the top level and {rope['rope_theta']} in the RoPE section: "
            "readers of the two places compute different rotations; keep the one the drafter was trained with"
        )
    if rope["rope_theta"] is None:
        rope["rope_theta"] = fields.defaulted["rope_theta"] = 10000.0
    rope["rope_type"] = rope.pop("type", None) or rope.get("rope_type") or "default"
    if rope["rope_type"] == "mrope":
        rope["rope_type"] = "default"
    for key in _MULTIMODAL:
        if rope.pop(key, None) is not None:
            fields.ignored[key] = "the three positions of a text token are equal"
    _check(rope, fields)
    return rope


def _check(rope: dict[str, Any], fields: Fields) -> None:
    kind, where = rope["rope_type"], fields.where
    for key in sorted(set(rope) - _KNOWN):
        if key not in fields.overlook:
            raise ConfigError(f"{where}: unknown key {key} in the RoPE section: eyas can't tell what it changes")
        del rope[key]
    if not isinstance(kind, str) or kind not in _NUMBERS:
        raise ConfigError(f"{where}: rope_type {kind!r}: eyas computes {', '.join(_NUMBERS)}")
    for key in ("rope_theta", *_NUMBERS[kind]):
        if not _positive(rope.get(key)):
            raise ConfigError(f"{where}: RoPE of type {kind} needs a positive number as {key}, not {rope.get(key)!r}")
    for key, value in rope.items():
        if key == "rope_type" or key in ("short_factor", "long_factor"):
            continue
        if not (value is None or _number(value) or (key == "truncate" and isinstance(value, bool))):
            raise ConfigError(f"{where}: {key} of the RoPE section is {value!r}, which is no number")
    if kind == "llama3" and rope["low_freq_factor"] == rope["high_freq_factor"]:
        raise ConfigError(f"{where}: low_freq_factor and high_freq_factor are equal: between them lies nothing")
    for key in ("short_factor", "long_factor"):
        factors = rope.get(key)
        listed = isinstance(factors, list) and all(_positive(factor) for factor in factors)
        if not listed and (kind == "longrope" or factors is not None):
            raise ConfigError(f"{where}: {key} of the RoPE section is no list of positive numbers")


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


def _positive(value: Any) -> bool:
    return _number(value) and value > 0
