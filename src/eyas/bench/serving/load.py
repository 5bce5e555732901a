"""The load: requests made of prompt files, sent by clients that wait for their answers, or at random moments."""

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
from eyas.text.template import encode_chat, encode_text, has_chat_template
from eyas.types import SamplingParams

AnswerT = TypeVar("AnswerT")
Send = Callable[[int], Awaitable[AnswerT]]
"""Sends request number `i` of the load and waits for its answer."""
CHAT, TEXT = "/chat/completions", "/completions"
"""The routes of chats and of texts or token ids."""


@dataclass(frozen=True)
class Load:
    """A level of load: clients at once (closed loop) or requests per second (open loop)."""

    kind: Literal["closed", "open"]
    level: float
    """Clients at once, or requests a second."""

    def __str__(self) -> str:
        return f"{self.level:g} at once" if self.kind == "closed" else f"{self.level:g} requests/s"

    @property
    def clients(self) -> int:
        """Clients at once; 1 for an open loop."""
        return int(self.level) if self.kind == "closed" else 1

    def requests(self, least: int, per_client: float) -> int:
        """Requests of a run: at least `least`, and in a closed loop `per_client` for each client."""
        return max(least, math.ceil(per_client * self.clients)) if self.kind == "closed" else least


async def run_load(load: Load, send: Send[AnswerT], count: int, seed: int) -> list[AnswerT]:
    """Send `count` requests under a load; returns the answers in the order of the requests."""
    if load.kind == "closed":
        return await _closed(send, count, load.clients)
    return await _open(send, arrivals(load.level, count, seed))


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Arrival times in seconds: a Poisson process that begins with a request at 0; a seed always gives the same."""
    chance = random.Random(seed)
    moments = [0.0]
    while len(moments) < count:
        moments.append(moments[-1] + chance.expovariate(rate))
    return moments[:count]


async def _closed(send: Send[AnswerT], count: int, clients: int) -> list[AnswerT]:
    """Each client sends its next request when it has its answer."""
    answers: dict[int, AnswerT] = {}
    waiting = iter(range(count))

    async def client() -> None:
        for number in waiting:
            answers[number] = await send(number)

    await asyncio.gather(*(client() for _ in range(min(clients, count))))
    return [answers[number] for number in range(count)]


async def _open(send: Send[AnswerT], moments: Sequence[float]) -> list[AnswerT]:
    """Requests are sent at their times, whether or not earlier ones are answered."""
    began = asyncio.get_running_loop().time()

    async def arriving(number: int, moment: float) -> AnswerT:
        await asyncio.sleep(max(0.0, began + moment - asyncio.get_running_loop().time()))
        return await send(number)

    return list(await asyncio.gather(*(arriving(number, moment) for number, moment in enumerate(moments))))


@dataclass(frozen=True)
class Item:
    """A row of a prompt file as a request of the OpenAI API."""

    id: str
    path: str
    """`/chat/completions` or `/completions`."""
    prompt: dict[str, Any]
    """The body's `messages` or `prompt`, and what else belongs to it."""
    tokens: int | None = None
    """Most tokens of the answer; None = what the sampling parameters say."""

    def body(self, model: str, params: SamplingParams, number: int) -> dict[str, Any]:
        """The JSON body of the request, streamed; its seed is that of the parameters plus `number`."""
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        most = {} if self.tokens is None else {"max_tokens": self.tokens}
        return {"model": model, **self.prompt, **sampling_fields(params, params.seed + number), **most, **streamed}


def read_items(paths: Sequence[Path], limit: int | None, seed: int, tokenizer: Any = None) -> list[Item]:
    """All rows of all files in one shuffled order; of a row with `turns` the first one.

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
    """The request of a row's next turn, given the answers to earlier ones. RequestError if the template refuses it."""
    if row.token_ids is not None:
        return Item(name, TEXT, {"prompt": list(row.token_ids)})
    if row.prompt is not None and (row.raw or (tokenizer is not None and not has_chat_template(tokenizer))):
        text = row.prompt if tokenizer is None else list(encode_text(tokenizer, row.prompt))
        return Item(name, TEXT, {"prompt": text})
    messages = list(row.messages or ())
    messages += [] if row.prompt is None else [Message(role="user", content=row.prompt)]
    for number, turn in enumerate((row.turns or ())[: len(answers) + 1]):
        messages += [Message(role="assistant", content=answers[number - 1])] if number else []
        messages.append(Message(role="user", content=turn))
    if tokenizer is not None:
        prompt: dict[str, Any] = {"prompt": list(encode_chat(tokenizer, messages))}
        from eyas.targets.tokenizers import turn_end_ids  # with torch: wrong loads are refused without it

        eos_ids = turn_end_ids(tokenizer)  # that it is a chat can't be seen from its ids
        return Item(name, TEXT, prompt | {"stop_token_ids": list(eos_ids)} if eos_ids else prompt)
    return Item(name, CHAT, {"messages": [as_sent(message) for message in messages]})
