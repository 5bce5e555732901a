"""Finding a drafter for a target: next to its file, in its checkpoint, among published ones, or in the user's own runs.

Only what is on this machine is taken. Published drafters are listed in `assets/published.json`, with their sources.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from eyas.assets import PUBLISHED
from eyas.drafters.checkpoint import PROVENANCE
from eyas.drafters.files import CONFIG, Headers, read_headers
from eyas.drafters.formats.gguf_heads import find_heads, holds_heads
from eyas.drafters.in_target.mtp import find_modules
from eyas.errors import CheckpointError, EyasError
from eyas.gguf import Gguf
from eyas.gguf_companions import companions, without_quantization
from eyas.hub import ModelFiles, find_target
from eyas.targets.loading import read_config

RUNS = Path("runs")
"""The folder of the user's training runs, in the current one."""


class Candidate(NamedTuple):
    """A drafter that may fit the target."""

    source: str | None
    """Its folder or file; None = it is in the target's own files."""
    where: str
    """Where it was found, for messages."""
    trained_for: str | None = None
    """The fingerprint of the target that it must have been trained for, because its name differs; None = any."""

    @property
    def name(self) -> str:
        """Its name in messages."""
        return "MTP heads" if self.source is None else self.source


class Published(NamedTuple):
    """A published drafter of a model."""

    target: str
    drafter: str
    kind: str
    source: str
    """Where the pair is from."""


def candidates(model: str | Path) -> Iterator[Candidate]:
    """Yield the drafters for a target on this machine, the first choice first; whether one fits shows when it loads."""
    files = find_target(model)
    if files.gguf is not None:
        for each in companions(files.gguf):
            yield Candidate(str(each), "next to the model's file")
    if (told := _heads_of_model(files)) is not None:
        yield Candidate(None, told)
    names = _names(model, files)
    for pair in _published_as(names):
        if (copy := local_copy(pair.drafter, model)) is not None:
            yield Candidate(copy, f"published for {pair.target} ({pair.kind})")
    for run in own_runs():
        made_for, trained_for = _origin(run)
        same = _plain(made_for) in names
        yield Candidate(str(run), "one of your own runs", None if same else trained_for)


def _heads_of_model(files: ModelFiles) -> str | None:
    """Where a target's own MTP heads are, in words; None = none, or the files aren't on this machine."""
    base = files.base
    if base.gguf is not None:
        return _IN_FILE if holds_heads(Gguf(base.gguf)) else None
    folder = Path(base.source)
    if not folder.is_dir():
        if (cached := _cached(base.source)) is None:
            return None
        folder = Path(cached)
    layers = read_config(ModelFiles(str(folder))).get_text_config().num_hidden_layers
    modules = find_modules(_headers(folder).tensors, layers)
    return None if modules is None else f"in the checkpoint ({modules.layout.family}'s layout)"


def advice(model: str | Path) -> str | None:
    """One line about the drafter that comes with a target, and how to use it; None if none does or it can't be read."""
    try:
        files = find_target(model)
        heads = find_heads(Path(files.source))  # raises an error for a GGUF file that has none
        if heads is not None and heads != files.gguf:
            return f"{model} has a drafter next to it, {heads.name}: {_USE}"
        told = _heads_of_model(files) if heads is None else _IN_FILE
    except EyasError:  # loading the model reports it
        return None
    return None if told is None else f"{model} comes with a drafter, MTP heads {told}: {_USE}"


_USE = "`method=mtp` drafts with it"
_IN_FILE = "in the model's file"


def _headers(folder: Path) -> Headers:
    try:
        return read_headers(folder)
    except CheckpointError:
        return Headers()


@cache
def _table() -> list[Published]:
    held: dict[str, Any] = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    return [
        Published(row["target"], row["drafter"], row["kind"], held["sources"][row["source"]])
        for row in held["drafters"]
    ]


def published(model: str | Path) -> list[Published]:
    """The published drafters of a model, known by its name: that of its folder, file or repository."""
    return _published_as(_names(model, find_target(model)))


def _published_as(names: set[str]) -> list[Published]:
    """The published drafters of a model with one of these names."""
    return [pair for pair in _table() if _plain(pair.target) in names]


def _names(model: str | Path, files: ModelFiles) -> set[str]:
    """What a target may be called, each as `_plain` writes it."""
    names: list[Any] = [str(model)]
    if files.gguf is not None:
        metadata = Gguf(files.gguf).metadata
        names += [files.gguf.stem, *(metadata.get(key) for key in ("general.name", "general.base_model.0.name"))]
    else:
        found = Path(files.source)
        # of a cached snapshot, the name is two folders up: models--OWNER--NAME/snapshots/REVISION
        names += [found.name, found.parent.parent.name.rpartition("--")[2]] if found.is_dir() else []
    return {plain for name in names if isinstance(name, str) and (plain := _plain(name))}


_HOW_STORED = re.compile(r"[-_. ](gguf|fp8|awq|gptq|nvfp4|mxfp4|bf16|int[48]|w4a16|[48]bit|bnb)([-_. ].*)?$", re.I)
"""How a model's weights are stored, at the end of its name."""


def _plain(name: str) -> str:
    """A model's name without its owner, its quantization and punctuation."""
    last = without_quantization(name.rstrip("/").rpartition("/")[2].removesuffix(".gguf"))
    bare = re.sub(r"[^a-z0-9]", "", _HOW_STORED.sub("", last).lower())
    return bare.removeprefix("meta") if bare.startswith("metallama") else bare


def local_copy(drafter: str, model: str | Path) -> str | None:
    """A published drafter in a folder of its name, here or next to the model, or in the Hub's cache; None = neither."""
    name = drafter.rpartition("/")[2]
    for folder in (Path(drafter), Path(name), Path(model).expanduser().absolute().parent / name):
        if (folder / CONFIG).is_file():
            return str(folder)
    return _cached(drafter)


def _cached(repository: str) -> str | None:
    """The folder of a repository in the Hub's cache; None if it isn't there."""
    try:
        return snapshot_download(repository, local_files_only=True)
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError):
        return None


def own_runs(runs: Path = RUNS) -> list[Path]:
    """The drafters of the user's runs, the latest first: the picked checkpoint, or else the last one."""
    found = []
    for run in {each.parent for pattern in ("*/drafter", "*/run/drafter") for each in runs.glob(pattern)}:
        chosen = next((run / name for name in ("pick", "drafter") if (run / name / CONFIG).is_file()), None)
        if chosen is not None:
            found.append(chosen)
    return sorted(found, key=lambda folder: (folder / CONFIG).stat().st_mtime, reverse=True)


def _origin(folder: Path) -> tuple[str, str]:
    """The target's name and fingerprint in a drafter's provenance; empty if it doesn't say."""
    try:
        values = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        held = values.get(PROVENANCE)
    except (OSError, ValueError, AttributeError):
        held = None
    held = held if isinstance(held, dict) else {}
    return str(held.get("target", "")), str(held.get("target_fingerprint", ""))
