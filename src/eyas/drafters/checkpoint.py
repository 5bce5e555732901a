"""Drafter directories: config.json + safetensors, every kind; loading is strict.

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

from eyas.drafters.config import DrafterConfig
from eyas.drafters.files import read_json, read_tensors
from eyas.drafters.kinds import Kind, file_name, kind_for, kind_of, tensor_name
from eyas.drafters.network import DraftNetwork
from eyas.errors import CheckpointError
from eyas.target import Target

CONFIG, WEIGHTS = "config.json", "model.safetensors"
PROVENANCE = "eyas"
"""The key of config.json under which a drafter says where it comes from."""


def load_network(
    path: Path,
    target: Target | None = None,
    *,
    weights: str | None = None,
    ignore: Collection[str] = (),
) -> DraftNetwork:
    """The drafter in directory `path`, float tensors in the file's dtype.

    `target` lends its embedding and head to a file without its own. `weights` names a weight file other than the
    default, `ignore` config keys to overlook. Raises CheckpointError and ConfigError.
    """
    raw = read_json(path / CONFIG)
    found = read_tensors(path, weights)
    if twice := sorted(name for name in found if tensor_name(name) != name and tensor_name(name) in found):
        also = ", ".join(sorted({tensor_name(name).split(".")[0] for name in twice}))
        raise CheckpointError(f"{path} names the same tensors twice, also as {also}.*: {', '.join(twice)}")
    kind = kind_of(raw, found, str(path))
    tensors = {tensor_name(name): t for name, t in found.items() if not computed(name)}
    config = kind.read(raw, str(path / CONFIG), ignore, tensors)
    _complete_vocabulary(tensors, config, path)
    _check(tensors, expected_tensors(kind, config), path)
    network = kind.network(config)  # off the meta device: RoPE tables are computed, not loaded
    network.load_state_dict(tensors, assign=True)
    if "shared" in (config.embedding, config.head):
        if target is None:
            part = "embed_tokens.weight" if config.embedding == "shared" else "lm_head.weight"
            raise CheckpointError(f"{path} has no {part} and no target was given to share its own")
        network.borrow(target)
    return network.eval().requires_grad_(False)


def recorded_target(path: Path) -> str | None:
    """The fingerprint of the target that the drafter in `path` says it was trained for."""
    provenance = read_json(path / CONFIG).get(PROVENANCE)
    found = provenance.get("target_fingerprint") if isinstance(provenance, dict) else None
    return found if isinstance(found, str) else None


def save_network(network: DraftNetwork, path: Path, provenance: Mapping[str, Any] | None = None) -> None:
    """Write `path`; config.json is written last, so a directory with one is whole."""
    path.mkdir(parents=True, exist_ok=True)
    kind = kind_for(network.config)
    tensors = {
        file_name(name, kind): t.detach().cpu().contiguous()
        for name, t in network.state_dict().items()
        if name not in ("d2t", "t2d") or kind.full_map or network.config.draft_vocab_size < network.config.vocab_size
    }
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
    config = kind.write(network.config) | {"dtype": str(network.dtype).removeprefix("torch.")}
    if provenance is not None:
        config[PROVENANCE] = dict(provenance)
    partial = path / (CONFIG + ".partial")
    partial.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    partial.replace(path / CONFIG)


def expected_tensors(kind: Kind, config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors a drafter of this config has, the vocabulary map included."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in kind.network(config).state_dict().items()}


def computed(name: str) -> bool:
    """Is this a table that some checkpoints store and everyone computes?"""
    return name.endswith("rotary_emb.inv_freq")


def _check(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], path: Path) -> None:
    missing, extra = sorted(set(expected) - set(tensors)), sorted(set(tensors) - set(expected))
    if missing or extra:
        raise CheckpointError(
            f"{path} does not hold the tensors its config.json asks for.\n  missing: {', '.join(missing) or 'none'}\n"
            f"  extra: {', '.join(extra) or 'none'}\n"
            "Check the number of layers, the norms and the biases there."
        )
    wrong = [
        f"{name} is {list(tensors[name].shape)}, the config says {list(shape)}"
        for name, shape in expected.items()
        if tensors[name].shape != shape
    ]
    if wrong:
        raise CheckpointError(f"{path} has tensors of the wrong shape:\n  " + "\n  ".join(wrong))


def _complete_vocabulary(tensors: dict[str, Tensor], config: DrafterConfig, path: Path) -> None:
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
