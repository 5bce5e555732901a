"""The page in headless Chromium, on canned answers: talking, trees, errors, stopping, by keyboard, on a phone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from playwright.sync_api import expect

from eyas.serve.playground import page as gauges

from .fake_server import HOSTILE, WORDS, FakeServer, engine_state, serving

ANSWER = "".join(WORDS)
SHOWN = "The eagle sees its prey from afar, and dives.x"  # the last word is code
PHONE = {"viewport": {"width": 360, "height": 740}}


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    with serving(fake.app) as fake.url:
        yield fake


def say(page: Any, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def shown(page: Any) -> str:
    """The tokens' texts as they are shown."""
    return "".join(page.locator(".answer .tok").all_text_contents())


def test_a_conversation(server: FakeServer, open_page: Any) -> None:
    page = open_page(server.url)
    expect(page.locator("#model")).to_have_text("fake-model")
    say(page, "first")
    expect(page.locator(".figures-line")).to_contain_text(f"{len(WORDS)} tokens")
    assert shown(page) == SHOWN
    drafted = page.locator(".answer .tok.drafted").all_text_contents()
    assert drafted == [word.strip("\n") for i, word in enumerate(WORDS) if i % 4 != 3 and i < 11]
    say(page, "second")
    expect(page.locator(".figures-line")).to_have_count(2)
    assert server.bodies[1]["messages"] == [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": "second"},
    ]
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator(".turn")).to_have_count(0)
    page.locator(".example").first.click()
    expect(page.locator(".figures-line")).to_have_count(1)
    assert len(server.bodies[2]["messages"]) == 1


def test_settings_are_sent_and_kept(server: FakeServer, open_page: Any) -> None:
    page = open_page(server.url)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("0.7")
    page.get_by_label("Seed").fill("11")
    page.get_by_label("Most tokens").fill("5")
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Draft ahead").uncheck()
    page.get_by_role("button", name="Done").click()
    page.reload()
    say(page, "hello")
    expect(page.locator(".figures-line")).to_have_count(1)
    (body,) = server.bodies
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (body["temperature"], body["seed"], body["max_tokens"]) == (0.7, 11, 5)
    assert body["eyas"] == {"speculate": False, "trace": True}
    assert page.locator(".answer .drafted").count() == 0


def test_the_tree_of_a_token_on_focus_and_round_by_round(server: FakeServer, open_page: Any) -> None:
    page = open_page(server.url)
    say(page, "first")
    expect(page.locator(".figures-line")).to_have_count(1)
    page.locator(".answer .tok").first.focus()
    title = page.locator("#round-title")
    nodes = page.get_by_role("treeitem")
    expect(title).to_have_text("Round 1 of 4")
    expect(nodes).to_have_count(13)  # three accepted and a last guess, each with a rival and its child; the own token
    assert page.locator(".node.walked .name").all_text_contents() == ["The", "·eagle", "·sees"]
    assert page.locator(".node.own .name").all_text_contents() == ["·its"]
    expect(nodes.first).to_have_attribute("aria-label", re.compile("80% after its parent.*80% for the whole path"))
    expect(nodes.nth(1)).to_have_attribute("aria-label", re.compile("80% after its parent.*64% for the whole path"))
    for _ in range(4):
        page.keyboard.press("ArrowRight")
    expect(title).to_have_text("Round 2 of 4")
    page.get_by_role("button", name="Next round").click()
    expect(title).to_have_text("Round 3 of 4")
    assert page.locator(".answer .tok.shown").all_text_contents() == [" and", " dives", "."]  # and the code's fence
    page.locator(".answer .tok").last.hover()
    expect(title).to_have_text("Round 4 of 4")
    expect(page.get_by_role("button", name="Next round")).to_be_disabled()


