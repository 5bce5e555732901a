"""Strict, typed configurations: YAML plus key=value overrides; an unknown key is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from eyas.errors import VALUE_ERROR, ConfigError


class StrictModel(BaseModel):
    """Base of every configuration: unknown keys are errors, instances are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True)


ModelT = TypeVar("ModelT", bound=BaseModel)


def validated(cls: type[ModelT], values: dict[str, Any], where: str) -> ModelT:
    """Build `cls` from `values`; raise ConfigError naming every bad key of `where`."""
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        lines = [_problem(each, cls) for each in error.errors()]
        raise ConfigError("\n  ".join([f"{where} is not a valid {cls.__name__}:", *lines])) from error


_REASONS = {"extra_forbidden": "there is no such key", "missing": "it is missing"}
"""pydantic's error type -> the reason given in our message."""


def _problem(error: ErrorDetails, cls: type[BaseModel]) -> str:
    """One line of the message: about one key, or about several that conflict."""
    key = ".".join(map(str, error["loc"]))
    reason = _REASONS.get(error["type"], error["msg"].removeprefix(VALUE_ERROR))
    if error["type"] == "extra_forbidden":
        reason += _nearest(cls, error["loc"])
    return f"{key}: {reason}" if key else reason


def _nearest(cls: type[BaseModel], path: Sequence[int | str]) -> str:
    """A `did you mean` suggestion for a mistyped key; empty if no known key resembles it."""
    section = cls
    for part in path[:-1]:
        field = section.model_fields.get(str(part))
        section = section if field is None else next(_models(field.annotation), section)
    near = get_close_matches(str(path[-1]), section.model_fields, n=1)
    return f", did you mean {near[0]}?" if near else ""


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models in a field's annotation: the type itself, or the members of unions, lists and mappings."""
    if isinstance(annotation, type) and not get_args(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for part in get_args(annotation):
        yield from _models(part)


def load_config(cls: type[ModelT], path: Path, overrides: Sequence[str] = ()) -> ModelT:
    """Read a YAML file, apply `a.b=value` overrides (values are YAML), validate strictly."""
    values = read_yaml(path)
    override(values, overrides, str(path))
    return validated(cls, values, str(path))


def override(values: dict[str, Any], overrides: Sequence[str], where: str) -> None:
    """Apply `a.b=value` overrides (values are YAML) to the mapping read from `where`."""
    for item in overrides:
        key, sep, text = item.partition("=")
        if not sep:
            raise ConfigError(f"override {item!r} must look like key=value")
        try:
            assign(values, key, yaml.safe_load(text), where)
        except yaml.YAMLError as error:
            raise ConfigError(f"override {item!r}: {text!r} is not a YAML value: {error}") from error


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the mapping in a YAML file."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"can't read the configuration {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must be a YAML mapping at the top level")
    return values


def assign(values: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Set `a.b.c` in nested mappings, creating the missing ones."""
    node = values
    *parents, leaf = key.split(".")
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise ConfigError(f"{key}: {parent} is not a section of {where}")
    node[leaf] = value


def differences(
    before: Mapping[str, Any], now: Mapping[str, Any], parameter: Callable[[str], str | None] = lambda _: None
) -> list[str]:
    """The settings that differ, key by key: `sampling.seed was 1, is 2 (`seed=`)`.

    `parameter` maps a dotted key to the parameter that sets it, or to None.
    """
    old = flat(before)
    new = flat(now)
    lines = []
    for key in [*old, *(key for key in new if key not in old)]:
        if old.get(key) != new.get(key):
            name = parameter(key)
            hint = f" (`{name}=`)" if name else ""
            lines.append(f"{key} was {old.get(key)!r}, is {new.get(key)!r}{hint}")
    return lines


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings into one with dotted keys; empty mappings stay as values."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found
