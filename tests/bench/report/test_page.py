"""The page: complete, escaped, and loading nothing."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest

from eyas.bench.report.figures import canvas, check_plot, label, seconds_axis, svg
from eyas.bench.report.page import DataTable, Image, Json, Section, Text, cell, pairs, render
from eyas.errors import UsageError
from eyas.files import write_bytes

VOID = {"meta", "img", "br", "link"}


class Checker(HTMLParser):
    """Tags are closed in order; everything that could be loaded is collected."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.loads += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def checked(page: str) -> Checker:
    """The page, parsed; whatever it refers to lies inside it."""
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert all(value.startswith(("#", "data:image/svg+xml;base64,")) for value in checker.loads)
    assert not re.search(r"https?:|<script|@import|url\(|<link", page)
    return checker


def plot() -> bytes:
    with canvas(1, 2, 4, 2) as (figure, grid):
        grid[0][0].plot([1, 2], [3, 4])
        label(grid[0][0], "time (s)", "speed (tokens/s)", "title")
        return svg(figure)


def test_a_page_of_everything() -> None:
    sections = [
        Section(
            "First & foremost", [Text("a <b> c"), DataTable(("name", "x"), [("<i>", "1.5"), ("b", "-2")], marked=[1])]
        ),
        Section(
            "Plots", [Image(plot(), 'what "it" shows'), Json("all", {"a": ["é<", 1]}), pairs({"k": 1.23456, "z": None})]
        ),
    ]
    page = render("Drafter <x>", [Text("lead")], sections)
    checker = checked(page)
    for words in ("a <b> c", "<i>", "First & foremost", "é<", "1.235", "Drafter <x>", "lead"):
        assert words in checker.text
    assert page.count("data:image/svg+xml;base64,") == 1
    assert page.count('class="marked"') == 1
    assert page.count('<td class="number">') == 2


def test_cells() -> None:
    assert [cell(value) for value in (None, True, 12345, 0.00012345, [1, 2], {"a": 1, "b": None}, "x")] == [
        "", "yes", "12,345", "0.0001234", "1, 2", "a 1", "x",
    ]  # fmt: skip


def test_plots_are_valid_transparent_and_the_same_each_time() -> None:
    image = plot()
    assert image == plot()
    assert ET.fromstring(image).tag.endswith("svg")
    assert b"#ffffff" not in image


def test_plot_files(tmp_path: Path) -> None:
    write_bytes(tmp_path / "a.svg", plot())
    assert ET.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")
    assert [path.name for path in tmp_path.iterdir()] == ["a.svg"]
    check_plot(None)
    check_plot(tmp_path / "b.svg")
    for path, words in ((tmp_path / "a.gif", "written as .svg"), (tmp_path / "no" / "a.svg", "make it first")):
        with pytest.raises(UsageError, match=words):
            check_plot(path)


def test_axes_of_time() -> None:
    assert seconds_axis([10, 100]) == (1.0, "seconds")
    assert seconds_axis([1000]) == (60.0, "minutes")
    assert seconds_axis([9000]) == (3600.0, "hours")
    assert seconds_axis([]) == (1.0, "seconds")