@pytest.mark.parametrize(
    ("said", "words", "kept"),
    [
        ("too long", "context holds 2048: shorten the prompt", 0),
        pytest.param("busy", "try again in 7 s (the queue is full)", 0, marks=pytest.mark.slow),  # as in a race
        ("lost", "connection was lost", 1),
        ("broken", "the engine stopped", 1),
    ],
)
def test_errors_in_words(server: FakeServer, open_page: Any, said: str, words: str, kept: int) -> None:
    page = open_page(server.url, refusals=True)
    say(page, said)
    expect(page.get_by_role("alert")).to_contain_text(words)
    expect(page.locator(".answer")).to_have_count(kept)
    page.get_by_role("button", name="Try again").click()
    expect(page.get_by_role("alert")).to_contain_text(words)
    assert [body["messages"] for body in server.bodies] == [[{"role": "user", "content": said}]] * len(server.bodies)


def test_a_server_that_is_gone(server: FakeServer, open_page: Any) -> None:
    page = open_page(server.url, refusals=True)
    expect(page.locator("#model")).to_have_text("fake-model")
    page.route("**/v1/chat/completions", lambda route: route.abort())
    say(page, "anyone?")
    expect(page.get_by_role("alert")).to_contain_text("can't be reached")


def test_a_server_that_loads_and_comes_back_as_another(server: FakeServer, open_page: Any) -> None:
    server.loading = True
    page = open_page(server.url, refusals=True)
    expect(page.locator("#gauge-note")).to_have_text("Not ready: the model is being loaded.")
    server.loading = False
    expect(page.locator("#model")).to_have_text("fake-model")
    expect(page.locator("#gauge-note")).to_have_text("")
    page.route("**/stats", lambda route: route.abort())
    expect(page.locator("#model")).to_have_text("not connected")
    server.model = "another"
    page.unroute("**/stats")
    expect(page.locator("#model")).to_have_text("another")
    say(page, "first")
    expect(page.locator(".figures-line")).to_have_count(1)
    assert server.bodies[0]["model"] == "another"


def test_a_key_is_asked_for(open_page: Any) -> None:
    fake = FakeServer(key="sesame")
    with serving(fake.app) as url:
        page = open_page(url)
        expect(page.get_by_role("alert")).to_contain_text("API key")
        expect(page.get_by_label("API key")).to_be_focused()
        page.keyboard.type("sesame")
        page.keyboard.press("Enter")
        expect(page.locator("#model")).to_have_text("fake-model")
        say(page, "hello")
        expect(page.locator(".figures-line")).to_have_count(1)
        assert "sesame" not in page.evaluate("JSON.stringify(localStorage)")


def test_stopping(server: FakeServer, open_page: Any) -> None:
    page = open_page(server.url)
    say(page, "endless")
    expect(page.locator(".answer .tok").nth(8)).to_be_visible()
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".notice")).to_contain_text("Stopped")
    assert server.left.wait(5)  # the server saw the client go
    part = shown(page)
    say(page, "go on")
    expect(page.locator(".figures-line")).to_have_count(2)
    sent = server.bodies[1]["messages"][1]
    assert sent["role"] == "assistant"
    assert sent["content"].startswith(ANSWER[:40])
    assert part.startswith(sent["content"][:40])


def test_a_new_conversation_ends_the_answer_on_its_way(server: FakeServer, open_page: Any) -> None:
    page = open_page(server.url)
    say(page, "endless")
    expect(page.locator(".answer .tok").nth(4)).to_be_visible()
    page.get_by_role("button", name="New conversation").click()
    assert server.left.wait(5)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    say(page, "hello")
    expect(page.locator(".figures-line")).to_have_count(1)
    assert server.bodies[1]["messages"] == [{"role": "user", "content": "hello"}]


