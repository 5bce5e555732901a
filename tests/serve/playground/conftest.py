"""A headless Chromium for all tests of the page, and a page that must have nothing to say on its console."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Error, expect, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Playwright's Chromium, or one on the path; where neither starts, the tests that need it are skipped.

    With EYAS_BROWSER=required they fail instead: a machine that should have a browser can't skip them unnoticed.
    """
    expect.set_options(timeout=20_000)  # a busy machine must not fail tests
    with sync_playwright() as playwright:
        failures = []
        for path in (None, *filter(None, map(shutil.which, NAMES))):
            try:
                found = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
            except Error as error:  # there is none, or libraries that it needs are missing
                failures.append(error)
                continue
            yield found
            found.close()
            return
        if os.environ.get("EYAS_BROWSER") == "required":
            raise failures[-1]
        pytest.skip("no Chromium that starts: `make browser` installs one where it can")


@pytest.fixture
def open_page(browser: Any) -> Iterator[Any]:
    """`open_page(url, **context)`: a fresh browser profile at `url`; any message on the console fails the test.

    With `refusals` the browser itself may report that requests failed, as they are meant to.
    """
    contexts, wrong = [], []

    def opened(url: str, *, refusals: bool = False, **settings: Any) -> Any:
        def said(message: Any) -> None:
            if not (refusals and message.text.startswith("Failed to load resource")):
                wrong.append(f"{message.type}: {message.text}")

        context = browser.new_context(**settings)
        context.set_default_timeout(10_000)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", said)
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not wrong
