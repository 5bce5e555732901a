"""Finds the model given to `eyas inspect` (a folder, GGUF file or Hub id), and whether it is a target or a drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from eyas.drafters.files import Headers, read_json
from eyas.drafters.formats.opening import gguf_in
from eyas.drafters.loading import local_directory
from eyas.drafters.registry import UNKNOWN, kind_name
from eyas.errors import CheckpointError
from eyas.hub import find_model
from eyas.targets.adapters import find_adapter

_HUB_ERRORS = (HfHubHTTPError, LocalEntryNotFoundError, OSError)


class Located(NamedTuple):
    """A model's config and the location of its weights."""

    config: dict[str, Any]
    path: Path | None
    """The folder or GGUF file; None = the weights aren't on this machine."""


def locate(source: str) -> Located:
    """Find a model. For a Hub id, a drafter is downloaded, because it is small; a target's weights are not.

    Raises MissingModelError if there is no such model, CheckpointError if it is none that can be read.
    """
    path = Path(find_model(source))
    named = gguf_in(path)
    if named is not None:
        return Located({}, named)
    adapter = find_adapter(path)
    if adapter is not None and not adapter.beside:
        return locate(adapter.base)
    if path.exists():
        return Located(_config(path), path)
    try:
        config = read_json(Path(hf_hub_download(source, "config.json")))
    except _HUB_ERRORS as error:
        raise CheckpointError(f"{source} can't be fetched from the Hub: {error}") from error
    if detect(config, Headers()) != "target":
        return Located(config, local_directory(source))
    try:
        return Located(config, Path(snapshot_download(source, local_files_only=True)))
    except _HUB_ERRORS:
        return Located(config, None)


def _config(path: Path) -> dict[str, Any]:
    if not (path / "config.json").exists():
        raise CheckpointError(f"{path} has no config.json, so it is neither a target nor a drafter")
    return read_json(path / "config.json")


def detect(config: dict[str, Any], headers: Headers) -> str:
    """`target`, the kind of a drafter that eyas loads or knows by name, or `unknown`."""
    kind = kind_name(config, headers.tensors)
    if kind == UNKNOWN and (config.get("model_type") or config.get("architectures")):
        return "target"
    return kind
