"""Recipes for `eyas train` and sweeps for `eyas sweep`, found by name: YAML files that come with the package.

With `extends: FILE`, or a list of files, a recipe overrides values of other recipes, key by key. Paths are relative to
the recipe; names of recipes that come with the package work, too.

Other packages bring recipes by entry points `eyas.recipes`, whose value is a package: the YAML files in its folder are
found by their names there. Nothing of such a package is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from eyas.config import read_yaml
from eyas.errors import ConfigError
from eyas.plugins import installed, source_of, warn_once

FOLDER = Path(__file__).parent
SWEEPS = "sweeps"
"""The folder of the sweeps."""


def known_recipes(folder: str = "") -> dict[str, Path]:
    """Name -> file of the recipes that come with eyas and with other packages, or of the files in `folder`.

    eyas's own names are kept. A name that several other packages have is left out.
    """
    found = _recipes_in(FOLDER, folder)
    for name, paths in _plugged(folder).items():
        if len(paths) == 1:
            found.setdefault(name, paths[0])
    return found


def _plugged(folder: str) -> dict[str, list[Path]]:
    """Name -> files of the recipes that packages bring by their entry points."""
    found: dict[str, list[Path]] = {}
    for plugin in installed()["eyas.recipes"]:
        place = source_of(plugin.module)
        if place is None or not place.is_dir():
            warn_once(str(plugin.broken(f"there is no folder of a package {plugin.module}")))
            continue
        for name, path in _recipes_in(place, folder).items():
            found.setdefault(name, []).append(path)
    return found


def _recipes_in(place: Path, folder: str) -> dict[str, Path]:
    return {
        path.relative_to(place / folder).with_suffix("").as_posix(): path
        for path in sorted((place / folder).rglob("*.yaml"))
        if folder or path.parent.name != SWEEPS
    }


def find_recipe(name: str | Path, folder: str = "") -> Path:
    """The file `name`, or else the recipe of that name (`eagle3`, `smollm2/eagle3`); `folder` may be `SWEEPS`.

    Raises ConfigError listing the known names.
    """
    if Path(name).is_file():
        return Path(name)
    wanted = str(name).removesuffix(".yaml")
    own = _recipes_in(FOLDER, folder)
    if wanted in own:
        return own[wanted]
    known = known_recipes(folder)
    if wanted in known:
        return known[wanted]
    if claimed := _plugged(folder).get(wanted):
        raise ConfigError(f"several packages bring a recipe {wanted}: name one of {', '.join(map(str, claimed))}")
    near = get_close_matches(wanted.rpartition("/")[2], known, n=1)
    what = "sweep" if folder else "recipe"
    raise ConfigError(
        f"there is no file {name}, and no {what} of that name"
        + (f": did you mean {near[0]}?" if near else "")
        + f" (eyas comes with {', '.join(known)})"
    )


def read_recipe(name: str | Path, extending: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The values of a recipe merged over those of the files it extends; `extending` are the files that led here."""
    path = find_recipe(name)
    if path.resolve() in extending:
        raise ConfigError(f"{path} extends itself through {', '.join(map(str, extending))}")
    overrides = read_yaml(path)
    bases = overrides.pop("extends", [])
    if not isinstance(bases, (str, list)):
        raise ConfigError(f"{path}: extends must be a file or a list of files, not {bases!r}")
    values: dict[str, Any] = {}
    for base in [bases] if isinstance(bases, str) else bases:
        relative = path.parent / str(base)
        above = relative if relative.is_file() else find_recipe(str(base))
        values = _merged(values, read_recipe(above, (*extending, path.resolve())))
    return _merged(values, overrides)


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two nested mappings; where both have a value, the one in `over` wins."""
    merged = dict(under)
    for key, value in over.items():
        there = under.get(key)
        merged[key] = _merged(there, value) if isinstance(there, Mapping) and isinstance(value, Mapping) else value
    return merged
