"""Opening a drafter of any format, which is recognized by its files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from eyas.drafters.files import (
    CONFIG,
    Headers,
    RawCheckpoint,
    TensorInfo,
    headers_of,
    read_json,
    read_named,
    read_tensors,
    weight_files,
)
from eyas.drafters.formats.gguf_layout import open_gguf
from eyas.drafters.formats.medusa import native_medusa
from eyas.drafters.formats.speculators import MODEL_TYPE_KEY, TRAINING_ONLY, translate
from eyas.errors import CheckpointError
from eyas.gguf_target import gguf_in

_MASK_EMBEDDING = "mask_embedding.pt"
"""A pickle that some readers of block drafters substitute for the mask token's embedding."""


def open_raw(path: Path, weights: str | None = None) -> RawCheckpoint:
    """Read the configuration, in native keys, and the headers of a drafter directory or GGUF file.

    `weights` names a weight file other than the default; it may be a pickle. Raises CheckpointError, ConfigError, and
    UsageError for a directory with several GGUF files.
    """
    file = gguf_in(path)
    if file is not None:
        return open_gguf(file)
    config = read_json(path / CONFIG)
    where = str(path / CONFIG)
    if (path / _MASK_EMBEDDING).exists():
        raise CheckpointError(
            f"{path} has a {_MASK_EMBEDDING}, which replaces the mask token's embedding: eyas reads only drafters "
            "whose mask token is a row of the embedding"
        )
    if weights is not None and not weights.endswith(".safetensors"):
        tensors = read_named(path, weights)  # a pickle has no header
        infos = {name: TensorInfo(tuple(t.shape), str(t.dtype), path / weights) for name, t in tensors.items()}

        def some(names: Sequence[str]) -> dict[str, Tensor]:
            return {name: tensors[name] for name in names}

        headers = Headers(infos, [weights])
        raw = RawCheckpoint(path, "directory with a pickle", config, where, headers, lambda: tensors, some)
    else:
        files = weight_files(path) if weights is None else [path / weights]
        headers = headers_of(files)
        raw = RawCheckpoint(path, "directory", config, where, headers, lambda: read_tensors(files), headers.read_some)
    if MODEL_TYPE_KEY not in config:
        return native_medusa(raw)
    return replace(raw, format="speculators", training_only=TRAINING_ONLY, **vars(translate(config, where)))
