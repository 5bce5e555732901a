"""The training state on disk, from which an interrupted run resumes: weights, optimizer state, progress and settings.

Only safetensors and JSON are used. `state.json` is replaced last and names the files that belong to it, so a run that
is killed or runs out of disk at any moment finds its last complete state. Tensors are stored unsharded, so a run may be
resumed with another number of processes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from eyas.config import differences
from eyas.errors import CheckpointError
from eyas.files import remove_leftovers, write_json, writing_path
from eyas.train.loop.distributed import ProcessGroup, full_tensor, sharded_like

META = "state.json"


class TrainingProgress(NamedTuple):
    """The finished steps of a run, and the seconds spent on them."""

    step: int = 0
    seconds: float = 0.0  # training time, including that before the run was resumed


def save_state(
    folder: Path,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    progress: TrainingProgress,
    identity: Mapping[str, Any],
    processes: ProcessGroup,
) -> None:
    """Replace the state in `folder`. All processes must call this; rank 0 writes.

    `identity` holds the settings that must be equal when the run is resumed.
    """
    weights = {name: _stored(p) for name, p in trained(model).items()}
    tensors: dict[str, Tensor] = {}
    groups: list[list[dict[str, Any]]] = []
    for number, optimizer in enumerate(optimizers):
        state = optimizer.state_dict()
        groups.append([{k: v for k, v in group.items() if k != "params"} for group in state["param_groups"]])
        for index, values in state["state"].items():
            for key, value in values.items():
                tensors[f"{number}.{index}.{key}"] = _stored(value)
    if not processes.is_main:
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
    finally:  # also after a failure, so that half-written files are removed and the previous state stays
        _remove_unnamed(folder)


def load_state(
    folder: Path,
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    identity: Mapping[str, Any],
    recipe_key: Callable[[str], str | None] = lambda _: None,
) -> TrainingProgress:
    """Restore the state in `folder` and return its progress, which is zero steps if there is no state.

    Raises CheckpointError for damaged files, and for the state of a run with other settings, naming these by the keys
    that `recipe_key` returns.
    """
    if not (folder / META).exists():
        return TrainingProgress()
    meta = _read_meta(folder)
    if changed := differences(meta["identity"], json.loads(json.dumps(identity)), recipe_key):
        raise CheckpointError(
            f"{folder} was written with other settings: {'; '.join(changed)}. Restore them to resume; "
            f"to start over, choose another output folder or remove {folder.parent}"
        )
    weights, tensors = (_read(folder / meta["files"][name]) for name in ("weights", "optimizer"))
    own = trained(model)
    if weights.keys() != own.keys():
        raise CheckpointError(f"{folder} holds other weights: {sorted(weights.keys() ^ own.keys())[:5]}")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(sharded_like(weights[name], tensor))
    for number, optimizer in enumerate(optimizers):
        _restore(optimizer, number, tensors, meta["groups"][number])
    return TrainingProgress(int(meta["step"]), float(meta["seconds"]))


def saved_identity(folder: Path) -> dict[str, Any]:
    """The identity with which the state in `folder` was saved; empty if there is no state."""
    return dict(_read_meta(folder)["identity"]) if (folder / META).exists() else {}


def trained(model: nn.Module) -> dict[str, Tensor]:
    """Name -> trained parameter; tied parameters occur once."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Replace a safetensors file. Raises OSError if it can't be written."""
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
            state.setdefault(int(index), {})[key] = (
                sharded_like(tensor, model) if tensor.shape == model.shape else tensor
            )
    own = optimizer.state_dict()["param_groups"]
    for group, saved in zip(own, groups, strict=True):
        group.update(saved)
    optimizer.load_state_dict({"state": state, "param_groups": own})


def _stored(value: Tensor) -> Tensor:
    return full_tensor(value.detach()).cpu().contiguous()


def _read_meta(folder: Path) -> dict[str, Any]:
    try:
        meta: dict[str, Any] = json.loads((folder / META).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{folder} holds no readable training state: {error}") from error
    if not {"step", "seconds", "files", "identity", "groups"} <= meta.keys():
        raise CheckpointError(f"{folder / META} is not a training state of this version of eyas: use another folder")
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
