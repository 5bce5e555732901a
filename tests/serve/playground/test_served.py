"""The page on a real server: the demo pair answers, is raced, refuses and is stopped."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import expect
from pydantic import SecretStr

from eyas.serve.app import create_app
from eyas.serve.context import ServeSettings
from eyas.serve.engine_thread import EngineThread
from eyas.serve.playground.page import Gauges
from eyas.session import load

from ...toy.pair import TOY_DRAFTER, TOY_TARGET
from .fake_server import serving

QUESTION = "Natalia sold 48 clips in April and half as many in May. How many clips did she sell altogether?"
CLAUSE = "and then she sold half as many clips again to all of her friends in May "


@pytest.fixture(scope="module")
def gauges() -> Gauges:
    return Gauges()


@pytest.fixture(scope="module")
def thread(browser: Any, gauges: Gauges) -> Iterator[EngineThread]:  # noqa: ARG001  # nothing is loaded without a browser
    engine = EngineThread(lambda: load(TOY_TARGET, TOY_DRAFTER), observer=gauges)
    engine.start()
    yield engine
    engine.stop()
    engine.join(10)


@pytest.fixture(scope="module")
def url(thread: EngineThread, gauges: Gauges) -> Iterator[str]:
    with serving(create_app(thread, ServeSettings(model_names=("demo",)), gauges, gauges)) as address:
        yield address


@pytest.fixture
def page(url: str, open_page: Callable[..., Any]) -> Any:
    opened = open_page(url, refusals=True)
    expect(opened.locator("#model")).to_have_text("demo", timeout=30_000)  # it may be loading still
    opened.get_by_role("button", name="Settings").click()
    opened.get_by_label("Most tokens").fill("40")
    opened.get_by_role("button", name="Done").click()
    return opened


def say(page: Any, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def test_a_conversation_with_its_trees(page: Any, gauges: Gauges) -> None:
    say(page, QUESTION)
    figures = page.locator(".figures-line")
    expect(figures).to_contain_text("tokens per pass", timeout=30_000)
    count = int(re.match(r"\d+", figures.text_content())[0])  # type: ignore[index]
    assert page.locator(".answer .tok").count() == count <= 40
    assert page.locator(".answer .tok.drafted").count() > 0
    page.locator(".answer .tok.drafted").first.focus()
    walked = page.locator(".node.walked").all()
    shown = page.locator(".answer .tok.drafted.shown")
    assert len(walked) == shown.count() > 0
    assert all("accepted" in node.get_attribute("aria-label") for node in walked)
    assert page.locator(".node.left").count() > 0
    assert gauges.read()["tokens_total"] >= count
    expect(page.locator("#gauge-accept")).to_have_text(re.compile(r"\d\.\d\d"))


def test_the_race(page: Any) -> None:
    page.get_by_role("tab", name="Race").click()
    page.get_by_label("Prompt for the race").fill(QUESTION)
    page.keyboard.press("Enter")
    expect(page.locator(".speedup")).to_be_visible(timeout=30_000)
    expect(page.locator("#race-result")).to_contain_text("Identical: all")
    texts = [page.locator(f"#lane-{lane} .answer").text_content() for lane in ("plain", "speculative")]
    assert texts[0] == texts[1] != ""
    assert page.locator("#lane-plain .drafted").count() == 0
    assert page.locator("#lane-speculative .drafted").count() > 0


def test_too_long_a_message_is_refused_in_the_servers_words(page: Any) -> None:
    say(page, CLAUSE * 300)
    expect(page.get_by_role("alert")).to_contain_text("context")


def test_stopping_frees_the_server(page: Any, thread: EngineThread, gauges: Gauges) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Most tokens").fill("1500")
    page.get_by_role("button", name="Done").click()
    # in the page itself: on a busy machine the answer would be complete before this process learns of its first token
    page.evaluate("""() => new MutationObserver((_, observer) => {
        if (document.querySelector(".answer .tok")) {
            observer.disconnect();
            document.dispatchEvent(new KeyboardEvent("keydown", {key: "Escape", bubbles: true}));
        }
    }).observe(document.body, {childList: true, subtree: true})""")
    say(page, "What does this function do?\n\ndef f(x):\n    return x")
    expect(page.locator(".notice")).to_contain_text("Stopped")
    until = time.monotonic() + 10
    while not (thread.idle and gauges.read()["running"] == 0):
        assert time.monotonic() < until
        time.sleep(0.02)


def test_a_server_with_a_key(thread: EngineThread, gauges: Gauges, open_page: Any) -> None:
    settings = ServeSettings(model_names=("demo",), api_keys=(SecretStr("sesame"),))
    with serving(create_app(thread, settings, gauges, gauges)) as url:
        page = open_page(url, refusals=True)
        expect(page.get_by_role("alert")).to_contain_text("API key")
        page.get_by_label("API key").fill("wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("the API key is wrong")
        page.get_by_label("API key").fill("sesame")
        page.keyboard.press("Enter")
        expect(page.locator("#model")).to_have_text("demo")
        expect(page.locator("#gauge-running")).to_have_text("0")
