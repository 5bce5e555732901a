"""The benchmark client: makes requests from prompt files, sends them, and parses the streamed answers.

A load comes from clients that wait for their answers (closed loop), or from random arrivals (open loop). Streams are
stored as bytes with arrival times and parsed after the load has ended, so that parsing doesn't slow it.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import httpx

from eyas.bench.serving.servers import Side, SpeculationCounts, read_metrics, read_server_info
from eyas.data.regenerate.endpoint import as_sent, sampling_fields
from eyas.errors import DataError, EndpointError
from eyas.text.chats import Message
from eyas.text.prompts import BadRow, PromptRow, read_prompts
from eyas.text.template import encode_chat, encode_text, has_chat_template
from eyas.types import SamplingParams

AnswerT = TypeVar("AnswerT")
Send = Callable[[int], Awaitable[AnswerT]]
"""Sends request number `i` of the load and waits for its answer."""
CHAT, TEXT = "/chat/completions", "/completions"
"""Routes for chats, and for text or token ids."""


@dataclass(frozen=True)
class Load:
    """A level of load: concurrent clients (closed loop) or requests per second (open loop)."""

    kind: Literal["closed", "open"]
    level: float
    """Concurrent clients, or requests per second."""

    def __str__(self) -> str:
        return f"{self.level:g} at once" if self.kind == "closed" else f"{self.level:g} requests/s"

    @property
    def clients(self) -> int:
        """Concurrent clients; 1 for an open loop."""
        return int(self.level) if self.kind == "closed" else 1

    def requests(self, least: int, per_client: float) -> int:
        """Number of requests in a run: at least `least`, and in a closed loop at least `per_client` per client."""
        return max(least, math.ceil(per_client * self.clients)) if self.kind == "closed" else least


async def run_load(load: Load, send: Send[AnswerT], count: int, seed: int) -> list[AnswerT]:
    """Send `count` requests under a load and return the answers in the order of the requests."""
    if load.kind == "closed":
        return await _closed(send, count, load.clients)
    return await _open(send, arrivals(load.level, count, seed))


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Arrival times in seconds: a Poisson process with its first request at 0, reproducible by `seed`."""
    chance = random.Random(seed)
    moments = [0.0]
    while len(moments) < count:
        moments.append(moments[-1] + chance.expovariate(rate))
    return moments[:count]


async def _closed(send: Send[AnswerT], count: int, clients: int) -> list[AnswerT]:
    """Each client sends its next request as soon as it has its answer."""
    answers: dict[int, AnswerT] = {}
    waiting = iter(range(count))

    async def client() -> None:
        for number in waiting:
            answers[number] = await send(number)

    await asyncio.gather(*(client() for _ in range(min(clients, count))))
    return [answers[number] for number in range(count)]


async def _open(send: Send[AnswerT], moments: Sequence[float]) -> list[AnswerT]:
    """Send requests at their times, whether or not earlier ones have been answered."""
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
    """The body's `messages` or `prompt`, and fields that go with it."""
    tokens: int | None = None
    """Maximum tokens of the answer; None = the sampling parameters' own."""

    def body(self, model: str, params: SamplingParams, number: int) -> dict[str, Any]:
        """The JSON body of the request, with streaming; its seed is `params.seed + number`."""
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        most = {} if self.tokens is None else {"max_tokens": self.tokens}
        return {"model": model, **self.prompt, **sampling_fields(params, params.seed + number), **most, **streamed}


def read_items(paths: Sequence[Path], limit: int | None, seed: int, tokenizer: Any = None) -> list[Item]:
    """Read all rows of all files in one shuffled order; of a row with `turns`, only the first turn.

    With a tokenizer, its chat template is applied here and every prompt is sent as token ids, so that servers that
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
    """The request for a row's next turn, given earlier answers. Raises RequestError if the template refuses it."""
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
        from eyas.targets.tokenizers import turn_end_ids  # imports torch; bad options are refused without it

        eos_ids = turn_end_ids(tokenizer)  # the server can't tell from token ids that it's a chat
        return Item(name, TEXT, prompt | {"stop_token_ids": list(eos_ids)} if eos_ids else prompt)
    return Item(name, CHAT, {"messages": [as_sent(message) for message in messages]})


