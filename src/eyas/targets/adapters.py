"""Adapters (LoRA and the other `peft` methods): found next to a target's weights or alone, and merged at load.

A directory with an `adapter_config.json` is a target with that adapter. Model weights in the same directory are the
base model; otherwise `base_model_name_or_path` names it. The merged model is what runs, so only the fingerprint has to
know about adapters: a fingerprint of merged weights would depend on the dtype they were merged in.
"""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.peft_utils import ADAPTER_CONFIG_NAME, ADAPTER_SAFE_WEIGHTS_NAME

from eyas.assets import named_target
from eyas.errors import ModelError, UnsupportedModelError
from eyas.targets.architecture import decoder_layers
from eyas.targets.fingerprint import keep_fingerprints

_LOG = logging.getLogger("eyas")


@dataclass(frozen=True)
class Adapter:
    """An adapter in a directory."""

    folder: Path
    kind: str
    """Its type as `peft` names it, such as LORA."""
    rank: int | None
    base: str
    """The model that it adapts: any target but another adapter."""

    def __str__(self) -> str:
        rank = "" if self.rank is None else f" of rank {self.rank}"
        return f"{self.kind} adapter{rank} in {self.folder}, for {self.base}"

    @property
    def holds_base(self) -> bool:
        """Whether the directory also holds the base model."""
        return self.base == str(self.folder)

    @property
    def weights(self) -> Path:
        """The file with its weights. Raises ModelError if there is no safetensors file."""
        found: Path = self.folder / ADAPTER_SAFE_WEIGHTS_NAME
        if not found.exists():
            raise ModelError(f"{self.folder} has no {ADAPTER_SAFE_WEIGHTS_NAME}: save the adapter as safetensors")
        return found


def find_adapter(name: str | Path) -> Adapter | None:
    """The adapter in a local directory; None if there is none. Raises ModelError for an unreadable config."""
    folder = Path(named_target(name)).expanduser()
    file = folder / ADAPTER_CONFIG_NAME
    if not file.is_file():
        return None
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        kind = str(config["peft_type"])
        rank = config.get("r")
        base = config.get("base_model_name_or_path")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"can't read the adapter's config {file}: {error}") from error
    if any((folder / weights).exists() for weights in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)):
        base = str(folder)
    if not base:
        raise ModelError(f"{file} names no base model: put its directory or Hub id into base_model_name_or_path")
    return Adapter(folder, kind, rank if isinstance(rank, int) else None, str(base))


def base_of(name: str) -> str:
    """The model that provides the config and weights of `name`: itself, or the base of its adapter (see `find_model`).

    A base may be a GGUF file or `smollm2`, too: then its folder of transformers' files is returned.
    """
    found = find_adapter(name)
    return name if found is None else named_target(found.base)


def tokenizer_source(name: str) -> str:
    """Where the tokenizer of `name` is: next to its adapter if there is one, otherwise with the base model."""
    found = find_adapter(name)
    if found is None or any((found.folder / file).exists() for file in ("tokenizer_config.json", "tokenizer.json")):
        return name
    return base_of(name)


def check_peft(adapter: Adapter) -> None:
    """Raise UnsupportedModelError for an adapter that can't be merged because `peft` isn't installed."""
    if find_spec("peft") is None:
        raise UnsupportedModelError(
            f"{adapter.folder} has a {adapter.kind} adapter, and without the peft library eyas would ignore it: "
            "pip install 'eyas[peft]', or give a directory without adapter_config.json"
        )


def merge_adapter(model: Any, adapter: Adapter, partial: bool = False) -> Any:
    """Return the model with the adapter merged into its weights by `peft`.

    `partial`: the model lacks some of its layers, and the adapter may have weights for those. Raises ModelError and
    UnsupportedModelError.
    """
    check_peft(adapter)
    from peft import PeftConfig, get_peft_model

    layers = decoder_layers(model, model.config.get_text_config().num_hidden_layers)
    keep_fingerprints(model, layers, _digest(adapter))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft uses names that transformers has deprecated
            wrapped = get_peft_model(model, PeftConfig.from_pretrained(str(adapter.folder)))
            found = wrapped.load_adapter(str(adapter.folder), "default", torch_device="cpu")
        if not hasattr(wrapped, "merge_and_unload"):
            raise UnsupportedModelError(f"the {adapter}, can't be merged into weights as LoRA can: use another")
        odd = [*found.missing_keys, *([] if partial else found.unexpected_keys)]
        if odd:
            raise ModelError(f"the {adapter}, doesn't fit: {len(odd)} tensors ({', '.join(sorted(odd)[:3])} ...)")
        merged = wrapped.merge_and_unload()
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, AttributeError, SafetensorError) as error:
        raise ModelError(f"can't merge the {adapter}: {error}") from error
    _LOG.log(logging.WARNING if adapter.holds_base else logging.INFO, "the %s: merged into the weights", adapter)
    return merged


def _digest(adapter: Adapter) -> bytes:
    """A hash of an adapter's weights and settings that ignores where its base model is. Raises ModelError."""
    config = json.loads((adapter.folder / ADAPTER_CONFIG_NAME).read_text(encoding="utf-8"))
    settings = json.dumps({k: v for k, v in config.items() if k != "base_model_name_or_path"}, sort_keys=True)
    return hashlib.sha256(adapter.weights.read_bytes() + settings.encode()).digest()
