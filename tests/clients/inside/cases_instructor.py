"""instructor: models as answers, in its modes for tools and for schemas, whole and in part."""

from __future__ import annotations

import asyncio
from typing import Any

import instructor
import pytest
from common import KEY, MESSAGES, MODEL, URL
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict
from weather import Weather

OPTIONS: dict[str, Any] = {"base_url": f"{URL}/v1", "api_key": KEY, "max_retries": 0, "timeout": 300}
ASKED: dict[str, Any] = {
    "model": MODEL, "temperature": 0, "max_tokens": 400, "messages": MESSAGES, "max_retries": 0,
}  # fmt: skip


class Anything(BaseModel):
    """Any object."""

    model_config = ConfigDict(extra="allow")


MODES = [instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA]


@pytest.mark.parametrize("mode", MODES)
def test_models(mode: instructor.Mode) -> None:
    client = instructor.from_openai(OpenAI(**OPTIONS), mode=mode)
    answer, raw = client.chat.completions.create_with_completion(response_model=Weather, **ASKED)
    assert isinstance(answer, Weather)
    assert raw.usage.completion_tokens <= 400


@pytest.mark.parametrize("mode", MODES)
def test_partial_models(mode: instructor.Mode) -> None:
    client = instructor.from_openai(OpenAI(**OPTIONS), mode=mode)
    parts = list(client.chat.completions.create_partial(response_model=Weather, **ASKED))
    whole = client.chat.completions.create(response_model=Weather, **ASKED)
    assert parts[-1].model_dump() == whole.model_dump()


def test_async() -> None:
    async def work() -> Weather:
        async with AsyncOpenAI(**OPTIONS) as plain:
            return await instructor.from_openai(plain).chat.completions.create(response_model=Weather, **ASKED)

    assert isinstance(asyncio.run(work()), Weather)


def test_json_mode_holds_to_json_and_not_to_the_schema() -> None:
    """In this mode the schema is only in the prompt, and the demo model doesn't follow prompts."""
    client = instructor.from_openai(OpenAI(**OPTIONS), mode=instructor.Mode.JSON)
    assert isinstance(client.chat.completions.create(response_model=Anything, **ASKED), Anything)
