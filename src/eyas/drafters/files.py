"""Reading drafter directories: config.json and weight files. Pickles only when named by the user."""

from __future__ import annotations

import json
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eyas.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from `path`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"can't read {path}: {error.strerror}; is this a drafter directory?") from error
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return value


def read_tensors(path: Path, weights: str | None = None) -> dict[str, Tensor]:
    """All tensors of a directory: one safetensors file, several with an index, or the file named by `weights`."""
    if weights is not None:
        return _read_file(path / weights)
    index = path / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{index} has no weight_map: it should name the file of every tensor")
        files = sorted(set(weight_map.values()))
        return {name: tensor for file in files for name, tensor in _read_file(path / file).items()}
    files = sorted(file.name for file in path.glob("*.safetensors"))
    if len(files) == 1:
        return _read_file(path / files[0])
    pickles = sorted(file.name for file in path.glob("*.bin"))
    hint = f"; {pickles[0]} is a pickle, read it only if you trust it: --draft-weights {pickles[0]}" if pickles else ""
    found = f"several ({', '.join(files)}) and no index" if files else "none"
    raise CheckpointError(f"{path} should hold one .safetensors file, found {found}{hint}")


def _read_file(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, UnpicklingError, SafetensorError) as error:
        raise CheckpointError(f"can't read the weights in {file}: {error}") from error
    if not isinstance(loaded, dict) or not all(isinstance(tensor, Tensor) for tensor in loaded.values()):
        raise CheckpointError(f"can't read the weights in {file}: it holds something else than named tensors")
    return {str(name): tensor for name, tensor in loaded.items()}
