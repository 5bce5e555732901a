"""A headless Chromium for all tests of the page, and a page that must not throw or violate its CSP."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no Chromium on the path")
    api.expect.set_options(timeout=20_000)  # a busy machine must not fail tests
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Any]:
    """`open_page(url, **context)`: a fresh browser profile at `url`; errors on the page fail the test."""
    contexts, wrong = [], []

    def opened(url: str, **settings: Any) -> Any:
        context = browser.new_context(**settings)
        context.set_default_timeout(10_000)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: wrong.append(said.text) if "Content Security Policy" in said.text else None)
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not wrong