@dataclass(frozen=True)
class TimedAnswer:
    """The outcome of one request. Seconds are wall time since it was sent."""

    item: int
    """The number of the request in its load."""
    started: float
    """When it was sent, in seconds since the load began."""
    seconds: float
    first_seconds: float | None = None
    """Time to the first text; None if there was no text."""
    tokens: int = 0
    """Output tokens as the server's `usage` counts them."""
    prompt_tokens: int = 0
    text: str = ""
    passes: float = 0.0
    """Target passes behind the answer; 0 if the server doesn't report them."""
    accepted: float = 0.0
    """Draft tokens accepted in those passes."""
    error: str | None = None

    @property
    def seconds_per_token(self) -> float | None:
        """Seconds per token after the first (TPOT); None for fewer than two tokens."""
        if self.first_seconds is None or self.tokens < 2:
            return None
        return (self.seconds - self.first_seconds) / (self.tokens - 1)


@dataclass(frozen=True)
class RawStream:
    """The bytes of a streamed answer, with their arrival times."""

    item: int
    started: float
    pieces: Sequence[tuple[float, bytes]]
    """(seconds since the request was sent, bytes)."""
    seconds: float
    error: str | None = None

    def read(self) -> TimedAnswer:
        """Parse the server-sent events into an answer; its `error` says what is wrong with them."""
        if self.error is not None:
            return TimedAnswer(self.item, self.started, self.seconds, error=self.error)
        texts: list[str] = []
        usage: dict[str, Any] = {}
        timings: dict[str, Any] = {}
        first = None
        for seconds, event in _events(self.pieces):
            if event == "[DONE]":
                continue
            try:
                data = json.loads(event)
            except ValueError:
                return self._broken(f"an event isn't valid JSON: {event[:80]!r}")
            if not isinstance(data, dict) or "error" in data:
                return self._broken(f"an error in the stream: {event[:200]}")
            usage = data.get("usage") or usage
            timings = data.get("timings") or timings
            for choice in data.get("choices") or ():
                text = _text(choice)
                if text:
                    first = seconds if first is None else first
                    texts.append(text)
        if "completion_tokens" not in usage:
            return self._broken("no `usage` came, so tokens can't be counted: the server ignores stream_options")
        tokens = int(usage["completion_tokens"])
        return TimedAnswer(
            self.item,
            self.started,
            self.seconds,
            first,
            tokens,
            int(usage.get("prompt_tokens") or 0),
            "".join(texts),
            *_speculation(tokens, usage, timings),
        )

    def _broken(self, error: str) -> TimedAnswer:
        return TimedAnswer(self.item, self.started, self.seconds, error=error)


def _events(pieces: Sequence[tuple[float, bytes]]) -> list[tuple[float, str]]:
    """Time and data of every event; the time is when its last byte arrived."""
    found = []
    rest = b""
    for seconds, piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                found.append((seconds, line[5:].strip().decode("utf-8", "replace")))
    return found


def _text(choice: dict[str, Any]) -> str:
    """The text, reasoning or tool calls that a choice of an event adds: any of it ends the wait for the first token."""
    delta = choice.get("delta") or {}
    text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
    return str(text or (json.dumps(delta["tool_calls"]) if delta.get("tool_calls") else ""))


def _speculation(tokens: int, usage: dict[str, Any], timings: dict[str, Any]) -> tuple[float, float]:
    """Target passes and accepted draft tokens, from eyas's `usage` or llama.cpp's `timings`; (0, 0) without either.

    For llama.cpp, every token that isn't an accepted draft token counts as one pass.
    """
    statistics = usage.get("eyas")
    if isinstance(statistics, dict):
        passes = float(statistics.get("target_passes") or 0)
        return passes, passes * (float(statistics.get("accept_length") or 1.0) - 1.0)
    if "draft_n_accepted" in timings:
        accepted = float(timings["draft_n_accepted"])
        return tokens - accepted, accepted
    return 0.0, 0.0


_NO_IDS = frozenset({400, 404, 405, 415, 422, 501})
"""Status codes by which servers refuse a prompt of token ids."""


