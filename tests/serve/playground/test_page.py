"""The document and its files: nothing comes from elsewhere, only named scripts run, and text is set as text."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fastapi import FastAPI, HTTPException
from fastapi.testclient import TestClient
from pydantic import SecretStr

import eyas.serve.playground as room
from eyas.serve.app import create_app
from eyas.serve.context import ServeSettings
from eyas.serve.engine_thread import EngineThread
from eyas.serve.errors import ApiError
from eyas.serve.playground.page import PAGE_PATHS, Gauges, playground

from ..fakes import FakeEngine

HERE = Path(room.__file__).parent
SCRIPTS = sorted((HERE / "script").glob("*.js"))
LIBRARIES = sorted((HERE / "libraries").glob("*.js"))


class Elements(HTMLParser):
    """Collects the elements of a document: names and attributes."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def all(self, attribute: str) -> list[str]:
        return [attrs[attribute] or "" for _, attrs in self.found if attribute in attrs]


@pytest.fixture
def client() -> TestClient:
    app = FastAPI()
    app.include_router(playground(Gauges(), lambda: True))
    return TestClient(app)


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_only_what_the_document_names_is_run(client: TestClient) -> None:
    answers = [client.get("/") for _ in range(2)]
    nonces = []
    for answer in answers:
        rules = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
        loaded = [attrs for tag, attrs in Elements(answer.text).found if tag == "script" or "nonce" in attrs]
        assert [attrs["nonce"] for attrs in loaded] == [loaded[0]["nonce"]] * (len(LIBRARIES) + 2)
        nonces.append(loaded[0]["nonce"])
        assert rules["script-src"] == rules["style-src"] == f"'nonce-{nonces[-1]}'"
        assert rules["default-src"] == "'none'"
        assert (rules["require-trusted-types-for"], rules["trusted-types"]) == ("'script'", "dompurify")
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert not [name for _, attrs in Elements(answer.text).found for name in attrs if name.startswith("on")]
        assert "{{" not in answer.text
    assert nonces[0] != nonces[1]


def test_nothing_is_loaded_from_elsewhere(client: TestClient) -> None:
    page = Elements(read(HERE / "page.html"))
    named = {name for name in (*page.all("src"), *page.all("href")) if not name.startswith(("data:", "#"))}
    for name in named:
        assert client.get(f"/{name}").status_code == 200
    assert not re.search(r"url\(|@import|https?:", read(HERE / "style.css"))
    for path in SCRIPTS:
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", read(path))


def test_every_script_is_loaded_and_every_import_is_there() -> None:
    imports = {
        path.name: set(re.findall(r'^import [^;]*? from "\./(.*?)";$', read(path), re.MULTILINE)) for path in SCRIPTS
    }
    for path in SCRIPTS:
        assert len(re.findall(r"\bimport\b.* from", read(path))) == len(imports[path.name])
    reached = set()
    wanted = {"main.js"}
    while wanted:
        reached |= wanted
        wanted = set().union(*(imports[name] for name in wanted)) - reached
    assert reached == set(imports)


def test_scripts_and_style_find_what_they_look_for_in_the_document() -> None:
    ids = Counter(Elements(read(HERE / "page.html")).all("id"))
    assert not [name for name, count in ids.items() if count > 1]
    for path in SCRIPTS:
        assert set(re.findall(r'byId\("([^"]+)"\)', read(path))) <= set(ids)
    assert set(re.findall(r"#([a-z][\w-]+)(?![^{]*;)", read(HERE / "style.css"))) <= set(ids)
    for _, attrs in Elements(read(HERE / "page.html")).found:
        for name in ("for", "aria-controls", "aria-labelledby"):
            assert attrs.get(name) is None or attrs[name] in ids


def test_every_button_does_something() -> None:
    listened = "".join(map(read, SCRIPTS))
    for tag, attrs in Elements(read(HERE / "page.html")).found:
        if tag == "button" and attrs["type"] != "submit":
            assert f'byId("{attrs["id"]}")' in listened


@pytest.mark.parametrize("path", LIBRARIES, ids=lambda path: path.name)
def test_libraries_are_those_released_and_licensed(path: Path) -> None:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert f"| `{path.name}` |" in (told := read(path.parent / "README.md"))
    assert f"`{digest}`" in told
    assert (path.parent / f"{path.name.split('.')[0]}.LICENSE").stat().st_size > 1000


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_make_no_markup_of_text(path: Path) -> None:
    text = read(path)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|DOMParser", text)


def test_files_are_sent_once_as_they_are(client: TestClient) -> None:
    first = client.get("/playground/script/main.js")
    assert first.text == read(HERE / "script/main.js")
    assert first.headers["content-type"].startswith("text/javascript")
    again = client.get("/playground/script/main.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get("/playground/style.css").headers["content-type"].startswith("text/css")
    for name in ("page.html", "page.py", "libraries/README.md", "../page.py", "%2e%2e/page.py", "script"):
        assert client.get(f"/playground/{name}").status_code == 404


def test_the_page_needs_no_key_and_says_that_the_api_does() -> None:
    settings = ServeSettings(model_names=("tiny",), api_keys=(SecretStr("one"),))
    app = create_app(EngineThread(FakeEngine), settings, gauges=Gauges())
    client = TestClient(app, base_url="http://localhost")
    assert 'data-keys="needed"' in client.get("/").text
    assert {client.get(path).status_code for path in PAGE_PATHS} == {200}
    assert client.get("/stats").status_code == 401


def test_the_routes_stay_out_of_the_schema(client: TestClient) -> None:
    assert client.get("/stats").json()["speculating"] is True
    assert client.get("/openapi.json").json()["paths"] == {}
    assert client.get("/stats").json()["learning"] is False
    assert client.get("/learning").status_code == 404


def test_a_server_that_is_not_ready_says_so_without_an_error() -> None:
    def loading() -> bool:
        raise ApiError(503, "the model is being loaded")

    app = FastAPI()
    app.include_router(playground(Gauges(), loading))
    answer = TestClient(app).get("/stats")
    assert (answer.status_code, answer.json()["unavailable"]) == (200, "the model is being loaded")


def test_what_was_learned_is_shown_by_servers_that_learn() -> None:
    app = FastAPI()
    ready = [True]

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
