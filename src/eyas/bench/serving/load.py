"""How requests arrive: from so many clients who each wait for their answer, or at random moments."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from eyas.data.regenerate.completions import as_sent, sampling_fields
from eyas.errors import DataError
from eyas.text.chats import Message
from eyas.text.prompts import BadRow, PromptRow, read_prompts
from eyas.text.template import encode_chat, encode_text
from eyas.types import SamplingParams

AnswerT = TypeVar("AnswerT")
Ask = Callable[[int], Awaitable[AnswerT]]
"""Asks request `i` of the load."""


@dataclass(frozen=True)
class Load:
    """One level of load."""

    kind: Literal["closed", "open"]
    level: float
    """Clients at once, or requests a second."""

    def __str__(self) -> str:
        return f"{self.level:g} at once" if self.kind == "closed" else f"{self.level:g} requests/s"

    @property
    def clients(self) -> int:
        """Clients at once; 1 where requests come as they come."""
        return int(self.level) if self.kind == "closed" else 1

    def requests(self, least: int, per_client: float) -> int:
        """How many are sent: in a closed loop at least `per_client` by each client."""
        return max(least, math.ceil(per_client * self.clients)) if self.kind == "closed" else least


async def run_load(load: Load, ask: Ask[AnswerT], count: int, seed: int) -> list[AnswerT]:
    """Send `count` requests; the answers in the order of the requests."""
    if load.kind == "closed":
        return await _closed(ask, count, load.clients)
    return await _open(ask, arrivals(load.level, count, seed))


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Seconds at which requests arrive: a Poisson process, the first one at 0; the same for the same seed."""
    chance = random.Random(seed)
    moments = [0.0]
    while len(moments) < count:
        moments.append(moments[-1] + chance.expovariate(rate))
    return moments[:count]


async def _closed(ask: Ask[AnswerT], count: int, clients: int) -> list[AnswerT]:
    """Each client asks its next question when it has its answer."""
    answers: dict[int, AnswerT] = {}
    waiting = iter(range(count))

    async def client() -> None:
        for number in waiting:
            answers[number] = await ask(number)

    await asyncio.gather(*(client() for _ in range(min(clients, count))))
    return [answers[number] for number in range(count)]


async def _open(ask: Ask[AnswerT], moments: Sequence[float]) -> list[AnswerT]:
    """Requests are sent at their moments, whatever became of those before."""
    began = asyncio.get_running_loop().time()

    async def arriving(number: int, moment: float) -> AnswerT:
        await asyncio.sleep(max(0.0, began + moment - asyncio.get_running_loop().time()))
        return await ask(number)

    return list(await asyncio.gather(*(arriving(number, moment) for number, moment in enumerate(moments))))


# What a load generator asks: rows of prompt files as requests of the OpenAI API.


CHAT, TEXT = "/chat/completions", "/completions"


@dataclass(frozen=True)
class Item:
    """A prompt on its way."""

    id: str
    path: str
    """`/chat/completions` or `/completions`."""
    prompt: dict[str, Any]
    """The body's `messages` or `prompt`."""
    tokens: int | None = None
    """Most tokens of its answer; None = what the sampling parameters say."""

    def body(self, model: str, params: SamplingParams, number: int) -> dict[str, Any]:
        """The request, streamed; request `number` is asked with its own seed."""
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        most = {} if self.tokens is None else {"max_tokens": self.tokens}
        return {"model": model, **self.prompt, **sampling_fields(params, params.seed + number), **most, **streamed}


def read_items(paths: Sequence[Path], limit: int | None, seed: int, tokenizer: Any = None) -> list[Item]:
    """All rows of all files, in one seeded order. Of a row with `turns` the first is asked.

    With a tokenizer its chat template is applied here and every prompt is sent as token ids, so that servers which
    render chats differently still get the same prompt. Raises DataError for a row that can't be read.
    """
    items = []
    for path in dict.fromkeys(paths):
        for row in read_prompts(path, limit):
            if isinstance(row, BadRow):
                raise DataError(row.error)
            items.append(item_of(row, f"{path.stem}:{row.id}", tokenizer))
    random.Random(seed).shuffle(items)
    return items


def item_of(row: PromptRow, name: str, tokenizer: Any, answers: Sequence[str] = ()) -> Item:
    """The request of a row after so many of its turns were answered. RequestError if the template refuses the chat."""
    if row.token_ids is not None:
        return Item(name, TEXT, {"prompt": list(row.token_ids)})
    if row.prompt is not None:
        text = row.prompt if tokenizer is None else list(encode_text(tokenizer, row.prompt))
        return Item(name, TEXT, {"prompt": text})
    messages = list(row.messages or ())
    for number, turn in enumerate((row.turns or ())[: len(answers) + 1]):
        messages += [Message(role="assistant", content=answers[number - 1])] if number else []
        messages.append(Message(role="user", content=turn))
    if tokenizer is not None:
        return Item(name, TEXT, {"prompt": list(encode_chat(tokenizer, messages))})
    return Item(name, CHAT, {"messages": [as_sent(message) for message in messages]})