def test_by_keyboard_alone(server: FakeServer, open_page: Any) -> None:
    page = open_page(server.url)
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    expect(page.locator(".figures-line")).to_have_count(1)
    assert server.bodies[0]["messages"][0]["content"] == "one\ntwo"
    for name in ("Regenerate", "Copy the answer", "Copy the code"):  # back into the answer, one stop
        page.keyboard.press("Shift+Tab")
        expect(page.get_by_role("button", name=name)).to_be_focused()
    page.keyboard.press("Shift+Tab")
    expect(page.locator(".answer .tok").first).to_be_focused()
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("ArrowDown")
    expect(page.locator("#round-title")).to_have_text("Round 2 of 4")
    page.keyboard.press("End")
    expect(page.locator("#round-title")).to_have_text("Round 4 of 4")
    page.keyboard.press("ArrowUp")
    for _ in range(20):  # on to the tree: message, buttons, rounds
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.getAttribute('role')") == "treeitem":
            break
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    expect(page.locator("#round-node")).to_contain_text("after its parent")
    page.keyboard.press("Escape")
    expect(page.locator(".answer .tok:focus")).to_have_count(1)
    page.get_by_label("Message", exact=True).focus()
    page.keyboard.type("endless")
    page.keyboard.press("Enter")
    expect(page.locator(".answer").nth(1).locator(".tok").nth(4)).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator(".notice")).to_contain_text("Stopped")
    page.get_by_role("tab", name="Chat").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Race")).to_be_focused()
    expect(page.get_by_label("Prompt for the race")).to_be_visible()
    for name in ("Conversations", "Theme: auto", "Settings"):
        page.keyboard.press("Tab")
        expect(page.get_by_role("button", name=name)).to_be_focused()
        if name.startswith("Theme"):
            continue
        page.keyboard.press("Enter")
        expect(page.get_by_role("dialog")).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.get_by_role("button", name=name)).to_be_focused()


@pytest.mark.parametrize("scheme", [pytest.param("light", marks=pytest.mark.slow), "dark"])
def test_a_phone_scrolls_only_down(server: FakeServer, open_page: Any, scheme: str) -> None:
    page = open_page(server.url, color_scheme=scheme, has_touch=True, **PHONE)
    name = page.locator("#model")
    expect(name).to_have_text("fake-model")
    assert name.evaluate("(one) => one.getBoundingClientRect().width") > 300
    fits = "document.documentElement.scrollWidth <= innerWidth && document.body.scrollWidth <= innerWidth"
    busy = engine_state(running=256, waiting=1024, cached_tokens=999_999, cache_limit=1_000_000)
    server.gauges.stepped(busy, None, None)
    expect(page.locator("#gauge-waiting")).to_have_text("1024")
    assert page.evaluate(fits)
    say(page, "W" * 200)
    expect(page.locator(".figures-line")).to_have_count(1)
    assert page.evaluate(fits)
    expect(page.locator("#inspector")).to_be_hidden()
    page.locator(".answer .tok").nth(2).tap()
    expect(page.get_by_role("treeitem").first).to_be_visible()
    assert page.evaluate(fits)
    page.get_by_role("button", name="Close the draft tree").click()
    expect(page.locator("#inspector")).to_be_hidden()
    page.get_by_role("tab", name="Race").click()
    page.get_by_label("Prompt for the race").fill("x")
    page.get_by_role("button", name="Race").click()
    expect(page.locator(".speedup")).to_be_visible()
    assert page.evaluate(fits)
    page.get_by_role("button", name="Settings").click()
    assert page.evaluate(fits)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(250, 249, 247)") == (scheme == "light")


def test_text_that_looks_like_markup_stays_text(server: FakeServer, open_page: Any) -> None:
    page = open_page(server.url)
    say(page, "hostile")
    expect(page.locator(".figures-line")).to_have_count(1)
    assert shown(page) == "".join(HOSTILE)
    page.locator(".answer .tok").first.focus()
    expect(page.locator(".node .name").first).to_contain_text("<img")
    say(page, "<b>bold</b>")
    expect(page.locator(".said").nth(1)).to_have_text("<b>bold</b>")
    assert page.locator("img, .answer script, .said b").count() == 0
    assert page.evaluate("document.body.id") == ""


