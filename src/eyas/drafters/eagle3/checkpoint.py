"""EAGLE-3 directories: config.json + safetensors, `midlayer.*` or `layers.0.*`; loading is strict.

Every tensor is placed, every shape checked, nothing stays uninitialised. Only the embedding and the head may be
absent: they are then the target's.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eyas.drafters.eagle3.config import Eagle3Config, config_from_dict, config_to_dict
from eyas.drafters.eagle3.module import Eagle3Module
from eyas.drafters.files import read_json, read_tensors
from eyas.errors import CheckpointError

_MIDLAYER, _FIRST = "midlayer.", "layers.0."


def load_module(
    path: Path,
    *,
    shared: Mapping[str, Tensor] | None = None,
    weights: str | None = None,
    ignore: Collection[str] = (),
) -> Eagle3Module:
    """The drafter in directory `path`, float tensors in the file's dtype.

    `shared` holds the target's `embed_tokens.weight` [V, Ht] and `lm_head.weight` [V, Ht] for files without their own.
    `weights` names a weight file other than the default, `ignore` config keys to overlook.
    """
    config = config_from_dict(read_json(path / "config.json"), str(path / "config.json"), ignore)
    found = read_tensors(path, weights)
    if twice := sorted(name for name in found if internal_name(name) != name and internal_name(name) in found):
        raise CheckpointError(f"{path} names the same tensors twice, also as {_FIRST}*: {', '.join(twice)}")
    tensors = {internal_name(name): t for name, t in found.items() if not name.endswith("rotary_emb.inv_freq")}
    _complete_vocabulary(tensors, config, path)
    _borrow(tensors, shared or {}, config, path)
    with torch.device("meta"):
        module = Eagle3Module(config)
    expected = module.state_dict()
    missing, extra = sorted(set(expected) - set(tensors)), sorted(set(tensors) - set(expected))
    if missing or extra:
        raise CheckpointError(
            f"{path} does not hold the tensors its config.json asks for.\n  missing: {', '.join(missing) or 'none'}\n"
            f"  extra: {', '.join(extra) or 'none'}\n"
            "Check num_hidden_layers, fc_norm, norm_before_fc and the biases there."
        )
    wrong = [
        f"{name} is {list(tensors[name].shape)}, the config says {list(tensor.shape)}"
        for name, tensor in expected.items()
        if tensors[name].shape != tensor.shape
    ]
    if wrong:
        raise CheckpointError(f"{path} has tensors of the wrong shape:\n  " + "\n  ".join(wrong))
    module = Eagle3Module(config)  # again, off the meta device: RoPE tables are computed, not loaded
    module.load_state_dict(tensors, assign=True)
    return module.eval().requires_grad_(False)


def save_module(module: Eagle3Module, path: Path, provenance: Mapping[str, Any] | None = None) -> None:
    """Write `path` in the `midlayer.*` layout; config.json is written last, so a directory with one is whole."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = {_external(name): t.detach().cpu().contiguous() for name, t in module.state_dict().items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = config_to_dict(module.config) | {"dtype": str(module.fc.weight.dtype).removeprefix("torch.")}
    if provenance is not None:
        config["eyas"] = dict(provenance)
    partial = path / "config.json.partial"
    partial.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    partial.replace(path / "config.json")


def internal_name(name: str) -> str:
    """A checkpoint's tensor name in the `layers.{i}.*` layout."""
    return _FIRST + name.removeprefix(_MIDLAYER) if name.startswith(_MIDLAYER) else name


def _external(name: str) -> str:
    return _MIDLAYER + name.removeprefix(_FIRST) if name.startswith(_FIRST) else name


def _complete_vocabulary(tensors: dict[str, Tensor], config: Eagle3Config, path: Path) -> None:
    """Fill in an identity map, derive t2d, and refuse a map that points outside or twice at one token."""
    full, draft = config.vocab_size, config.draft_vocab_size
    if "d2t" not in tensors:
        if draft != full:
            raise CheckpointError(
                f"{path}: draft_vocab_size {draft} of {full}, but no d2t tensor maps it: re-export it"
            )
        tensors["d2t"] = torch.zeros(draft, dtype=torch.int64)
    d2t = tensors["d2t"] = tensors["d2t"].to(torch.int64)
    if d2t.shape != (draft,):
        raise CheckpointError(f"{path}: d2t is {list(d2t.shape)}, the config says draft_vocab_size {draft}")
    ids = d2t + torch.arange(draft)
    if int(ids.min()) < 0 or int(ids.max()) >= full or len(set(ids.tolist())) != draft:
        raise CheckpointError(f"{path}: d2t must map to {draft} different tokens below {full} (id = draft id + d2t)")
    covered = torch.zeros(full, dtype=torch.bool)
    covered[ids] = True
    if not torch.equal(tensors.setdefault("t2d", covered).to(torch.bool), covered):
        raise CheckpointError(f"{path}: t2d and d2t name different tokens: the vocabulary map is damaged")
    tensors["t2d"] = covered


def _borrow(tensors: dict[str, Tensor], shared: Mapping[str, Tensor], config: Eagle3Config, path: Path) -> None:
    """Use the target's embedding and head where the file has none; they must be of the drafter's size."""
    for name in ("embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            continue
        if name not in shared:
            raise CheckpointError(f"{path} has no {name} and no target was given to share its own")
        weight = shared[name]
        if weight.shape != (config.vocab_size, config.hidden_size):
            raise CheckpointError(
                f"{path} has no {name}, and the target's is {' x '.join(map(str, weight.shape))} where the drafter "
                f"needs {config.vocab_size} x {config.hidden_size}: use the target it was trained for"
            )
        ids = tensors["d2t"] + torch.arange(config.draft_vocab_size)
        tensors[name] = weight[ids.to(weight.device)] if name == "lm_head.weight" else weight
