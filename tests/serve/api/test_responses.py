"""`/v1/responses` with the official client, unmodified: text, streams, tools, shapes; what is sent is a chat."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest

from eyas.serve.schema.responses import ResponseEvent, ResponseObject

from ...data.templates import templated
from ..conftest import Ask
from ..fakes import FakeEngine
from ..live import Live, live
from .test_tool_calls import CALL
from .test_tool_calls import qwen as writes

pytest.importorskip("llguidance")

RESPONSES = "/v1/responses"
TOOL: Any = {
    "type": "function",
    "name": "weather",
    "description": "Sun or rain",
    "strict": False,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


class Forecast(pydantic.BaseModel):
    """What an answer is parsed into."""

    city: Literal["Bern", "Basel"]
    sunny: bool


@contextmanager
def client_of(engine: FakeEngine) -> Iterator[openai.OpenAI]:
    engine.ending = "stop"
    with live(engine) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def shown(engine: FakeEngine, index: int = -1) -> str:
    """What the model was given, as text."""
    text: str = templated("qwen2").decode(engine.requests[index].prompt)
    return text


def test_a_seeded_answer_is_the_chat_s(server: Live) -> None:
    shared: dict[str, Any] = {"model": "tiny", "temperature": 0.8, "top_p": 0.9}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        body = {"seed": 11, "eyas": {"speculate": False}}
        answer = client.responses.create(**shared, input="How many?", max_output_tokens=20, extra_body={"seed": 11})
        plain = client.responses.create(**shared, input="How many?", max_output_tokens=20, extra_body=body)
        chat = client.chat.completions.create(
            **shared, messages=[{"role": "user", "content": "How many?"}], max_tokens=20, seed=11
        )
        stream = list(
            client.responses.create(
                **shared, input="How many?", max_output_tokens=20, extra_body={"seed": 11}, stream=True
            )
        )
    text = chat.choices[0].message.content
    assert answer.output_text == plain.output_text == text
    assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == text
    assert chat.usage is not None
    assert answer.usage is not None
    assert answer.usage.input_tokens == chat.usage.prompt_tokens
    assert answer.usage.output_tokens == chat.usage.completion_tokens == 20
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert stream[-1].type == "response.incomplete"
    assert stream[-1].response.output_text == text


def test_an_answer_is_as_documented(ask: Ask) -> None:
    asked: dict[str, Any] = {"input": "How many?", "seed": 7, "include": ["message.output_text.logprobs"]}
    answer = ask(RESPONSES, **asked, top_logprobs=2).json()
    ResponseObject.model_validate(answer)
    (item,) = answer["output"]
    (part,) = item["content"]
    assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"]
    assert {len(entry["top_logprobs"]) for entry in part["logprobs"]} == {2}
    assert answer["eyas"] == {"seed": 7}
    assert (answer["store"], answer["previous_response_id"]) == (False, None)


def test_a_stream_has_openai_s_events_in_their_order() -> None:
    engine = writes("Let me see.\n" + CALL + "\n" + CALL, stride=1)
    engine.ending = "stop"
    with live(engine) as server:
        body = {"model": "tiny", "input": "Sun?", "tools": [TOOL], "stream": True}
        text = httpx.post(server.url + RESPONSES, json=body, timeout=60).text
    blocks = [block.split("\n") for block in text.strip().split("\n\n")]
    found = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
    assert [name.removeprefix("event: ") for name, _ in blocks] == [event["type"] for event in found]
    assert [ResponseEvent.model_validate(event).sequence_number for event in found] == list(range(len(found)))
    kinds = [event["type"].removeprefix("response.") for event in found]
    order = [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    message = ["content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    head = ["created", "in_progress", "output_item.added", *message, "output_item.done"]
    assert order == [*head, *call, *call, "completed"]
    assert [event["item"]["status"] for event in found if event["type"].endswith("output_item.done")] == [
        "completed"
    ] * 3
    response = ResponseObject.model_validate(found[-1]["response"])
    assert [item.type for item in response.output] == ["message", "function_call", "function_call"]
    for index, item in enumerate(response.output[1:], start=1):
        deltas = [e["delta"] for e in found if e["type"].endswith("arguments.delta") and e["output_index"] == index]
        assert "".join(deltas) == item.arguments  # type: ignore[union-attr]
        assert json.loads(item.arguments) == {"city": "Bern"}  # type: ignore[union-attr]


def test_the_stream_helper_puts_the_same_answer_together() -> None:
    with (
        client_of(writes("Let me see.\n" + CALL, stride=1)) as client,
        client.responses.stream(model="tiny", input="Sun?", tools=[TOOL]) as stream,
    ):
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert "response.function_call_arguments.delta" in kinds
    assert final.output_text == "Let me see."
    assert [item.type for item in final.output] == ["message", "function_call"]


def test_a_tool_s_output_goes_back_with_the_items_of_the_answer() -> None:
    engine = writes(CALL)
    with client_of(engine) as client:
        given: Any = [{"role": "user", "content": "Sun?"}]
        answer = client.responses.create(model="tiny", input=given, tools=[TOOL], instructions="Be brief.", store=False)
        (call,) = answer.output
        assert call.type == "function_call"
        assert json.loads(call.arguments) == {"city": "Bern"}
        assert answer.output_text == ""
        given += [*answer.output, {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
        client.responses.create(model="tiny", input=given, tools=[TOOL], instructions="Be brief.")
        chat = client.chat.completions.create(
            model="tiny",
            messages=[
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Sun?"},
                {
                    "role": "assistant",
                    "tool_calls": [
                        {
                            "id": call.call_id,
                            "type": "function",
                            "function": {"name": "weather", "arguments": call.arguments},
                        }
                    ],
                },
                {"role": "tool", "content": "rain", "tool_call_id": call.call_id},
            ],
            tools=[{"type": "function", "function": {key: TOOL[key] for key in TOOL if key != "type"}}],
        )
    assert chat.choices
    assert engine.requests[1].prompt == engine.requests[2].prompt
    assert "Be brief." in shown(engine)
    assert "rain" in shown(engine)


def test_an_answer_s_text_and_call_are_one_message_again() -> None:
    engine = writes("Let me see.\n" + CALL)
    with client_of(engine) as client:
        given: Any = [{"role": "user", "content": [{"type": "input_text", "text": "Sun?"}]}]
        answer = client.responses.create(model="tiny", input=given, tools=[TOOL])
        assert [item.type for item in answer.output] == ["message", "function_call"]
        client.responses.create(model="tiny", input=[*given, *answer.output], tools=[TOOL])
    assert shown(engine).count("<|im_start|>assistant") == 2  # it, and the answer to come
    assert "Let me see." in shown(engine)


def test_a_named_tool_has_to_be_called() -> None:
    engine = writes(CALL)
    with client_of(engine) as client:
        client.responses.create(
            model="tiny", input="Sun?", tools=[TOOL], tool_choice={"type": "function", "name": "weather"}
        )
    assert engine.requests[0].grammar is not None
    assert "weather" in engine.requests[0].grammar.text


def test_an_answer_is_parsed_into_a_model() -> None:
    engine = writes('{"city": "Bern", "sunny": true}')
    with client_of(engine) as client:
        parsed = client.responses.parse(model="tiny", input="Sun?", text_format=Forecast).output_parsed
        client.chat.completions.parse(
            model="tiny", messages=[{"role": "user", "content": "Sun?"}], response_format=Forecast
        )
    assert parsed == Forecast(city="Bern", sunny=True)
    assert engine.requests[0].grammar == engine.requests[1].grammar
    assert engine.requests[0].grammar is not None


@pytest.mark.parametrize(
    ("wrong", "param", "why"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "aren't stored"),
        ({"conversation": "conv_1"}, "conversation", "aren't stored"),
        ({"background": True}, "background", "no background responses"),
        ({"background": 0}, "background", "no background responses"),
        ({"truncation": "auto"}, "truncation", "never shortened"),
        ({"reasoning": {"effort": 3}}, "reasoning", "string"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "function"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "input_image"),
        ({"top_logprobs": 3}, None, "message.output_text.logprobs"),
        ({"tool_choice": "required"}, None, "needs tools"),
        ({"nonsense": 1}, "nonsense", "unknown field"),
        ({"max_output_tokens": 5000}, "max_output_tokens", "context"),
        ({"eyas": {"trace": True}}, None, "trace"),
    ],
)
def test_what_is_not_served_is_refused_by_name(ask: Ask, wrong: dict[str, Any], param: str | None, why: str) -> None:
    answer = ask(RESPONSES, **{"input": "a", **wrong})
    assert answer.status_code == 400
    assert why in answer.json()["error"]["message"]
    assert (answer.json()["error"]["param"] or "").startswith(param or "")


def test_what_goes_wrong_in_a_stream_is_its_last_event() -> None:
    engine = FakeEngine()
    with client_of(engine) as client:
        engine.ending = "error"
        found = list(client.responses.create(model="tiny", input="a", stream=True))
        with pytest.raises(openai.InternalServerError):
            client.responses.create(model="tiny", input="a")
    assert found[-1].type == "response.failed"
    assert found[-1].response.error is not None
    assert "it broke" in found[-1].response.error.message


def test_an_answer_of_nothing_is_an_empty_message(ask: Ask, engine: FakeEngine) -> None:
    engine.text = [engine.tokenizer.eos_token_id]
    engine.ending = "stop"
    answer = ask(RESPONSES, input="a").json()
    assert [item["content"][0]["text"] for item in answer["output"]] == [""]
    assert answer["status"] == "completed"
