"""config.json of drafters with sliding windows: which layers have one, and whether a block's slot sees later ones.

z-lab's code, vLLM, SGLang and llama.cpp's converter read the same keys, and agree about what is read here; where they
don't, the file is refused, or its reading is reported as a doubt.
"""

from __future__ import annotations

from typing import Any

from eyas.drafters.block.network import BlockConfig
from eyas.drafters.config import MAX_LAYERS, WindowedConfig
from eyas.drafters.formats.fields import Fields
from eyas.drafters.window.layers import FULL_LAYER, SLIDING_LAYER
from eyas.errors import ConfigError

ANCHORED = "sliding_anchored"
"""eyas's own key: windows count from where a draft begins, as speculators trains EAGLE-3 and DFlash."""
_CAUSAL = ("causal", "causal_head", "is_causal")
_DEFAULT_MAX_WINDOW_LAYERS = 28
"""The first layer with a window in a Qwen3Config without `layer_types` and `max_window_layers`."""


def read_windows(fields: Fields) -> dict[str, Any]:
    """Take the keys of windows out of a configuration: the fields of `WindowedConfig`, none if no layer has a window.

    Raises ConfigError for unknown and for contradictory values.
    """
    return _read(fields, False, None)


def read_block_windows(fields: Fields, nested: dict[str, Any], section: str) -> dict[str, Any]:
    """Take the keys of windows and causality out of a configuration and its `section`: the fields of `BlockConfig`.

    Raises ConfigError for unknown and for contradictory values.
    """
    every = _take(fields, nested, "use_swa", bool, section) or False
    size = _take(fields, nested, "swa_window_size", int, section)
    given = fields.values.get("layer_types") is not None
    windows = _read(fields, every, size)
    causal = _causal(fields, nested, section)
    if not windows:
        return {"causal": causal or False}
    # as all readers have it: unless the file says so, slots see later ones in full layers only
    return windows | {"causal": causal or False, "sliding_causal": causal is None and (given or not every)}


def _read(fields: Fields, every: bool, size: int | None) -> dict[str, Any]:
    """Take the keys of windows; `every` and `size` are those of z-lab's section, by which all layers may have one."""
    types = _layer_types(fields)
    given = fields.values.pop("layer_types", None) is not None
    uses = fields.take("use_sliding_window", bool)
    window = fields.take("sliding_window", int)
    anchored = fields.take(ANCHORED, bool, default=False)
    if every:
        if given and SLIDING_LAYER not in types:
            raise ConfigError(
                f"{fields.where}: use_swa is true and layer_types names no {SLIDING_LAYER}: vLLM gives every layer a "
                "window then, other readers none; correct one of the two"
            )
        types = types if given else [SLIDING_LAYER] * len(types)
        if None not in (size, window) and size != window:
            raise ConfigError(f"{fields.where}: swa_window_size is {size} and sliding_window {window}: keep one")
        window = window if size is None else size
    if SLIDING_LAYER in types:
        _check_window(fields, window, every or uses)
        return {"sliding_window": window, "layer_types": tuple(types), ANCHORED: anchored}
    if anchored:
        raise ConfigError(f"{fields.where}: {ANCHORED} is true, but no layer has a window")
    # only Qwen3's layers get types from other keys
    if window is not None and not given and (uses is None or (uses and fields.raw.get("model_type") == "llama")):
        raise ConfigError(
            f"{fields.where}: sliding_window is {window}, and nothing says which layers have it: write layer_types, or "
            "set sliding_window to null"
        )
    if window is not None or size is not None:
        fields.ignored["sliding_window"] = "no layer has a window"
    return {}


