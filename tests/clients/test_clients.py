"""Client libraries and agents, unmodified, against `eyas serve` with the demo pair (`make clients`)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..toy.pair import TOY_DRAFTER, TOY_TARGET
from .environments import FOLDER, HERE, NPM, VERSIONS, python_of

OF_CLIENTS = ("PYTHON", "EYAS", "OPENAI", "ANTHROPIC", "OLLAMA", "AIDER", "QWEN")
"""How variables begin that would change what a client does."""
INSIDE = HERE / "inside"
PAGE = HERE.parents[1] / "docs" / "serve.md"


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the demo pair is served, by a process of its own."""
    log = tmp_path_factory.mktemp("server") / "log"
    pair = ["--model", str(_with_context(tmp_path_factory.mktemp("target"), 16384)), "--draft-model", str(TOY_DRAFTER)]
    names = ["--served-model-name", "demo", "--served-model-name", "llama-server"]  # the latter for llm's plugin
    served = [sys.executable, "-m", "eyas", "serve", *pair, *names, "--port", "0"]
    with log.open("w") as out, subprocess.Popen([*served, "--tree", "chain:3"], stdout=out, stderr=out) as process:
        try:
            yield _when_ready(process, log)
        finally:
            process.terminate()


def _with_context(folder: Path, tokens: int) -> Path:
    """The demo target with a longer context, made in `folder`: agents send prompts longer than its own."""
    for file in TOY_TARGET.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((TOY_TARGET / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": tokens}), encoding="utf-8")
    return folder


def _when_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    until = time.monotonic() + 300
    while time.monotonic() < until:
        assert process.poll() is None, log.read_text()
        found = re.search(r"http://[0-9.]+:[0-9]+", log.read_text())
        try:
            if found and urllib.request.urlopen(f"{found.group()}/health", timeout=10).status == 200:
                return found.group()
        except (urllib.error.URLError, TimeoutError):
            pass
        time.sleep(0.2)
    raise AssertionError(f"not ready in five minutes: {log.read_text()}")


def test_every_client_has_cases() -> None:
    assert {path.stem for path in INSIDE.glob("cases_*.py")} == {f"cases_{_module(name)}" for name in VERSIONS}


def test_the_page_names_the_versions_that_are_run() -> None:
    rows = re.search(r"^\| client \|.*\n\|---.*\n((?:\|.*\n)+)", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows
    named = [row.split("|")[1].split()[:2] for row in rows[1].splitlines()]
    clients = [next(each for each in packages if not each.startswith("torch==")) for packages in VERSIONS.values()]
    assert named == [re.split("==|(?<=.)@", re.sub(r"\[.*\]", "", each.removeprefix(NPM))) for each in clients]


@pytest.mark.slow
@pytest.mark.parametrize("client", VERSIONS)
def test_client(client: str, url: str, tmp_path: Path) -> None:
    python = python_of(client)
    if python is None:
        pytest.skip(f"{FOLDER.name}/{client} isn't there, or has other versions: `make clients` makes it")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(OF_CLIENTS)},
        "EYAS_URL": url, "EYAS_TOKENIZER": str(TOY_TARGET), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HOME": str(tmp_path),
    }  # fmt: skip
    pytest_inside = [str(python), "-m", "pytest", "-q", "-rx", "--tb=short", "-p", "no:cacheprovider"]
    cases = [f"--rootdir={INSIDE}", "-c", str(INSIDE / "pytest.ini"), str(INSIDE / f"cases_{_module(client)}.py")]
    done = subprocess.run(
        [*pytest_inside, *cases], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


def _module(client: str) -> str:
    return client.replace("-", "_")
