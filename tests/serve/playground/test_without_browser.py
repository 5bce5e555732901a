"""The page without a browser: its scripts parsed, linked and run by the JavaScript engine that Playwright has."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import playwright

from .fake_server import WORDS, FakeServer, serving

HERE = Path(__file__).parent
NODE = Path(playwright.__file__).parent / "driver" / "node"


def test_the_page_is_used_without_a_browser() -> None:
    with serving(FakeServer(pause=0.02).app) as url:
        node = [str(NODE), "--experimental-vm-modules", "--no-warnings", str(HERE / "use_page.mjs")]
        done = subprocess.run([*node, url, str(len(WORDS))], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_dom_is_the_one_released() -> None:
    digest = hashlib.sha256((HERE / "linkedom/worker.js").read_bytes()).hexdigest()
    assert f"`{digest}`" in (HERE / "linkedom/README.md").read_text(encoding="utf-8")
