"""Tools and shapes with the official client, unmodified, against a server over a tiny model with Qwen's template.

The model is random: constrained to a call it makes a valid one, and what it says is what constrained decoding gives.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest

from eyas.session import load
from eyas.text.chats import Message
from eyas.text.template import encode_chat
from eyas.types import Limits

from ... import tiny
from ...data.templates import templated
from ...pairs import save_drafter
from ..live import Live, live
from .test_tool_calls import WEATHER

pytest.importorskip("llguidance")

ASKED: Any = [{"role": "user", "content": "Sun?"}]
CITY = {"city": {"type": "string", "enum": ["Bern", "Basel"]}}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": CITY,
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("weather", "tide")
]
NAMED: Any = {"type": "function", "function": {"name": "tide"}}


class Forecast(pydantic.BaseModel):
    """What an answer is parsed into."""

    city: Literal["Bern", "Basel"]
    sunny: bool


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A random pair whose tokenizer has Qwen's marks and chat template."""
    path = tmp_path_factory.mktemp("qwen")
    tokenizer = templated("qwen2")
    model = tiny.build_model("qwen2", vocab_size=len(tokenizer), max_position_embeddings=1024)
    model.save_pretrained(path / "model")
    tokenizer.save_pretrained(path / "model")
    drafter = save_drafter(path / "drafter", vocab_size=len(tokenizer))
    limits = Limits(max_running=4, max_waiting=64, prefill_chunk=256)
    with live(load(path / "model", drafter, tree="dynamic:3,3,8", limits=limits)) as made:
        yield made


@pytest.fixture(scope="module")
def client(qwen: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{qwen.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def options(qwen: Live) -> dict[str, Any]:
    """Of requests. Grammars allow any white space, and a random model would write little else."""
    vocabulary: dict[str, int] = qwen.engine.tokenizer.get_vocab()
    blank = [id_ for id_ in vocabulary.values() if qwen.engine.tokenizer.decode([id_]).isspace()]
    assert blank
    return {"model": "tiny", "messages": ASKED, "max_tokens": 200, "logit_bias": {str(id_): -100 for id_ in blank}}


@pytest.fixture(scope="module")
def ask(client: openai.OpenAI, options: dict[str, Any]) -> Callable[..., Any]:
    def call(**more: Any) -> Any:
        return client.chat.completions.create(**{**options, "temperature": 0.7, "seed": 3, "tools": TOOLS, **more})

    return call


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_that_must_be_made_is_made(ask: Callable[..., Any], choice: Any) -> None:
    (answer,) = ask(tool_choice=choice, parallel_tool_calls=False).choices
    (call,) = answer.message.tool_calls
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    assert call.type == "function"
    assert call.id
    assert call.function.name in (("tide",) if choice == NAMED else ("weather", "tide"))
    assert json.loads(call.function.arguments)["city"] in CITY["city"]["enum"]


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_streamed_call_is_the_whole_one(ask: Callable[..., Any], choice: Any) -> None:
    asked = {"tool_choice": choice, "parallel_tool_calls": False}
    (whole,) = ask(**asked).choices[0].message.tool_calls
    deltas = [c.choices[0].delta for c in ask(**asked, stream=True) if c.choices]
    pieces = [piece for delta in deltas for piece in delta.tool_calls or ()]
    assert [piece.function.name for piece in pieces if piece.id] == [whole.function.name]
    assert "".join(piece.function.arguments or "" for piece in pieces) == whole.function.arguments
    assert len(pieces) > 2


def test_the_stream_helper_tells_the_arguments_as_they_come(client: openai.OpenAI, options: dict[str, Any]) -> None:
    asked: Any = {**options, "seed": 3, "parallel_tool_calls": False}
    with client.chat.completions.stream(**asked, tools=TOOLS, tool_choice="required") as stream:
        kinds = {event.type for event in stream}
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert call.function.parsed_arguments in [{"city": city} for city in CITY["city"]["enum"]]


def test_a_tool_s_answer_goes_back(ask: Callable[..., Any], qwen: Live) -> None:
    message = ask(tool_choice="required", parallel_tool_calls=False).choices[0].message
    turns = [*ASKED, message, {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}]
    answer = ask(messages=turns, tools=None, max_tokens=4)
    assert answer.choices[0].finish_reason in ("length", "stop")
    call = message.tool_calls[0].function
    told = [
        Message(role="user", content="Sun?"),
        Message(
            role="assistant",
            content="",
            tool_calls=[{"type": "function", "function": {"name": call.name, "arguments": json.loads(call.arguments)}}],
        ),
        Message(role="tool", content="rain"),
    ]
    assert answer.usage.prompt_tokens == len(encode_chat(qwen.engine.tokenizer, told))


def test_what_may_be_called_is_the_model_s_choice(ask: Callable[..., Any]) -> None:
    auto = ask(tools=[WEATHER], max_tokens=6).choices[0]
    assert auto.message.content or auto.message.tool_calls
    none = ask(tool_choice="none", max_tokens=6).choices[0]
    assert none.message.tool_calls is None


def test_an_answer_is_parsed_into_a_model(client: openai.OpenAI, options: dict[str, Any]) -> None:
    asked: Any = {**options, "seed": 1}
    parsed = client.chat.completions.parse(**asked, response_format=Forecast).choices[0].message.parsed
    assert isinstance(parsed, Forecast)
    with client.chat.completions.stream(**asked, response_format=Forecast) as stream:
        streamed = stream.get_final_completion().choices[0].message.parsed
    assert streamed == parsed


def test_a_call_is_parsed_into_a_model(client: openai.OpenAI, options: dict[str, Any]) -> None:
    tool = openai.pydantic_function_tool(Forecast, name="forecast")
    asked: Any = {**options, "seed": 2, "parallel_tool_calls": False}
    answer = client.chat.completions.parse(**asked, tools=[tool], tool_choice="required")
    (call,) = answer.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Forecast)


def test_tools_that_can_not_be_called_are_bad_requests(ask: Callable[..., Any]) -> None:
    with pytest.raises(openai.BadRequestError, match="nobody") as bad:
        ask(tool_choice={"type": "function", "function": {"name": "nobody"}})
    assert bad.value.status_code == 400
    nonsense = {"type": "function", "function": {"name": "weather", "parameters": {"type": "nonsense"}}}
    with pytest.raises(openai.BadRequestError):
        ask(tools=[nonsense], tool_choice="required")
