"""A report as one HTML file that holds its texts, tables and plots, has no script and loads nothing."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from jinja2 import Environment, PackageLoader, StrictUndefined

import eyas


@dataclass(frozen=True)
class Text:
    """A paragraph; `faint` ones are set in grey."""

    kind: ClassVar[str] = "text"
    text: str
    faint: bool = False


@dataclass(frozen=True)
class DataTable:
    """A table; columns of numbers are aligned to the right, `marked` rows are highlighted."""

    kind: ClassVar[str] = "table"
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    marked: Sequence[int] = ()

    @property
    def numeric(self) -> list[int]:
        """Indices of the columns whose every cell looks like a number."""
        width = max((len(row) for row in self.rows), default=0)
        return [i for i in range(width) if self.headers and all(_number(row[i]) for row in self.rows)]


@dataclass(frozen=True)
class Image:
    """A plot; `alt` describes it for readers who can't see it."""

    kind: ClassVar[str] = "image"
    svg: bytes
    alt: str

    @property
    def data(self) -> str:
        """The SVG in base64, for a data URL."""
        return base64.b64encode(self.svg).decode("ascii")


@dataclass(frozen=True)
class Json:
    """A JSON document under a title, folded until it is clicked."""

    kind: ClassVar[str] = "json"
    title: str
    value: Any

    @property
    def text(self) -> str:
        """The document as indented JSON."""
        return json.dumps(self.value, indent=2, ensure_ascii=False)


@dataclass(frozen=True)
class Tiles:
    """Figures to see first. `values`: (what it is, the figure, what it is measured against or by)."""

    kind: ClassVar[str] = "tiles"
    values: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class ShellCommand:
    """A command line to copy."""

    kind: ClassVar[str] = "command"
    line: str


Block = Text | DataTable | Image | Json | Tiles | ShellCommand


@dataclass(frozen=True)
class Section:
    """A heading and the blocks below it."""

    title: str
    blocks: Sequence[Block]


def render(title: str, lead: Sequence[Block], sections: Sequence[Section]) -> str:
    """The HTML of a report: title, the blocks that sum it up, sections."""
    loader = PackageLoader("eyas.bench.report", package_path=".")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = environment.get_template("page.html.j2")
    return template.render(title=title, lead=lead, sections=sections, version=eyas.__version__)


def pairs(values: dict[str, Any]) -> DataTable:
    """A table of names and values; empty values are left out."""
    rows = [(name.replace("_", " "), cell(value)) for name, value in values.items() if value not in (None, {}, [], "")]
    return DataTable((), rows)


def cell(value: Any) -> str:
    """A value as the text of a table's cell."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {cell(each)}" for name, each in value.items() if each is not None)
    return ", ".join(map(cell, value)) if isinstance(value, (list, tuple)) else str(value)


def _number(text: str) -> bool:
    return text == "" or text[0].isdigit() or (text[0] == "-" and text[1:2].isdigit())
