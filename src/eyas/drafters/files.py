"""Drafter files on disk: JSON, headers of weight files, and weights.

Headers give names, shapes and dtypes without reading a weight. A pickle is only read if the user names it, and only as
data: none of its code is run.
"""

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
from eyas.files import read_text

CONFIG = "config.json"
JSON_LIMIT = 2**24
"""The largest JSON file to read, in bytes; a config.json has a few thousand, an index a few hundred thousand."""


@dataclass(kw_only=True)
class KeyReport:
    """How the keys of a file were treated."""

    ignored: dict[str, str] = field(default_factory=dict)
    """Keys and tensors that change nothing, with the reason."""
    defaulted: dict[str, Any] = field(default_factory=dict)
    """Keys missing from the file, with the default that was used."""
    notes: list[str] = field(default_factory=list)
    """What the user should know about how the file was read."""
    doubts: list[str] = field(default_factory=list)
    """Ambiguities of the file: a sentence each that names both readings."""


@dataclass
class RawCheckpoint(KeyReport):
    """An opened checkpoint of any format, with its configuration in native keys; no weight has been read."""

    path: Path
    format: str
    config: dict[str, Any]
    """The configuration, in the keys of native config.json files."""
    where: str
    """The file that the configuration was read from, for messages."""
    headers: Headers
    """The tensors, by their names in the file."""
    load: Callable[[], dict[str, Tensor]]
    """Reads all tensors, by their names in `headers`."""
    load_some: Callable[[Sequence[str]], dict[str, Tensor]]
    """Reads the named tensors."""
    used: list[str] | None = None
    """The keys of the file that were read; None = the keys of `config`."""
    training_only: tuple[str, ...] = ()
    """Tensors that only training needs: they aren't loaded."""


@dataclass(frozen=True)
class TensorInfo:
    """The header of a tensor in a file."""

    shape: tuple[int, ...]
    dtype: str
    """As safetensors names it, such as `BF16`."""
    file: Path

    @property
    def parameters(self) -> int:
        """The number of elements of the tensor."""
        return prod(self.shape)


@dataclass
class Headers:
    """The tensor headers of a directory or file."""

    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    """The names of the weight files, without a folder."""
    pickles: list[str] = field(default_factory=list)
    """Pickles in the same folder, which aren't read."""

    @property
    def parameters(self) -> int:
        """The number of elements of all floating-point tensors; index maps aren't parameters."""
        return sum(info.parameters for info in self.tensors.values() if floating(info.dtype))

    @property
    def dtypes(self) -> list[str]:
        """The floating-point dtypes, as safetensors names them."""
        return sorted({info.dtype for info in self.tensors.values() if floating(info.dtype)})

    def read_some(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Load the named tensors from their safetensors files."""
        found = {}
        for name in names:
            with safe_open(self.tensors[name].file, framework="pt") as file:
                found[name] = file.get_tensor(name)
        return found


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in the file `path`. Raises CheckpointError."""
    try:
        if path.stat().st_size > JSON_LIMIT:
            raise CheckpointError(f"{path} has {path.stat().st_size} bytes: no configuration is that long")
        value = parse_json(read_text(path), str(path))
    except OSError as error:
        raise CheckpointError(f"can't read {path}: {error.strerror}; is this a drafter directory?") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object")
    return value


def parse_json(text: str, where: str) -> Any:
    """The JSON value in `text`. Raises CheckpointError, also for NaN and infinities, which JSON does not have."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not a number")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not valid JSON: {error}") from error


def weight_files(path: Path) -> list[Path]:
    """The safetensors files of a directory: its only one, or the files named by its index. Raises CheckpointError."""
    index = path / "model.safetensors.index.json"
    if index.exists():
        return [path / name for name in _indexed(index)]
    files = sorted(file.name for file in path.glob("*.safetensors"))
    if len(files) == 1:
        return [path / files[0]]
    pickles = _pickles(path)
    hint = f"; {pickles[0]} is a pickle, read it only if you trust it: `draft_weights={pickles[0]}`" if pickles else ""
    found = f"several ({', '.join(files)}) and no index" if files else "none"
    raise CheckpointError(f"{path} should hold one .safetensors file, found {found}{hint}")


def _indexed(index: Path) -> list[str]:
    """The file names in an index. Raises CheckpointError for names that aren't safetensors files in its folder."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map: it should name the file of every tensor")
    files: list[str] = sorted(set(weight_map.values()))
    odd = [name for name in files if Path(name).name != name or "\\" in name or not name.endswith(".safetensors")]
    if odd:
        raise CheckpointError(f"{index} names {', '.join(map(repr, odd))}: only .safetensors files next to it are read")
    return files


def read_headers(path: Path) -> Headers:
    """The headers of all safetensors files in the directory `path`, except an adapter's."""
    headers = headers_of(
        sorted(file for file in path.glob("*.safetensors") if file.name != "adapter_model.safetensors")
    )
    headers.pickles = _pickles(path)
    return headers


def _pickles(path: Path) -> list[str]:
    return sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern))


def headers_of(files: Iterable[Path]) -> Headers:
    """The headers of safetensors files. Raises CheckpointError, also for a tensor that is in two files."""
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


def floating(dtype: str) -> bool:
    """Whether this is the safetensors name of a floating-point dtype."""
    return dtype.startswith(("F", "BF"))


def read_tensors(files: Sequence[Path]) -> dict[str, Tensor]:
    """All tensors of safetensors files. Raises CheckpointError."""
    return {name: tensor for file in files for name, tensor in _read_file(file).items()}


def read_named(path: Path, weights: str) -> dict[str, Tensor]:
    """All tensors of the file that the user named, which may be a pickle. Raises CheckpointError."""
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
