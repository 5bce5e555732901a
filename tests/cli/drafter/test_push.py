"""`eyas push` against a stand-in of the Hub's API on this machine."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from ...pairs import Pair

Run = Callable[..., Result]
REPO = "me/tiny-eagle3"


class Hub(ThreadingHTTPServer):
    """What the Hub does with a new repository and a commit; weights come by Git LFS, as there."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.created: list[dict[str, Any]] = []
        self.stored: dict[str, bytes] = {}
        self.uploaded: dict[str, bytes] = {}
        self.commits: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _answer(self, content: Any, status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_PUT(self) -> None:
        self.server.uploaded[self.path.rpartition("/")[2]] = self._body()
        self._answer({})

    def do_POST(self) -> None:
        hub = self.server
        body = self._body()
        if self.headers.get("Authorization") != "Bearer hf_secret":
            self._answer({"error": "Invalid credentials in Authorization header"}, 401)
        elif self.path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif self.path == "/api/repos/create":
            hub.created.append(json.loads(body))
            self._answer({"url": f"{hub.url}/{REPO}"})
        elif self.path == f"/api/models/{REPO}/preupload/main":
            files = json.loads(body)["files"]
            modes = {each["path"]: "lfs" if "safetensors" in each["path"] else "regular" for each in files}
            self._answer({"files": [{"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": None}
                                    for path, mode in modes.items()]})  # fmt: skip
        elif self.path == f"/{REPO}.git/info/lfs/objects/batch":
            objects = [
                {
                    "oid": each["oid"],
                    "size": each["size"],
                    "actions": {"upload": {"href": f"{hub.url}/lfs/{each['oid']}"}},
                }
                for each in json.loads(body)["objects"]
            ]
            self._answer({"transfer": "basic", "objects": objects})
        elif self.path.startswith(f"/api/models/{REPO}/commit/main"):
            self._commit([json.loads(line) for line in body.splitlines()])
        else:
            self._answer({"error": f"no {self.path}"}, 404)

    def _commit(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.server.commits.append(value)
            elif line["key"] == "file":
                self.server.stored[value["path"]] = base64.b64decode(value["content"])
            else:
                self.server.stored[value["path"]] = self.server.uploaded[value["oid"]]
        self._answer({"commitUrl": f"{self.server.url}/{REPO}/commit/abc", "commitOid": "abc", "hookOutput": ""})


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Where this process pushes to: huggingface_hub read the environment when it was imported."""
    server = Hub()
    for name, value in {"ENDPOINT": server.url, "HF_HUB_OFFLINE": False, "HF_HUB_DISABLE_XET": True}.items():
        monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def evidence(tmp_path: Path, pair: Pair) -> tuple[Path, Path]:
    """A certificate and a measurement, in the form that the verbs write (`test_real_evidence_is_read`)."""
    cell = {"temperature": 0.7, "tree": "chain:4", "batch_size": 1, "rows": 8, "tokens": 512, "verdict": "equal"}
    certificate = {
        "model": str(pair.model), "draft_model": str(pair.drafter), "promise": "float32: every token equal",
        "equal": True, "errors": [], "cells": [cell],
    }  # fmt: skip
    line = {"task": "gsm8k", "method": "chain:4", "tokens_per_second": 81.25, "speedup": 1.618, "accept_length": 2.718}
    plain = line | {"method": "none", "speedup": None, "accept_length": 1.0}
    settings = {"drafters": [str(pair.drafter)], "sampling": {"temperature": 0.7}}
    bench = {"machine": {"cpu": "A Processor"}, "settings": settings, "lines": [plain, line], "errors": []}
    for name, content in (("certificate", certificate), ("bench", bench)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    return tmp_path / "certificate.json", tmp_path / "bench.json"


@pytest.mark.filterwarnings("ignore:Use .content=:DeprecationWarning")  # huggingface_hub, of how it calls httpx
def test_a_drafter_its_card_and_its_evidence_are_one_commit(
    run: Run, hub: Hub, pair: Pair, evidence: tuple[Path, Path]
) -> None:
    certificate, bench = evidence
    proof = ("--certificate", certificate, "--bench", bench)
    done = run("push", pair.drafter, REPO, *proof, "--model", "owner/target", "--license", "apache-2.0", "--private")
    assert done.exit_code == 0, done.stderr
    assert done.stdout == f"{hub.url}/{REPO}/commit/abc\n"
    assert hub.created[0]["name"] == "tiny-eagle3"
    assert hub.created[0]["organization"] == "me"
    assert hub.created[0]["visibility"] == "private"  # what huggingface_hub 2 makes of private=True
    assert len(hub.commits) == 1
    card = hub.stored.pop("README.md").decode()
    assert hub.stored == {
        "config.json": (pair.drafter / "config.json").read_bytes(),
        "model.safetensors": (pair.drafter / "model.safetensors").read_bytes(),
        "eyas_certificate.json": certificate.read_bytes(),
        "eyas_bench.json": bench.read_bytes(),
    }
    assert "base_model: owner/target\n" in card
    assert "license: apache-2.0\n" in card
    assert f"eyas serve owner/target --draft-model {REPO}" in card
    assert "| 0.7 | chain:4 | 1 | 8 | 512 | equal |" in card
    assert "| gsm8k | 0.7 | chain:4 | 2.72 | 81.2 | 1.62x |" in card
    assert "A Processor" in card
    assert "| none |" not in card


def test_a_refused_push_says_why(run: Run, hub: Hub, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    done = run("push", pair.drafter, REPO)
    assert done.exit_code == 1
    assert done.stderr.splitlines()[-1].startswith(f"error: {REPO} was not pushed to {hub.url}: ")
    assert "hf auth login" in done.stderr
    assert hub.commits == []


def test_a_dry_run_shows_the_card_and_sends_nothing(run: Run, pair: Pair, evidence: tuple[Path, Path]) -> None:
    certificate, _ = evidence
    done = run("push", pair.drafter, REPO, "--certificate", certificate, "--dry-run")  # HF_HUB_OFFLINE: it can't
    assert done.exit_code == 0, done.stderr
    assert "# tiny-eagle3" in done.stdout
    assert "## Losslessness" in done.stdout
    for name in ("config.json", "model.safetensors", "README.md", "eyas_certificate.json"):
        assert f" bytes  {name}\n" in done.stderr
    assert "nothing was sent" in done.stderr
    assert "the card has no license: give --license NAME\n" in done.stderr
    assert "the card has no figures: give --bench FILE, from eyas bench -o\n" in done.stderr
    assert "no certificate" not in done.stderr
    named = run("push", pair.drafter, REPO, "--model", "smollm2", "--license", "apache-2.0", "--dry-run")
    assert "\nbase_model: HuggingFaceTB/SmolLM2-135M-Instruct\n" in named.stdout
    assert "\nlicense: apache-2.0\n" in named.stdout
    assert "no base model" not in named.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"equal": False}, "says that speculation changes tokens"),
        ({"errors": ["row 3"]}, "or that rows failed"),
        ({"draft_model": "another"}, "is about another, not"),
        ({"cells": None}, "lacks"),
    ],
)
def test_a_certificate_that_does_not_hold_is_refused(
    changes: dict[str, Any], message: str, run: Run, pair: Pair, evidence: tuple[Path, Path]
) -> None:
    certificate, _ = evidence
    content = json.loads(certificate.read_text()) | changes
    certificate.write_text(json.dumps({key: each for key, each in content.items() if each is not None}))
    done = run("push", pair.drafter, REPO, "--certificate", certificate, "--dry-run")
    assert done.exit_code == 2
    assert message in done.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings": {"drafters": ["another"]}}, "is about another, not"),
        ({"settings": {}}, "is about no drafter, not"),
        ({"errors": ["row 3"]}, "says that rows failed"),
    ],
)
def test_figures_of_something_else_are_refused(
    changes: dict[str, Any], message: str, run: Run, pair: Pair, evidence: tuple[Path, Path]
) -> None:
    _, bench = evidence
    bench.write_text(json.dumps(json.loads(bench.read_text()) | changes))
    done = run("push", pair.drafter, REPO, "--bench", bench, "--dry-run")
    assert done.exit_code == 2
    assert message in done.stderr


def test_a_drafter_that_will_not_load_is_refused(run: Run, pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((pair.drafter / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    done = run("push", tmp_path, REPO, "--dry-run")
    assert done.exit_code == 1
    assert "won't load, so it isn't pushed" in done.stderr


def test_a_readme_of_the_folder_is_the_card(run: Run, pair: Pair, tmp_path: Path) -> None:
    for each in pair.drafter.iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    (tmp_path / "README.md").write_text("my own words\n")
    assert run("push", tmp_path, REPO, "--dry-run").stdout == "my own words\n\n"
    refused = run("push", tmp_path, REPO, "--dry-run", "--license", "mit")
    assert refused.exit_code == 2
    assert "would be ignored" in refused.stderr


def test_real_evidence_is_read(run: Run, pair: Pair, tmp_path: Path) -> None:
    """What the two verbs write is what the card is made of."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "In May?"}\n')
    chosen = (pair.model, "--draft-model", pair.drafter, "--prompt-file", prompts, "--max-new-tokens", 6)
    verified = run("verify", *chosen, "--tree", "chain:2", "--temperatures", "0", "--batch-sizes", "1", "--json")
    (tmp_path / "certificate.json").write_text(verified.stdout)
    measured = run("bench", *chosen, "--tree", "chain:2", "--repeats", 1, "--warmup", 0, "-o", tmp_path / "bench.json")
    assert measured.exit_code == 0, measured.stderr
    proof = ("--certificate", tmp_path / "certificate.json", "--bench", tmp_path / "bench.json")
    card = run("push", pair.drafter, REPO, *proof, "--dry-run").stdout
    methods = ("--method", "drafter", "--tree", "chain:2", "--temperature", "0,1", "--repeats", 1, "--warmup", 0)
    drafter = ("--draft-model", f"drafter={pair.drafter}", "--prompt-file", prompts, "--max-new-tokens", 6)
    compared = run("bench", "methods", pair.model, *drafter, *methods, "-o", tmp_path / "methods.json")
    assert compared.exit_code == 0, compared.stderr
    both = run("push", pair.drafter, REPO, "--bench", tmp_path / "methods.json", "--dry-run").stdout
    assert "| prompts | 1 | drafter" in both
    assert "| 0 | chain:2 | 1 | 1 | 6 | equal |" in card
    assert "| prompts | 0 | chain:2 | " in card
