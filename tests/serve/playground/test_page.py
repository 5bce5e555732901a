"""The document: one file that loads nothing, runs only its own script, and sets text as text."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

import eyas.serve.playground as room
from eyas.serve.playground.gauges import Gauges
from eyas.serve.playground.page import page, playground

HERE = Path(room.__file__).parent
SCRIPTS = sorted((HERE / "script").glob("*.js"))


def test_the_policy_names_what_the_document_holds() -> None:
    html, policy = page()
    for tag, rule in (("style", "style-src"), ("script", "script-src")):
        (text,) = re.findall(f"<{tag}[^>]*>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{rule} 'sha256-{digest}'" in policy
    assert "unsafe" not in policy
    assert "default-src 'none'" in policy


def test_nothing_is_loaded_from_elsewhere() -> None:
    html = page().html
    assert not re.search(r"(?:src|href)=\"(?!data:|#)", html)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", html)
    assert not re.search(r"url\(|@import", html)


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
