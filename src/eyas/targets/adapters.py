"""Adapters (LoRA and the other `peft` methods), merged at load.

A directory with an `adapter_config.json` is a target with that adapter. Model weights in the same directory are the
base model; otherwise `base_model_name_or_path` names it. The merged model is what runs, so only the fingerprint has to
know about adapters: a fingerprint of merged weights would depend on the dtype they were merged in.
"""

from __future__ import annotations

import hashlib
import json
import logging
import warnings
from importlib.util import find_spec
from typing import Any

from safetensors import SafetensorError
from transformers.utils.peft_utils import ADAPTER_CONFIG_NAME

from eyas.errors import ModelError, UnsupportedModelError
from eyas.hub import Adapter
from eyas.targets.architecture import decoder_layers
from eyas.targets.fingerprint import keep_fingerprints

_LOG = logging.getLogger("eyas")


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
