"""From a directory or Hub id to a config and, if they are on this machine, the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from eyas.drafters.files import Headers, read_json
from eyas.drafters.formats.opening import gguf_in
from eyas.drafters.loading import local_directory
from eyas.drafters.registry import UNKNOWN, kind_name
from eyas.errors import CheckpointError

_HUB_ERRORS = (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError)


class Located(NamedTuple):
    """What was found."""

    config: dict[str, Any]
    path: Path | None
    """Where the weights are; None = not on this machine."""


def locate(source: str) -> Located:
    """Find it. A drafter named by a Hub id is downloaded (it is small), a target's weights are not."""
    named = gguf_in(Path(source))
    if named is not None:
        return Located({}, named)
    if Path(source).is_dir():
        return Located(_config(Path(source)), Path(source))
    try:
        config = read_json(Path(hf_hub_download(source, "config.json")))
    except _HUB_ERRORS as error:
        raise CheckpointError(
            f"{source} is neither a directory nor a Hub model that can be reached: {error}"
        ) from error
    if detect(config, Headers()) != "target":
        return Located(config, local_directory(source))
    try:
        return Located(config, Path(snapshot_download(source, local_files_only=True)))
    except _HUB_ERRORS:
        return Located(config, None)


def _config(path: Path) -> dict[str, Any]:
    if not (path / "config.json").exists():
        raise CheckpointError(f"{path} has no config.json: it is neither a target nor a drafter directory")
    return read_json(path / "config.json")


# What kind of directory this is, told from its config.json and the names of its tensors.


def detect(config: dict[str, Any], headers: Headers) -> str:
    """A drafter kind (those eyas loads and those it knows by name), `target` or `unknown`."""
    kind = kind_name(config, headers.tensors)
    if kind == UNKNOWN and (config.get("model_type") or config.get("architectures")):
        return "target"
    return kind
