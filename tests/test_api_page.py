"""docs/api.md against the code: every public name, every field, parameter, default, method and error, and no other."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from pydantic import BaseModel

import eyas
import eyas.errors

from .doc_pages import ROOT

Table = list[list[str]]
"""Rows of cells, without backticks."""


@cache
def sections() -> dict[str, dict[str, Table]]:
    """Public name -> the tables of its section, by the head of their first column."""
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    found: dict[str, dict[str, Table]] = {}
    for part in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title, _, body = part.partition("\n")
        match = re.fullmatch(r"`eyas\.(\w+)`", title)
        assert match, title
        assert match[1] not in found, f"two sections about {match[1]}"
        found[match[1]] = tables(body)
    return found


def tables(body: str) -> dict[str, Table]:
    found = {}
    for block in re.findall(r"(?:^\|.*\n)+", body, re.MULTILINE):
        head, _, *rows = [[cell.strip().strip("`") for cell in line.split("|")[1:-1]] for line in block.splitlines()]
        found[head[0]] = rows
    return found


def first_column(name: str, head: str) -> list[str]:
    return [row[0] for row in sections()[name].get(head, [])]


def defaults(name: str, head: str) -> dict[str, str]:
    return {row[0]: row[1] for row in sections()[name].get(head, [])}


CLASSES = [name for name in eyas.__all__ if inspect.isclass(getattr(eyas, name)) and name != "EyasError"]


def test_every_public_name_has_a_section_and_no_other() -> None:
    assert sorted(sections()) == sorted(eyas.__all__)


def shown(value: Any) -> str:
    return re.sub(r"^SamplingParams\(.*\)$", "SamplingParams()", repr(value))


def fields_of(found: Any) -> dict[str, str]:
    """Field -> its default, `required` if it has none."""
    if issubclass(found, BaseModel):
        return {
            name: "required" if field.is_required() else shown(field.get_default(call_default_factory=True))
            for name, field in found.model_fields.items()
        }
    result = {}
    for field in dataclasses.fields(found):
        if field.default is not dataclasses.MISSING:
            result[field.name] = shown(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            result[field.name] = shown(field.default_factory())
        else:
            result[field.name] = "required"
    return result


def parameters_of(function: Callable[..., Any]) -> dict[str, str]:
    return {
        name: "required" if each.default is inspect.Parameter.empty else shown(each.default)
        for name, each in inspect.signature(function).parameters.items()
    }


@pytest.mark.parametrize("name", CLASSES)
def test_fields_parameters_and_defaults_are_the_code_s(name: str) -> None:
    found = getattr(eyas, name)
    if dataclasses.is_dataclass(found) or issubclass(found, BaseModel):
        assert defaults(name, "field") == fields_of(found)
    else:
        assert defaults(name, "parameter") == parameters_of(found)


@pytest.mark.parametrize("name", CLASSES)
def test_methods_and_properties_are_the_code_s(name: str) -> None:
    own = {key: value for key, value in vars(getattr(eyas, name)).items() if not key.startswith("_")}
    methods = [key for key, value in own.items() if inspect.isfunction(value)]
    properties = [key for key, value in own.items() if isinstance(value, property)]
    assert sorted(first_column(name, "method")) == sorted(methods)
    assert sorted(first_column(name, "property")) == sorted(properties)


def test_load() -> None:
    assert defaults("load", "parameter") == parameters_of(eyas.load)


def test_errors() -> None:
    known = {
        name: value.__base__.__name__
        for name, value in vars(eyas.errors).items()
        if inspect.isclass(value) and issubclass(value, eyas.EyasError)
    }
    assert {row[0]: row[1] for row in sections()["EyasError"]["error"]} == known
