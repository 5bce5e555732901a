"""Training state on disk: safetensors and JSON only. `state.json` is replaced last and names the files it goes with.

So a run killed or out of disk at any moment finds its last whole state. Tensors are stored whole, whatever the number
of processes: a run may go on with another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from eyas.errors import CheckpointError
from eyas.files import remove_leftovers, write_json, writing_path
from eyas.train.loop.distributed import Team, like, whole

META = "state.json"


class TrainingProgress(NamedTuple):
    """How far a run is."""

    step: int = 0
    seconds: float = 0.0  # of training, over all resumptions


def save_state(
    folder: Path,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    progress: TrainingProgress,
    identity: Mapping[str, Any],
    team: Team,
) -> None:
    """Replace the state in `folder`; `identity` says which run it belongs to. All processes call it, rank 0 writes."""
    weights = {name: _stored(p) for name, p in trained(model).items()}
    tensors: dict[str, Tensor] = {}
    groups: list[list[dict[str, Any]]] = []
    for number, optimizer in enumerate(optimizers):
        state = optimizer.state_dict()
        groups.append([{k: v for k, v in group.items() if k != "params"} for group in state["param_groups"]])
        for index, values in state["state"].items():
            for key, value in values.items():
                tensors[f"{number}.{index}.{key}"] = _stored(value)
    if not team.leads:
        return
    files = {
        "weights": f"weights-{progress.step:06d}.safetensors",
        "optimizer": f"optimizer-{progress.step:06d}.safetensors",
    }
    meta = {**progress._asdict(), "files": files, "identity": dict(identity), "groups": groups}
    try:
        write_tensors(folder / files["weights"], weights)
        write_tensors(folder / files["optimizer"], tensors)
        write_json(folder / META, meta)
    finally:  # after a failure the state named before is still there, and what was half-written goes
        _remove_unnamed(folder)


def load_state(
    folder: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], identity: Mapping[str, Any]
) -> TrainingProgress:
    """Put a saved state back in place; refuse a state of another run. Without a state: the beginning."""
    if not (folder / META).exists():
        return TrainingProgress()
    meta = _read_meta(folder)
    was = meta["identity"]
    changed = sorted(key for key in identity.keys() | was.keys() if identity.get(key) != was.get(key))
    if changed:
        raise CheckpointError(
            f"{folder} was written with other settings ({', '.join(changed)}); "
            "use the old settings to resume, or another output folder to start anew"
        )
    weights, tensors = (_read(folder / meta["files"][name]) for name in ("weights", "optimizer"))
    own = trained(model)
    if weights.keys() != own.keys():
        raise CheckpointError(f"{folder} names other weights: {sorted(weights.keys() ^ own.keys())[:5]}")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(like(weights[name], tensor))
    for number, optimizer in enumerate(optimizers):
        _restore(optimizer, number, tensors, meta["groups"][number])
    return TrainingProgress(int(meta["step"]), float(meta["seconds"]))


def saved_identity(folder: Path) -> dict[str, Any]:
    """The identity of the run whose state is in `folder`; empty without a state."""
    return dict(_read_meta(folder)["identity"]) if (folder / META).exists() else {}


def trained(model: nn.Module) -> dict[str, Tensor]:
    """Parameters that train, by name; tied ones once."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Replace a safetensors file; OSError if the disk doesn't take it."""
    with writing_path(path) as file:
        try:
            save_file(dict(tensors), file)
        except SafetensorError as error:  # it wraps the operating system's error
            raise OSError(f"can't write {path}: {error}") from error


def _restore(
    optimizer: torch.optim.Optimizer, number: int, tensors: Mapping[str, Tensor], groups: list[dict[str, Any]]
) -> None:
    params = [p for group in optimizer.param_groups for p in group["params"]]
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        owner, index, key = name.split(".", 2)
        if int(owner) == number:
            model = params[int(index)]
            state.setdefault(int(index), {})[key] = like(tensor, model) if tensor.shape == model.shape else tensor
    own = optimizer.state_dict()["param_groups"]
    for group, saved in zip(own, groups, strict=True):
        group.update(saved)
    optimizer.load_state_dict({"state": state, "param_groups": own})


def _stored(value: Tensor) -> Tensor:
    return whole(value.detach()).cpu().contiguous()


def _read_meta(folder: Path) -> dict[str, Any]:
    try:
        meta: dict[str, Any] = json.loads((folder / META).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{folder} holds no readable training state: {error}") from error
    if not {"step", "seconds", "files", "identity", "groups"} <= meta.keys():
        raise CheckpointError(f"{folder / META} is no training state of this version of eyas: use another folder")
    return meta


def _read(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"can't read the training state {path}: {error}") from error


def _remove_unnamed(folder: Path) -> None:
    remove_leftovers(folder)
    named = {META, *(_read_meta(folder)["files"].values() if (folder / META).exists() else ())}
    for path in folder.iterdir():
        if path.name not in named and path.is_file():
            path.unlink()
