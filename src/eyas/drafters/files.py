"""Reading drafter directories: JSON and weight files. Pickles only when named by the user, and never their code."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from eyas.errors import CheckpointError

JSON_LIMIT = 2**24
"""Bytes; an honest config.json has a few thousand, an index a few hundred thousand."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from `path`."""
    try:
        if path.stat().st_size > JSON_LIMIT:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes: no configuration is that long")
        value = parse_json(path.read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise CheckpointError(f"can't read {path}: {error.strerror}; is this a drafter directory?") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return value


def parse_json(text: str, where: str) -> Any:
    """The value written in `text`; NaN and infinities, which JSON does not have, are refused."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not a number")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not valid JSON: {error}") from error


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a directory: one, or those that its index names."""
    index = path / "model.safetensors.index.json"
    if index.exists():
        return [path / name for name in _indexed(index)]
    files = sorted(file.name for file in path.glob("*.safetensors"))
    if len(files) == 1:
        return [path / files[0]]
    pickles = sorted(file.name for file in path.glob("*.bin"))
    hint = f"; {pickles[0]} is a pickle, read it only if you trust it: --draft-weights {pickles[0]}" if pickles else ""
    found = f"several ({', '.join(files)}) and no index" if files else "none"
    raise CheckpointError(f"{path} should hold one .safetensors file, found {found}{hint}")


def _indexed(index: Path) -> list[str]:
    """File names in an index; they lie beside it and are safetensors, whatever it says."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map: it should name the file of every tensor")
    files: list[str] = sorted(set(weight_map.values()))
    odd = [name for name in files if Path(name).name != name or "\\" in name or not name.endswith(".safetensors")]
    if odd:
        raise CheckpointError(f"{index} names {', '.join(map(repr, odd))}: only .safetensors files beside it are read")
    return files


def read_tensors(files: Sequence[Path]) -> dict[str, Tensor]:
    """All tensors of safetensors files."""
    return {name: tensor for file in files for name, tensor in _read_file(file).items()}


def read_named(path: Path, weights: str) -> dict[str, Tensor]:
    """All tensors of the file that the user named; a pickle is read as data, nothing in it is run."""
    return _read_file(path / weights)


def _read_file(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, UnpicklingError, SafetensorError) as error:
        raise CheckpointError(f"can't read the weights in {file}: {error}") from error
    if not isinstance(loaded, dict) or not all(isinstance(tensor, Tensor) for tensor in loaded.values()):
        raise CheckpointError(f"can't read the weights in {file}: it holds something else than named tensors")
    return {str(name): tensor for name, tensor in loaded.items()}


# What weight files hold, read from their headers: names, shapes and dtypes, no weights.


@dataclass(frozen=True)
class TensorInfo:
    """One tensor, unread."""

    shape: tuple[int, ...]
    dtype: str
    file: Path

    @property
    def parameters(self) -> int:
        """How many numbers it holds."""
        return prod(self.shape)


@dataclass
class Headers:
    """All tensors of a directory or file."""

    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    pickles: list[str] = field(default_factory=list)

    @property
    def parameters(self) -> int:
        """Numbers in floating-point tensors (index maps aren't parameters)."""
        return sum(info.parameters for info in self.tensors.values() if floating(info.dtype))

    @property
    def dtypes(self) -> list[str]:
        """Floating-point dtypes, as safetensors names them."""
        return sorted({info.dtype for info in self.tensors.values() if floating(info.dtype)})

    def read_some(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Load a few tensors of safetensors files."""
        found = {}
        for name in names:
            with safe_open(self.tensors[name].file, framework="pt") as file:
                found[name] = file.get_tensor(name)
        return found


def floating(dtype: str) -> bool:
    """Is this a floating-point dtype's safetensors name?"""
    return dtype.startswith(("F", "BF"))


def read_headers(path: Path) -> Headers:
    """Read the headers of every safetensors file in `path`."""
    headers = headers_of(sorted(path.glob("*.safetensors")))
    headers.pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern))
    return headers


def headers_of(files: Iterable[Path]) -> Headers:
    """Read the headers of these safetensors files; a tensor in two of them is refused."""
    headers = Headers()
    for file in files:
        headers.files.append(file.name)
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  # not a mapping
                    if name in headers.tensors:
                        raise CheckpointError(f"{name} is in {headers.tensors[name].file.name} and in {file}: keep one")
                    part = opened.get_slice(name)
                    headers.tensors[name] = TensorInfo(tuple(part.get_shape()), part.get_dtype(), file)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"can't read the header of {file}: {error}; is the file complete?") from error
    return headers


# A checkpoint as it lies on disk, in native keys; none of its weights is read yet.


@dataclass
class RawCheckpoint:
    """What every format is brought into before a kind reads it."""

    path: Path
    format: str
    config: dict[str, Any]
    """In the keys of native config.json files."""
    where: str
    """Where the configuration was read, for messages."""
    headers: Headers
    """Names may still be those of the file."""
    load: Callable[[], dict[str, Tensor]]
    """Read all tensors."""
    load_some: Callable[[Sequence[str]], dict[str, Tensor]]
    """Read the tensors of these names."""
    used: list[str] | None = None
    """Keys of the file that were read; None = those of `config`."""
    ignored: dict[str, str] = field(default_factory=dict)
    """Key or tensor -> why it changes nothing."""
    defaulted: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    training_only: tuple[str, ...] = ()
    """Tensors that are left out."""
