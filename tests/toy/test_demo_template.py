"""The demo's chat template: plain chats are the tokens that the pair was trained on, and tools can be called."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

import eyas
from eyas.serve.tools.parser import ToolCallParser
from eyas.serve.tools.styles import HERMES, detect_tool_style
from eyas.targets import load_tokenizer
from eyas.text.chats import FunctionCall, Message, ToolCall
from eyas.text.template import ChatTemplate, encode_chat

from ..serve.live import Live, live
from .pair import TOY_DRAFTER, TOY_TARGET

pytest.importorskip("llguidance")

TRAINED_ON = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ '<|assistant|>' }}{% generation %}"
    "{{ message['content'] + '<|end|>' }}{% endgeneration %}{% else %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""The template of the chats that target and drafter were trained on."""
PLAIN = [
    [("user", "How many legs have three spiders?")],
    [
        ("system", "Be brief.\n"),
        ("user", " Zürich? \n\n"),
        ("assistant", "    return 24\n"),
        ("user", "日本 'x' \"y\""),
    ],
    [("developer", "Sell clips."), ("user", "In May?"), ("assistant", ""), ("user", "{% raw %} <|end|>")],
    [("assistant", "Hello."), ("user", "tools"), ("system", "late"), ("assistant", "<tool_call>")],
]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "The weather.", "parameters": SCHEMA}}
ASKED = {"role": "user", "content": "How will the weather in Bern be for three days?"}


@pytest.mark.parametrize("turns", PLAIN)
def test_plain_chats_are_the_tokens_that_the_pair_was_trained_on(turns: list[tuple[str, str]]) -> None:
    now = load_tokenizer(TOY_TARGET)
    then = load_tokenizer(TOY_TARGET, TRAINED_ON)
    messages: list[Any] = [Message(role=role, content=content) for role, content in turns]  # type: ignore[arg-type]
    assert encode_chat(now, messages) == encode_chat(then, messages)
    plain = [message.for_template() for message in messages]
    assert ChatTemplate(now).render(plain, None) == ChatTemplate(then).render(plain, None)
    assert ChatTemplate(now).generated(plain, None) == ChatTemplate(then).generated(plain, None)


def test_calls_are_shown_as_the_server_reads_them() -> None:
    tokenizer = load_tokenizer(TOY_TARGET)
    assert detect_tool_style(tokenizer.chat_template) == HERMES
    calls = tuple(ToolCall(id=name, function=FunctionCall(name=name, arguments={"to": "Zürich"})) for name in "ab")
    chat = [
        Message(role="system", content="Be brief."),
        Message(role="user", content="Go"),
        Message(role="assistant", content="Well.", tool_calls=calls),
        Message(role="tool", content="gone", tool_call_id="a"),
        Message(role="tool", content="lost", tool_call_id="b"),
    ]
    text = tokenizer.decode(encode_chat(tokenizer, chat, [TOOL]))
    system, _, rest = text.partition("<|end|><|user|>")
    assert system.startswith("<|system|>Be brief.\n\n")
    assert json.dumps(TOOL) in system
    said, _, results = rest.removeprefix("Go<|end|><|assistant|>").partition("<|end|>")
    assert results == (
        "<|user|><tool_response>\ngone\n</tool_response>\n<tool_response>\nlost\n</tool_response><|end|><|assistant|>"
    )
    parser = ToolCallParser(HERMES)
    pieces = [*parser.feed(said), *parser.finish()]
    assert [(piece.name, json.loads(piece.arguments)) for piece in pieces[1:]] == [
        ("a", {"to": "Zürich"}),
        ("b", {"to": "Zürich"}),
    ]
    assert pieces[0].text.strip() == "Well."


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    """The embedded pair behind the API."""
    limits = eyas.types.Limits(max_running=4)
    with live(eyas.load(TOY_TARGET, TOY_DRAFTER, tree="chain:3", limits=limits), model_names=("demo",)) as made:
        yield made


def ask(server: Live, **body: Any) -> Any:
    body = {"model": "demo", "temperature": 0, "max_tokens": 150, "parallel_tool_calls": False, "tools": [TOOL], **body}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]


def test_a_required_call_of_the_demo_is_well_formed_and_its_result_is_taken(server: Live) -> None:
    choice = ask(server, messages=[ASKED], tool_choice="required")
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
    result = {"role": "tool", "tool_call_id": call["id"], "content": "Sun."}
    after = ask(server, messages=[ASKED, choice["message"], result], tool_choice="none", max_tokens=8)
    assert after["message"]["content"]


def test_a_function_that_is_named_is_called_once(server: Live) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    choice = ask(server, messages=[ASKED], tool_choice=named, parallel_tool_calls=None)
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls"


def test_the_file_is_the_template_of_new_tokenizers() -> None:
    from eyas.train.lm.lm import CHAT_TEMPLATE

    assert (TOY_TARGET / "chat_template.jinja").read_text(encoding="utf-8") == CHAT_TEMPLATE
    assert load_tokenizer(TOY_TARGET).chat_template == CHAT_TEMPLATE
