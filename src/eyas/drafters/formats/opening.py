"""Which format a path holds, told from what lies there, and opened as a `Source`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from eyas.drafters.files import (
    Headers,
    RawCheckpoint,
    TensorInfo,
    headers_of,
    read_json,
    read_named,
    read_tensors,
    weight_files,
)
from eyas.drafters.formats.gguf import GGUF_SUFFIX
from eyas.drafters.formats.gguf_eagle3 import read_gguf
from eyas.drafters.formats.speculators import MODEL_TYPE_KEY, TRAINING_ONLY, translate
from eyas.errors import CheckpointError

CONFIG = "config.json"


def gguf_in(path: Path) -> Path | None:
    """The GGUF file that `path` is, or that a directory without config.json holds."""
    if path.suffix == GGUF_SUFFIX and path.is_file():
        return path
    if path.is_dir() and not (path / CONFIG).exists():
        files = sorted(path.glob(f"*{GGUF_SUFFIX}"))
        if len(files) > 1:
            raise CheckpointError(f"{path} holds several GGUF files: name one of {', '.join(map(str, files))}")
        return files[0] if files else None
    return None


def open_raw(path: Path, weights: str | None = None) -> RawCheckpoint:
    """Read configuration and headers; `weights` names a weight file other than the default, perhaps a pickle.

    Raises CheckpointError and ConfigError.
    """
    file = gguf_in(path)
    if file is not None:
        return read_gguf(file)
    where = path / CONFIG
    raw = read_json(where)
    if weights is not None and not weights.endswith(".safetensors"):
        tensors = read_named(path, weights)  # a pickle has no header
        infos = {name: TensorInfo(tuple(t.shape), str(t.dtype), path / weights) for name, t in tensors.items()}
        headers = Headers(infos, [weights])

        def some(names: Sequence[str]) -> dict[str, Tensor]:
            return {name: tensors[name] for name in names}

        source = RawCheckpoint(path, "directory with a pickle", raw, str(where), headers, lambda: tensors, some)
    else:
        files = weight_files(path) if weights is None else [path / weights]
        headers = headers_of(files)
        source = RawCheckpoint(
            path, "directory", raw, str(where), headers, lambda: read_tensors(files), headers.read_some
        )
    if MODEL_TYPE_KEY not in raw:
        return source
    found = translate(raw, str(where))
    source.format = "speculators"
    source.config, source.used, source.ignored, source.defaulted, source.doubts = found
    source.training_only = TRAINING_ONLY
    return source