def _take(fields: Fields, nested: dict[str, Any], key: str, kind: type, section: str) -> Any:
    """A key of the section, else of the top level. Raises ConfigError if they differ, or for another type."""
    inside = nested.pop(key, None)
    top = fields.take(key, kind)
    if inside is None:
        return top
    if not isinstance(inside, kind) or isinstance(inside, bool) is not (kind is bool):
        raise ConfigError(f"{fields.where}: {section}.{key} is {inside!r}")
    if top not in (None, inside):
        raise ConfigError(f"{fields.where}: {key} is {top} at the top level and {inside} in {section}")
    return inside


def _layer_types(fields: Fields) -> list[str]:
    """The type of each layer. Raises ConfigError for unknown ones, or another number of them."""
    layers = fields.values.get("num_hidden_layers", 1)
    types = fields.values.get("layer_types")
    if types is None:
        count = min(layers, MAX_LAYERS) if isinstance(layers, int) else 0  # the config class refuses other numbers
        if fields.values.get("use_sliding_window") is not True or fields.values.get("sliding_window") is None:
            return [FULL_LAYER] * count
        late = fields.raw.get("max_window_layers")
        late = late if isinstance(late, int) else _DEFAULT_MAX_WINDOW_LAYERS
        fields.ignored.pop("max_window_layers", None)
        if count <= late:
            fields.doubts.append(
                f"layer_types is missing: read as layers without a window, as transformers does up to layer {late} "
                "(max_window_layers); if they were trained with one, write layer_types into config.json"
            )
        return [SLIDING_LAYER if layer >= late else FULL_LAYER for layer in range(count)]
    if not isinstance(types, list) or not all(each in (FULL_LAYER, SLIDING_LAYER) for each in types):
        raise ConfigError(f"{fields.where}: layer_types is {types!r}: eyas has {FULL_LAYER} and {SLIDING_LAYER} only")
    if SLIDING_LAYER not in types and isinstance(layers, int) and len(types) >= layers:
        return types[:layers]  # the target's list, in files that copied its configuration: nothing has a window
    if len(types) != layers:
        raise ConfigError(f"{fields.where}: layer_types names {len(types)} layers, and num_hidden_layers is {layers}")
    return types


def _check_window(fields: Fields, window: int | None, uses: bool | None) -> None:
    """Raise ConfigError unless layers with a window have one that is in use."""
    if uses is False:
        raise ConfigError(
            f"{fields.where}: layer_types names layers with a sliding window, but use_sliding_window is false, with "
            "which transformers drops the window; correct one of the two"
        )
    if window is None:
        raise ConfigError(f"{fields.where}: sliding_window is missing, and layer_types names layers with one")
    if uses is None and fields.raw.get("model_type") == "qwen3":
        fields.doubts.append(
            "use_sliding_window is missing: read as true, because layer_types names layers with a window; "
            "transformers' Qwen3Config drops the window then: write it into config.json to settle it"
        )


def _causal(fields: Fields, nested: dict[str, Any], section: str) -> bool | None:
    """What the file says about all layers; None = nothing. Raises ConfigError if it says both."""
    said = {key: fields.take(key, bool) for key in _CAUSAL}
    said |= {f"{section}.{key}": nested.pop(key, None) for key in _CAUSAL}
    said = {key: value for key, value in said.items() if value is not None}
    if not all(isinstance(value, bool) for value in said.values()) or len(set(said.values())) > 1:
        raise ConfigError(f"{fields.where}: {said}: readers take different ones; keep one, true or false")
    return next(iter(said.values()), None)


def windows_dict(config: WindowedConfig) -> dict[str, Any]:
    """The keys of windows in a config.json that other readers take; none if no layer has a window.

    In a block drafter's, without `is_causal`, slots see later ones in full layers only.
    """
    if config.sliding_window is None:
        return {}
    types = list(config.layer_types or ())
    found: dict[str, Any] = {
        "sliding_window": config.sliding_window,
        "use_sliding_window": True,
        "layer_types": types,
    }
    if isinstance(config, BlockConfig) and not config.sliding_causal:
        found["is_causal"] = config.causal
    return found | ({ANCHORED: True} if config.sliding_anchored else {})
