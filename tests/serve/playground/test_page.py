"""The document: one file that loads nothing, runs only its own script, and sets text as text."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fastapi import FastAPI, HTTPException
from fastapi.testclient import TestClient

import eyas.serve.playground as room
from eyas.serve.playground.page import Gauges, page, playground

HERE = Path(room.__file__).parent
SCRIPTS = sorted((HERE / "script").glob("*.js"))
LIBRARIES = sorted((HERE / "libraries").glob("*.js"))


class Inline(HTMLParser):
    """Collects what is inside of style and script elements, as a browser reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[str, list[str]] = {"style": [], "script": []}
        self.open = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        if tag in self.texts:
            self.open = tag
            self.texts[tag].append("")

    def handle_endtag(self, tag: str) -> None:  # noqa: ARG002
        self.open = ""

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts[self.open][-1] += data


def test_the_policy_names_what_the_document_holds() -> None:
    html, policy = page()
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    inside = Inline()
    inside.feed(html)
    for tag, count in (("style", 1), ("script", len(LIBRARIES) + 1)):
        digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in inside.texts[tag]]
        assert rules[f"{tag}-src"] == " ".join(f"'sha256-{digest}'" for digest in digests)
        assert len(digests) == count
    assert "unsafe" not in policy
    assert rules["default-src"] == "'none'"
    assert (rules["require-trusted-types-for"], rules["trusted-types"]) == ("'script'", "dompurify")


def test_nothing_is_loaded_from_elsewhere() -> None:
    html = page().html
    for path in LIBRARIES:  # they may speak of addresses; the policy lets them load nothing
        html = html.replace(path.read_text(encoding="utf-8"), "")
    assert not re.search(r"(?:src|href)=\"(?!data:|#)", html)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", html)
    assert not re.search(r"url\(|@import", html)


@pytest.mark.parametrize("path", LIBRARIES, ids=lambda path: path.name)
def test_libraries_are_those_released_and_licensed(path: Path) -> None:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert f"| `{path.name}` |" in (told := (path.parent / "README.md").read_text(encoding="utf-8"))
    assert f"`{digest}`" in told
    assert (path.parent / f"{path.name.split('.')[0]}.LICENSE").stat().st_size > 1000
    assert "<!--" not in re.sub("<!--.*?>", "", text := path.read_text(encoding="utf-8"))  # nothing hides its end
    assert "</script" not in text.lower()


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_make_no_markup_of_text(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|DOMParser", text)
    assert text.count("\n") < 400


def test_every_script_is_in_the_page() -> None:
    html = page().html
    for path in SCRIPTS:
        assert path.read_text(encoding="utf-8").splitlines()[0] in html


def test_the_page_comes_with_its_policy_and_stays_out_of_the_schema() -> None:
    app = FastAPI()
    app.include_router(playground(Gauges(), lambda: True))
    client = TestClient(app)
    answer = client.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-security-policy"] == page().policy
    assert client.get("/stats").json()["speculating"] is True
    assert client.get("/openapi.json").json()["paths"] == {}
    assert client.get("/stats").json()["learning"] is False
    assert client.get("/learning").status_code == 404


def test_what_was_learnt_is_shown_by_servers_that_learn() -> None:
    app, ready = FastAPI(), [True]

    def speculating() -> bool:
        if not ready[0]:
            raise HTTPException(503)
        return True

    app.include_router(playground(Gauges(), speculating, lambda: {"events": []}))
    client = TestClient(app)
    assert client.get("/stats").json()["learning"] is True
    assert client.get("/learning").json() == {"events": []}
    assert client.post("/learning").status_code == 405, "it is read only"
    ready[0] = False
    assert client.get("/learning").status_code == 503
