"""Training state on disk: safetensors and JSON only, written beside and renamed, so nobody reads half."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from eyas.errors import CheckpointError

WEIGHTS, STATE, META = "weights.safetensors", "optimizer.safetensors", "state.json"


def save_state(
    folder: Path,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    step: int,
    fingerprint: dict[str, Any],
) -> None:
    """Replace `folder` by the state after `step` steps; `fingerprint` says which run it belongs to."""
    beside = folder.with_name(folder.name + ".new")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    save_file(trained_tensors(model), beside / WEIGHTS)
    tensors: dict[str, Tensor] = {"rng": torch.get_rng_state()}
    groups: list[list[dict[str, Any]]] = []
    for number, optimizer in enumerate(optimizers):
        state = optimizer.state_dict()
        groups.append([{k: v for k, v in group.items() if k != "params"} for group in state["param_groups"]])
        for index, values in state["state"].items():
            for key, value in values.items():
                tensors[f"{number}.{index}.{key}"] = value.contiguous()
    save_file(tensors, beside / STATE)
    meta = {"step": step, "fingerprint": fingerprint, "groups": groups}
    (beside / META).write_text(json.dumps(meta, indent=2), encoding="utf-8")
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        os.replace(folder, old)
    os.replace(beside, folder)
    shutil.rmtree(old, ignore_errors=True)


def load_state(
    folder: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], fingerprint: dict[str, Any]
) -> int:
    """Put a saved state back in place and return its step; refuse a state of another run."""
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{folder} holds no readable training state: {error}") from error
    changed = sorted(
        key
        for key in fingerprint.keys() | meta["fingerprint"].keys()
        if fingerprint.get(key) != meta["fingerprint"].get(key)
    )
    if changed:
        raise CheckpointError(
            f"{folder} was written with other settings ({', '.join(changed)}); "
            "use the old settings to resume, or another output folder to start anew"
        )
    weights = load_file(folder / WEIGHTS)
    own = trained_tensors(model)
    if weights.keys() != own.keys():
        raise CheckpointError(f"{folder} names other weights: {sorted(weights.keys() ^ own.keys())[:5]}")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(weights[name])
    tensors = load_file(folder / STATE)
    for number, optimizer in enumerate(optimizers):
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name != "rng" and name.startswith(f"{number}."):
                _, index, key = name.split(".", 2)
                state.setdefault(int(index), {})[key] = tensor
        groups = optimizer.state_dict()["param_groups"]
        for group, saved in zip(groups, meta["groups"][number], strict=True):
            group.update(saved)
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    torch.set_rng_state(tensors["rng"])
    return int(meta["step"])


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters that train, by name; tied ones once."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
