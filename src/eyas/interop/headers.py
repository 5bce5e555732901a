"""What a directory's weight files hold, read from safetensors headers: names, shapes and dtypes, no weights."""

from __future__ import annotations

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
    """All tensors of a directory."""

    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    pickles: list[str] = field(default_factory=list)

    @property
    def parameters(self) -> int:
        """Numbers in floating-point tensors (index maps aren't parameters)."""
        return sum(info.parameters for info in self.tensors.values() if info.dtype.startswith(("F", "BF")))

    @property
    def dtypes(self) -> list[str]:
        """Floating-point dtypes, as safetensors names them."""
        return sorted({info.dtype for info in self.tensors.values() if info.dtype.startswith(("F", "BF"))})

    def read(self, name: str) -> Tensor:
        """Load one (small) tensor."""
        with safe_open(self.tensors[name].file, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor


def read_headers(path: Path) -> Headers:
    """Read the headers of every safetensors file in `path`."""
    headers = Headers()
    headers.pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern))
    for file in sorted(path.glob("*.safetensors")):
        headers.files.append(file.name)
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  # not a mapping
                    part = opened.get_slice(name)
                    headers.tensors[name] = TensorInfo(tuple(part.get_shape()), part.get_dtype(), file)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"can't read the header of {file}: {error}; is the file complete?") from error
    return headers
