"""config.json of block drafters: which layers have a sliding window, and whether a slot sees later ones.

z-lab's code, vLLM, SGLang and llama.cpp's converter read the same keys, and agree about what is read here; where they
don't, the file is refused, or its reading is reported as a doubt.
"""

from __future__ import annotations

from typing import Any

from eyas.drafters.block.network import BlockConfig
from eyas.drafters.config import DEEPEST, FULL_LAYER, SLIDING_LAYER
from eyas.drafters.formats.fields import Fields
from eyas.errors import ConfigError

_CAUSAL = ("causal", "causal_head", "is_causal")
_LATE = 28
"""The first layer with a window in a Qwen3Config without `layer_types` and `max_window_layers`."""


def read_windows(fields: Fields, nested: dict[str, Any], section: str) -> dict[str, Any]:
    """Take the keys of windows and causality out of a configuration and its `section`: the fields of `BlockConfig`.

    Raises ConfigError for unknown and for contradictory values.
    """
    every = _take(fields, nested, "use_swa", bool, section) or False
    types = _layer_types(fields)
    given = fields.values.get("layer_types") is not None
    fields.values.pop("layer_types", None)
    uses = fields.take("use_sliding_window", bool)
    window = fields.take("sliding_window", int)
    size = _take(fields, nested, "swa_window_size", int, section)
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
    windowed = SLIDING_LAYER in types
    if windowed:
        _check_window(fields, window, every or uses)
    elif window is not None and uses is None and not given:
        raise ConfigError(
            f"{fields.where}: sliding_window is {window}, and nothing says which layers have it: write layer_types, or "
            "set sliding_window to null"
        )
    elif window is not None or size is not None:
        fields.ignored["sliding_window"] = "no layer has a window"
    causal = _causal(fields, nested, section)
    anchored = fields.take("sliding_anchored", bool, default=False)
    found: dict[str, Any] = {"causal": causal or False}
    if not windowed:
        return found
    # as all readers have it: unless the file says so, slots see later ones in full layers only
    return found | {
        "sliding_window": window,
        "layer_types": tuple(types),
        "sliding_causal": causal is None and (given or not every),
        "sliding_anchored": anchored,
    }


def _take(fields: Fields, nested: dict[str, Any], key: str, kind: type, section: str) -> Any:
    """A key of the section, else of the top level. Raises ConfigError if they differ, or for another type."""
    inside, top = nested.pop(key, None), fields.take(key, kind)
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
        count = min(layers, DEEPEST) if isinstance(layers, int) else 0  # the config class refuses other numbers
        if fields.values.get("use_sliding_window") is not True or fields.values.get("sliding_window") is None:
            return [FULL_LAYER] * count
        late = fields.raw.get("max_window_layers")
        late = late if isinstance(late, int) else _LATE
        fields.ignored.pop("max_window_layers", None)
        if count <= late:
            fields.doubts.append(
                f"layer_types is missing: read as layers without a window, as transformers does up to layer {late} "
                "(max_window_layers); if they were trained with one, write layer_types into config.json"
            )
        return [SLIDING_LAYER if layer >= late else FULL_LAYER for layer in range(count)]
    if not isinstance(types, list) or not all(each in (FULL_LAYER, SLIDING_LAYER) for each in types):
        raise ConfigError(f"{fields.where}: layer_types is {types!r}: eyas has {FULL_LAYER} and {SLIDING_LAYER} only")
    if len(types) != layers:
        raise ConfigError(f"{fields.where}: layer_types names {len(types)} layers, and num_hidden_layers is {layers}")
    return list(types)


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


def windows_dict(config: BlockConfig) -> dict[str, Any]:
    """The keys of windows in a config.json that z-lab's readers take; none if no layer has a window.

    Without `is_causal`, slots see later ones in full layers only.
    """
    if config.sliding_window is None:
        return {}
    said = {} if config.sliding_causal else {"is_causal": config.causal}
    anchored = {"sliding_anchored": True} if config.sliding_anchored else {}
    types = list(config.layer_types or ())
    return {
        "sliding_window": config.sliding_window, "use_sliding_window": True, "layer_types": types, **said, **anchored,
    }  # fmt: skip
