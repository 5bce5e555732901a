"""Thoughts in every API: apart from the answer, streamed and whole, counted, left out or left in on request."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from eyas.errors import UsageError
from eyas.serve.context import ServeSettings
from eyas.serve.schema.anthropic import MessageResponse
from eyas.serve.schema.chat import ChatCompletionResponse
from eyas.serve.schema.ollama import OllamaChatLine, OllamaGenerateLine
from eyas.serve.schema.responses import ResponseObject
from eyas.verify import compile_grammar
from eyas.verify.constraint import Constraint

from ...data.templates import templated
from ...text.test_reasoning import with_template
from ..conftest import post, run
from ..fakes import FakeEngine
from .test_chat import events
from .test_messages import events as message_events
from .test_tool_calls import CALL, WEATHER

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES = "/v1/messages"
RESPONSES = "/v1/responses"
HELLO = [{"role": "user", "content": "How many?"}]
SAID = "<think>\nFour and\nthree.\n</think>\n\nSeven."
QWEN3_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"


def model(text: str, family: str = "qwen3", ending: str = "stop", **options: Any) -> FakeEngine:
    """A model that thinks; `stop`: it ends by itself."""
    made = templated(family)
    if family == "qwen3":  # with a place for tools
        made = with_template(QWEN3_TOOLS + made.chat_template, made=made)
    tokens = made(text, add_special_tokens=False)["input_ids"]
    engine = FakeEngine(
        [*tokens, made.eos_token_id] if ending == "stop" else tokens, chars=made, context=4096, **options
    )
    engine.ending = ending
    return engine


def ask(engine: FakeEngine, path: str = CHAT, settings: dict[str, Any] | None = None, **body: Any) -> httpx.Response:
    needs = {MESSAGES: {"max_tokens": 200}, RESPONSES: {"input": "How many?"}}.get(path, {})
    asked = {} if path == RESPONSES else {"messages": HELLO}
    answer: httpx.Response = run(post(engine, path, {"model": "tiny", **asked, **needs, **body}, **(settings or {})))
    assert answer.status_code == 200, answer.text
    return answer


def choice(answer: httpx.Response) -> dict[str, Any]:
    ChatCompletionResponse.model_validate(answer.json())
    found: dict[str, Any] = answer.json()["choices"][0]
    return found


def joined(chunks: Sequence[Any], field: str) -> str:
    deltas = [each["delta"] for chunk in chunks for each in chunk["choices"]]
    return "".join(delta.get(field) or "" for delta in deltas)


@pytest.mark.parametrize("stride", [1, 2, 7])
@pytest.mark.parametrize(("family", "said"), [("qwen3", SAID), ("deepseek", SAID.removeprefix("<think>\n"))])
def test_a_thought_comes_before_the_content(family: str, said: str, stride: int) -> None:
    whole = ask(model(said, family, stride=stride))
    message = choice(whole)["message"]
    assert message["reasoning_content"] == message["reasoning"] == "Four and\nthree."
    assert message["content"] == "Seven."
    chunks = events(ask(model(said, family, stride=stride), stream=True, stream_options={"include_usage": True}))
    for field in ("reasoning_content", "reasoning"):
        assert joined(chunks, field) == "Four and\nthree."
    assert joined(chunks, "content") == "Seven."
    kinds = ["content" if delta.get("content") else "thought" for chunk in chunks for each in chunk["choices"]
             if (delta := each["delta"]).get("content") or delta.get("reasoning")]  # fmt: skip
    assert kinds == sorted(kinds, reverse=True)
    thought = templated(family)(said.partition("Seven")[0], add_special_tokens=False)["input_ids"]
    for usage in (whole.json()["usage"], chunks[-1]["usage"]):
        assert usage["completion_tokens_details"]["reasoning_tokens"] == len(thought)
        answer = templated(family)("Seven.", add_special_tokens=False)["input_ids"]
        assert usage["completion_tokens"] == len(thought) + len(answer) + 1


def test_a_model_that_does_not_think_has_no_reasoning() -> None:
    answer = ask(model("Seven."))
    assert choice(answer)["message"] == {"role": "assistant", "content": "Seven.", "refusal": None}
    assert answer.json()["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


def test_a_thought_that_is_cut_off_is_all_there_is() -> None:
    for text in ("<think>\nFour and", "<think>\nFour and\n</thi"):
        engine = model(text, ending="length")
        answer = ask(engine)
        found = choice(answer)
        assert (found["finish_reason"], found["message"]["content"]) == ("length", "")
        assert found["message"]["reasoning_content"] == text.removeprefix("<think>\n")
        assert answer.json()["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(engine.text)


def test_a_stop_string_also_ends_a_thought() -> None:
    answer = ask(model(SAID), stop=["three"])
    found = choice(answer)
    assert (found["finish_reason"], found["message"]["content"]) == ("stop", "")
    assert found["message"]["reasoning_content"] == "Four and\n"
    usage = answer.json()["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == usage["completion_tokens"]


def test_several_answers_are_split_each_by_itself() -> None:
    answer = ask(model(SAID), n=3).json()
    assert [each["message"]["reasoning"] for each in answer["choices"]] == ["Four and\nthree."] * 3
    one = ask(model(SAID)).json()["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 3 * one


def test_marks_that_are_special_tokens_are_found() -> None:
    mistral = with_template("{{ messages[0].content }}", ("[THINK]", "[/THINK]"))
    tokens = mistral("[THINK]Four.[/THINK]Seven.", add_special_tokens=False)["input_ids"]
    found = choice(ask(FakeEngine(tokens, chars=mistral)))["message"]
    assert (found["reasoning"], found["content"]) == ("Four.", "Seven.")
    marks = ("<|start|>", "<|end|>", "<|channel|>", "<|message|>")
    harmony = with_template("<|start|>user<|message|>{{ messages[0].content }}<|end|><|start|>assistant", marks)
    harmony.chat_template += "{# <|channel|> #}"
    said = "<|channel|>analysis<|message|>Four.<|end|><|start|>assistant<|channel|>final<|message|>Seven."
    for size in (1, 3, 50):
        engine = FakeEngine(harmony(said, add_special_tokens=False)["input_ids"], chars=harmony, stride=size)
        found = choice(ask(engine))["message"]
        assert (found["reasoning"], found["content"]) == ("Four.", "Seven.")


@pytest.mark.parametrize("text", [f"<think>\nRain?\n</think>\n\n{CALL}", f"<think>\nRain?\n{CALL}"])
def test_tools_are_called_after_a_thought_which_is_no_call(text: str) -> None:
    quoted = text.replace("Rain?", 'Say {"name": "weather"}?')
    for said, thought in ((text, "Rain?"), (quoted, 'Say {"name": "weather"}?')):
        message = choice(ask(model(said), tools=[WEATHER]))["message"]
        assert (message["reasoning"], message["content"]) == (thought, None)
        (call,) = message["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"city": "Bern"}
        chunks = events(ask(model(said, stride=1), tools=[WEATHER], stream=True))
        assert joined(chunks, "reasoning") == thought
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_call_that_is_only_thought_of_is_not_made() -> None:
    message = choice(ask(model(f"<think>{CALL.replace('<tool_call>', '')}</think>No."), tools=[WEATHER]))["message"]
    assert "tool_calls" not in message
    assert message["content"] == "No."


def test_a_request_may_leave_thoughts_out_or_in() -> None:
    text = SAID
    for body in ({"include_reasoning": False}, {"reasoning_format": "hidden"}):
        answer = ask(model(text), **body)
        assert choice(answer)["message"] == {"role": "assistant", "content": "Seven.", "refusal": None}
        assert answer.json()["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
        assert joined(events(ask(model(text), stream=True, **body)), "reasoning") == ""
    for body in ({"reasoning_format": "none"}, {"separate_reasoning": False}):
        assert choice(ask(model(text), **body))["message"]["content"] == text
    for body in ({"reasoning_format": "auto"}, {"include_reasoning": True}):
        assert choice(ask(model(text), **body))["message"]["content"] == "Seven."


def test_the_server_says_whose_marks_they_are() -> None:
    said = "[THINK]Four.[/THINK]Seven."
    assert choice(ask(model(said), settings={"reasoning_parser": "mistral"}))["message"]["reasoning"] == "Four."
    for name in ("none", "mistral"):
        assert choice(ask(model(SAID), settings={"reasoning_parser": name}))["message"]["content"] == SAID
    with pytest.raises(UsageError, match="no reasoning parser x"):
        ServeSettings(model_names=("tiny",), reasoning_parser="x")


def test_text_completions_are_left_as_they_are() -> None:
    answer = ask(model(SAID), TEXT, messages=None, prompt="a", max_tokens=100).json()
    assert answer["choices"][0]["text"] == SAID


def test_an_answer_that_goes_on_within_a_thought() -> None:
    begun = [*HELLO, {"role": "assistant", "content": "<think>\nFour", "prefix": True}]
    message = choice(ask(model(" and three.</think>Seven."), messages=begun))["message"]
    assert (message["reasoning"], message["content"]) == (" and three.", "Seven.")
    begun[-1]["content"] = "It is"
    assert choice(ask(model(" seven."), messages=begun))["message"]["content"] == " seven."


@pytest.mark.parametrize("family", ["qwen3", "deepseek"])
def test_a_grammar_applies_after_the_thought(family: str) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": WEATHER["function"]["parameters"]}}
    opened = "" if family == "deepseek" else "<think>"
    good = f'{opened}\n{{"city"?\n</think>\n\n{{"city": "Bern"}}'
    engine = model(good, family)
    assert json.loads(choice(ask(engine, response_format=schema))["message"]["content"]) == {"city": "Bern"}

    def follows(text: str) -> bool:
        made, spec = engine.tokenizer, engine.requests[0].grammar
        assert spec is not None
        ids = [*made(text, add_special_tokens=False)["input_ids"], made.eos_token_id]
        return Constraint(compile_grammar(made, spec), [made.eos_token_id]).consume(ids) == len(ids)

    assert follows(good)
    assert follows('{"city": "Bern"}') == (family == "qwen3")
    assert not follows(f'{opened}</think>{{"town": "Bern"}}')
    assert not follows(f"{opened}Four.")
    ask(engine, response_format=schema, reasoning_format="none")
    assert engine.requests[-1].grammar is not None
    assert engine.requests[-1].grammar.preface == ""


def test_a_forced_call_comes_after_the_thought() -> None:
    pytest.importorskip("llguidance")
    engine = model(f"<think>\nRain?\n</think>\n\n{CALL}")
    message = choice(ask(engine, tools=[WEATHER], tool_choice="required"))["message"]
    assert message["reasoning"] == "Rain?"
    assert len(message["tool_calls"]) == 1
    made, spec = engine.tokenizer, engine.requests[0].grammar
    assert spec is not None
    for text, legal in ((f"<think>\nRain?\n</think>\n\n{CALL}", True), (CALL, True), ("<think></think>Rain", False)):
        ids = made(text, add_special_tokens=False)["input_ids"]
        assert (Constraint(compile_grammar(made, spec), [made.eos_token_id]).consume(ids) == len(ids)) == legal


def test_messages_have_thinking_blocks() -> None:
    said = f"<think>\nRain?\n</think>\n\nLet me see.\n{CALL}"
    tool = {"name": "weather", "input_schema": WEATHER["function"]["parameters"]}
    whole = ask(model(said), MESSAGES, tools=[tool]).json()
    MessageResponse.model_validate(whole)
    assert whole["content"][0] == {"type": "thinking", "thinking": "Rain?", "signature": ""}
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use"]
    found = message_events(ask(model(said, stride=1), MESSAGES, tools=[tool], stream=True))
    first = [event for event in found if event.get("index") == 0]
    assert first[0]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}
    assert "".join(event["delta"].get("thinking", "") for event in first[1:-1]) == "Rain?"
    assert first[-2]["delta"] == {"type": "signature_delta", "signature": ""}
    assert first[-1]["type"] == "content_block_stop"
    omitted = ask(model(said), MESSAGES, thinking={"type": "adaptive", "display": "omitted"}, tools=[tool]).json()
    assert [block["type"] for block in omitted["content"]] == ["text", "tool_use"]


def shown(engine: FakeEngine) -> str:
    text: str = engine.tokenizer.decode(engine.requests[-1].prompt)
    return text


def test_a_thought_that_is_sent_back_is_the_template_s() -> None:
    tool = {"type": "tool_result", "tool_use_id": "t", "content": "rain"}
    use = {"type": "tool_use", "id": "t", "name": "weather", "input": {"city": "Bern"}}
    thought = {"type": "thinking", "thinking": "Rain?", "signature": ""}
    history = [*HELLO, {"role": "assistant", "content": [thought, use]}, {"role": "user", "content": [tool]}]
    ask(engine := model("Rain."), MESSAGES, messages=history)
    assert "<think>\nRain?\n</think>" in shown(engine)
    call = {"type": "function_call", "call_id": "t", "name": "weather", "arguments": "{}"}
    items = [
        {"role": "user", "content": "Sun?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Rain?"}]},
        call,
        {"type": "function_call_output", "call_id": "t", "output": "rain"},
    ]
    ask(engine := model("Rain."), RESPONSES, input=items)
    assert "<think>\nRain?\n</think>" in shown(engine)
    items[2:] = [{"role": "assistant", "content": "Rain."}, {"role": "user", "content": "Sure?"}]
    ask(engine := model("Yes."), RESPONSES, input=items)
    assert "Rain?" not in shown(engine)


def test_responses_have_reasoning_items() -> None:
    answer = ask(model(SAID), RESPONSES).json()
    ResponseObject.model_validate(answer)
    reasoning, message = answer["output"]
    assert reasoning["type"] == "reasoning"
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Four and\nthree."}]
    assert message["content"][0]["text"] == "Seven."
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    found = [json.loads(block.partition("data: ")[2])
             for block in ask(model(SAID, stride=1), RESPONSES, stream=True).text.strip().split("\n\n")]  # fmt: skip
    kinds = [event["type"] for event in found if event.get("output_index") == 0]
    order = [kind.removeprefix("response.") for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
    assert order == [
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done",
        "output_item.done",
    ]  # fmt: skip
    deltas = [event["delta"] for event in found if event["type"] == "response.reasoning_text.delta"]
    assert "".join(deltas) == "Four and\nthree."


@pytest.mark.parametrize("stride", [1, 5, 90])
def test_responses_score_the_text_alone(stride: int) -> None:
    scored = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    answer = ask(model(SAID, stride=stride), RESPONSES, **scored).json()
    part = answer["output"][1]["content"][0]
    assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"] == "Seven."


@pytest.mark.parametrize("stream", [False, True])
def test_ollama_s_lines_have_thinking(stream: bool) -> None:
    lines = [json.loads(line) for line in ask(model(SAID), "/api/chat", stream=stream).text.splitlines()]
    for line in lines:
        OllamaChatLine.model_validate(line)
    assert "".join(line["message"].get("thinking", "") for line in lines) == "Four and\nthree."
    assert "".join(line["message"]["content"] for line in lines) == "Seven."
    body: dict[str, Any] = {"model": "tiny", "prompt": "How many?", "stream": stream}
    lines = [json.loads(line) for line in run(post(model(SAID), "/api/generate", body)).text.splitlines()]
    for line in lines:
        OllamaGenerateLine.model_validate(line)
    assert "".join(line.get("thinking", "") for line in lines) == "Four and\nthree."
    assert "".join(line["response"] for line in lines) == "Seven."