def test_the_race(open_page: Any) -> None:
    fake = FakeServer(pause=0.02)
    with serving(fake.app) as url:
        page = open_page(url, refusals=True)
        page.get_by_role("tab", name="Race").click()
        page.get_by_label("Prompt for the race").fill("go")
        page.keyboard.press("Enter")
        expect(page.locator(".speedup")).to_have_text(re.compile(r"^\d+\.\d\d. as fast$"))
        expect(page.locator("#race-result")).to_contain_text(f"Identical: all {len(WORDS)} tokens")
        assert [body["eyas"]["speculate"] for body in fake.bodies[-2:]] == [False, True]
        assert fake.bodies[-2] | {"eyas": None} == fake.bodies[-1] | {"eyas": None}
        expect(page.locator("#lane-plain-figures")).to_contain_text("1.00")
        expect(page.locator("#lane-speculative-figures")).to_contain_text("3.75")  # as the server counts
        page.get_by_role("button", name="Replay").click()
        expect(page.locator(".unseen")).not_to_have_count(0)
        expect(page.locator(".unseen")).to_have_count(0)
        page.get_by_label("Prompt for the race").fill("endless")
        page.keyboard.press("Enter")
        expect(page.locator("#lane-plain .tok").first).to_be_visible()
        page.keyboard.press("Escape")
        expect(page.locator("#race-result")).to_have_text("Stopped.")
        page.get_by_label("Prompt for the race").fill("busy")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("try again in 7 s")


def test_a_race_that_cannot_be_trusted_says_so(open_page: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    warning = "the machine was busy (load 9 on 2 cores)"
    monkeypatch.setattr(gauges, "busy", lambda _: warning)
    fake = FakeServer(pause=0.04)  # its plain passes take four times as long: no draft can do that
    fake.gauges.stepped(engine_state(), None, None)
    with serving(fake.app) as url:
        page = open_page(url)
        expect(page.locator("#gauge-running")).to_have_text("0")
        page.get_by_role("tab", name="Race").click()
        page.get_by_label("Prompt for the race").fill("go")
        page.keyboard.press("Enter")
        expect(page.locator("#race-result")).to_contain_text(f"Beware: {warning}.")
        expect(page.locator("#race-result")).to_contain_text("at 3.75 tokens per pass can't be")


def test_the_gauges_show_the_load(server: FakeServer, open_page: Any) -> None:
    page = open_page(server.url, refusals=True)
    outcome: Any = SimpleNamespace(accepted=[3, 2], tokens=[[1] * 4, [1] * 3], contexts=[30, 5000], nodes=[20, 10])
    load = engine_state(running=2, waiting=5, cached_tokens=40, cache_limit=100)
    expect(page.locator("#gauge-running")).to_have_text("0")
    server.gauges.stepped(load, None, outcome)
    shown = {"running": "2", "waiting": "5", "accept": "3.50", "cache": "40%", "tree": "15 nodes"}
    shown["context"] = "0-1k: 4.00, 4-8k: 3.00"
    for name, text in shown.items():
        expect(page.locator(f"#gauge-{name}")).to_have_text(text)
    page.route("**/stats", lambda route: route.abort())
    expect(page.locator("#gauge-note")).to_contain_text("can't be reached")
    expect(page.locator("#gauge-running")).not_to_have_text("2")


@pytest.mark.slow
def test_the_gauges_rest_while_nobody_looks(server: FakeServer, open_page: Any) -> None:
    page = open_page(server.url)
    expect(page.locator("#gauge-running")).to_have_text("0")
    page.evaluate(
        "Object.defineProperty(document, 'hidden', {get: () => true, configurable: true});"
        "document.dispatchEvent(new Event('visibilitychange'))"
    )
    page.wait_for_timeout(100)  # one may be on its way
    polls = server.polls
    page.wait_for_timeout(1300)
    assert server.polls == polls
    page.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    page.wait_for_timeout(300)
    assert server.polls > polls
