"""Targets in GGUF files: their config and tokenizer are converted to a folder of transformers' files.

Building a tokenizer takes a second or more, so it is done once. The folder lies in the cache directory, under a name
that changes with the file, and names the GGUF file that has the weights. The rest of eyas reads it like any model; only
code that reads weights calls `weights_file`.
"""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from eyas.cache.folder import made_in_cache
from eyas.errors import MissingModelError, ModelError, UsageError
from eyas.files import FileLock, write_text, writing_folder
from eyas.gguf_companions import is_model
from eyas.runtime import LOADING

if TYPE_CHECKING:
    from eyas.gguf import Gguf

GGUF_SUFFIX = ".gguf"
WEIGHTS = "gguf.path"
"""The file in such a folder that names its GGUF file."""
DRAFTERS = frozenset({"eagle3", "dflash", "gemma4-assistant"})
"""llama.cpp's architectures that are drafters."""
_FORMAT_VERSION = 6
"""Version of the folders' contents; a change makes them be converted again."""
_IN_REPOSITORY = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+):(?P<file>.+\.gguf)", re.IGNORECASE)
_SPLIT = re.compile(r"-\d{5}-of-\d{5}$")


def target_folder(name: str) -> str:
    """The folder of transformers' files for the GGUF file that `name` refers to (see `named_file`).

    Any other name, and a drafter's file, is returned as it is. Raises ModelError or CheckpointError for an unreadable
    file, UsageError for a folder with several.
    """
    file = named_file(name)
    return name if file is None else _converted(file)


def named_file(name: str) -> Path | None:
    """The GGUF file that `name` refers to: a path (see `gguf_in`), or REPOSITORY:FILE.gguf on the Hub; else None.

    Raises ModelError for a file that can't be fetched from the Hub, UsageError for a folder with several.
    """
    in_repository = _IN_REPOSITORY.fullmatch(name)
    if in_repository is not None and not Path(name).exists():
        return _downloaded(**in_repository.groupdict())
    return gguf_in(Path(name).expanduser())


def gguf_in(path: Path) -> Path | None:
    """The GGUF file at `path`, or the one in a folder without config.json; None if there is none.

    Raises UsageError for a folder with several.
    """
    if path.is_dir() and not (path / "config.json").is_file():
        files = sorted(each for each in path.iterdir() if each.suffix.lower() == GGUF_SUFFIX)
        files = [each for each in files if is_model(each)] or files  # drafters may lie next to their target
        if len(files) > 1:
            raise UsageError(f"{path} holds {len(files)} GGUF files: name one, such as {files[0]}")
        path = files[0] if files else path
    return path if path.is_file() and path.suffix.lower() == GGUF_SUFFIX else None


def weights_file(folder: str | Path) -> Path | None:
    """The GGUF file with the weights of a folder that `target_folder` made; None for any other model."""
    named = Path(folder) / WEIGHTS
    return Path(named.read_text(encoding="utf-8")) if named.is_file() else None


def _converted(file: Path) -> str:
    file = file.resolve()
    stat = file.stat()
    identity = sha256(f"{file} {stat.st_size} {stat.st_mtime_ns} {_FORMAT_VERSION}".encode()).hexdigest()[:8]
    name = f"{file.stem}-{identity}"
    try:
        return str(made_in_cache("gguf", lambda parent: _converted_folder(file, parent / name)))
    except OSError as error:
        raise ModelError(
            f"{file} needs a folder for its config and tokenizer, and none can be written ({error}): set "
            "XDG_CACHE_HOME or TMPDIR"
        ) from error


def _converted_folder(file: Path, folder: Path) -> Path:
    """The folder of transformers' files for a GGUF file at `folder`, made if missing; `file` if it is a drafter's.

    Raises OSError if it can't be written.
    """
    if (folder / WEIGHTS).is_file():
        return folder
    from eyas.gguf import Gguf  # it imports torch
    from eyas.gguf_config import is_companion

    opened = Gguf(file)
    if opened.metadata.get("general.architecture") in DRAFTERS or is_companion(opened):
        return file
    if _SPLIT.search(file.stem):
        raise ModelError(f"{file} is one part of a split model: merge the parts with llama-gguf-split --merge first")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f"{folder.name}.lock"), wait=True):  # for processes that start together
        if not (folder / WEIGHTS).is_file():
            size = file.stat().st_size / 1e6
            LOADING.info("reading the config and tokenizer of %s (%.0f MB), kept in %s", file, size, folder)
            with writing_folder(folder) as made:
                _convert(opened, made)
                write_text(made / WEIGHTS, str(file))
    return folder


def _convert(opened: Gguf, folder: Path) -> None:
    """Write config, generation config, tokenizer and chat template of a GGUF file in transformers' format."""
    from transformers import GenerationConfig

    from eyas.gguf_config import Model
    from eyas.gguf_tokenizer import build_tokenizer
    from eyas.gguf_vocabulary import read_scheme, read_vocabulary

    config = Model.read(opened).config()
    scheme = read_scheme(opened)
    config.save_pretrained(folder)
    generation = GenerationConfig.from_model_config(config)
    if scheme is not None:
        vocabulary = read_vocabulary(opened, scheme)
        generation.eos_token_id = sorted(vocabulary.ends) or None
        build_tokenizer(scheme, vocabulary).save_pretrained(folder)
    generation.save_pretrained(folder)


def _downloaded(repository: str, file: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, RepositoryNotFoundError

    try:
        return Path(hf_hub_download(repository, file))
    except (EntryNotFoundError, RepositoryNotFoundError) as error:
        raise MissingModelError(f"there is no {file} in {repository} on the Hub or in its cache") from error
    except (HfHubHTTPError, OSError) as error:
        raise ModelError(f"{repository}:{file} can't be fetched from the Hub: {error}") from error
