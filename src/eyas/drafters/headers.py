"""What weight files hold, read from their headers: names, shapes and dtypes, no weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from eyas.errors import CheckpointError


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
