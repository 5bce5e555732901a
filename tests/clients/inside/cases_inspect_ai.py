"""inspect-ai: an evaluation, tools, schemas and log-probabilities, over chat completions and over responses."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
from common import KEY, MODEL, QUESTION, URL, chat, fits
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, Model, ResponseSchema, get_model
from inspect_ai.scorer import exact
from inspect_ai.tool import ToolInfo, ToolParams
from inspect_ai.util import json_schema
from weather import Weather

os.environ.update(EYAS_API_KEY=KEY, EYAS_BASE_URL=f"{URL}/v1")  # the provider's settings, by the service's name
NAMES = [f"openai-api/eyas/{MODEL}", f"openai/{MODEL}"]


def model(name: str, tokens: int, **options: Any) -> Model:
    config = GenerateConfig(temperature=0, max_tokens=tokens, max_retries=0, timeout=300, **options)
    more: dict[str, Any] = {"base_url": f"{URL}/v1", "api_key": KEY} if name.startswith("openai/") else {}
    return get_model(name, config=config, memoize=False, **more)


@pytest.mark.parametrize("name", NAMES)
def test_text_and_usage(name: str) -> None:
    output = asyncio.run(model(name, 24).generate(QUESTION))
    assert output.completion == chat(24)
    assert output.usage.output_tokens <= 24


@pytest.mark.parametrize("name", NAMES)
def test_tools(name: str) -> None:
    schema = json_schema(Weather)
    tool = ToolInfo(
        name="get_weather",
        description="The weather.",
        parameters=ToolParams(properties=schema.properties, required=["city", "days"]),
    )
    output = asyncio.run(
        model(name, 150, parallel_tool_calls=False).generate(QUESTION, tools=[tool], tool_choice="any")
    )
    (call,) = output.message.tool_calls
    assert call.function == "get_weather"
    assert fits(call.arguments)


@pytest.mark.parametrize("name", NAMES)
def test_schema(name: str) -> None:
    schema = ResponseSchema(name="weather", json_schema=json_schema(Weather), strict=True)
    output = asyncio.run(model(name, 400, response_schema=schema).generate(QUESTION))
    Weather.model_validate_json(output.completion)


def test_logprobs() -> None:
    output = asyncio.run(model(NAMES[0], 8, logprobs=True, top_logprobs=2).generate(QUESTION))
    assert "".join(token.token for token in output.choices[0].logprobs.content) == chat(8)


@pytest.mark.parametrize("name", NAMES)
def test_an_evaluation(name: str, tmp_path: Any) -> None:
    task = Task(dataset=[Sample(input=QUESTION, target=chat(24)), Sample(input=QUESTION, target="no")], scorer=exact())
    (log,) = eval(task, model=model(name, 24), log_dir=str(tmp_path), display="none")
    assert log.status == "success"
    assert log.results.scores[0].metrics["mean"].value == 0.5