@dataclass(frozen=True)
class LoadRun:
    """One run of one side under one load."""

    seconds: float
    """From the first request to the end of the last answer."""
    answers: list[TimedAnswer]
    counted: SpeculationCounts = field(default_factory=SpeculationCounts)
    """The server's counters during the run."""

    def __add__(self, other: LoadRun) -> LoadRun:
        """Both runs as one: seconds, answers and counts added up."""
        return LoadRun(self.seconds + other.seconds, self.answers + other.answers, self.counted + other.counted)


class Client:
    """Sends requests to one side. Use it as an async context manager; raises EndpointError if it can't be reached."""

    def __init__(
        self, side: Side, params: SamplingParams, timeout: float, api_key: str | None = None, *, own_seeds: bool = True
    ) -> None:
        """`own_seeds`: request number i gets `params.seed + i`; else all get the same seed."""
        self.side = side
        self.params = params
        self._timeout = timeout
        self._own_seeds = own_seeds
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(headers=headers, timeout=timeout, limits=limits, trust_env=False)
        self._model = side.model

    async def __aenter__(self) -> Client:
        self._model = self._model or await self._first_model()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def run(self, load: Load, items: Sequence[Item], first: int, seed: int) -> LoadRun:
        """Send every item under a load; `first` is the number of the first request, on which seeds depend."""
        before = await self._counters()
        began = time.perf_counter()

        async def send(number: int) -> RawStream:
            return await self._send(items[number], first + number, began)

        streams = await run_load(load, send, len(items), seed)
        seconds = time.perf_counter() - began
        after = await self._counters()
        return LoadRun(seconds, [stream.read() for stream in streams], after - before)

    async def takes_ids(self, prompt: Sequence[int]) -> bool:
        """Whether the server completes a prompt of token ids. Raises EndpointError for any other failure."""
        body = {"model": self._model, "prompt": list(prompt), "max_tokens": 1}
        url = self.side.url + TEXT
        try:
            response = await self._http.post(url, json=body)
        except httpx.HTTPError as error:
            raise EndpointError(f"{self.side.name}: {url} can't be reached: {error or type(error).__name__}") from error
        if not response.is_success and response.status_code not in _NO_IDS:
            text = " ".join(response.text.split())[:200]
            raise EndpointError(f"{self.side.name}: {url} answers {response.status_code}: {text}")
        return response.is_success

    async def _send(self, item: Item, number: int, origin: float) -> RawStream:
        body = item.body(self._model, self.params, number if self._own_seeds else 0) | self.side.extra
        pieces: list[tuple[float, bytes]] = []
        error = None
        sent = time.perf_counter()
        try:
            async with self._http.stream("POST", self.side.url + item.path, json=body) as response:
                if not response.is_success:
                    await response.aread()
                    error = f"{response.status_code}: {' '.join(response.text.split())[:200]}"
                else:
                    async for piece in response.aiter_bytes():
                        pieces.append((time.perf_counter() - sent, piece))
        except httpx.TimeoutException:
            error = f"no answer within {self._timeout:g} s"
        except httpx.HTTPError as problem:
            error = f"{type(problem).__name__}: {problem}"
        return RawStream(number, sent - origin, pieces, time.perf_counter() - sent, error)

    async def _first_model(self) -> str:
        url = f"{self.side.url}/models"
        try:
            response = await self._http.get(url)
            response.raise_for_status()
            return str(response.json()["data"][0]["id"])
        except httpx.HTTPError as error:
            raise EndpointError(f"{self.side.name}: {url} can't be reached: {error or type(error).__name__}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise EndpointError(f"{self.side.name}: {url} lists no model: name it with ,model=NAME") from error

    async def _counters(self) -> SpeculationCounts:
        """The server's counters since its start; all 0 if it publishes none."""
        page = await self._page("/metrics")
        found = None if page is None else read_metrics(page.text)
        if found is None and (page := await self._page("/get_server_info")) is not None:
            try:
                found = read_server_info(page.json())
            except ValueError:
                found = None
        return found or SpeculationCounts()

    async def _page(self, path: str) -> httpx.Response | None:
        """The page at a path; None if the server has none."""
        try:
            response = await self._http.get(self.side.root + path)
        except httpx.HTTPError:
            return None
        return response if response.is_success else None
