"""The client of a side: sends the requests of a load, records the streams, and reads the server's counters."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import httpx

from eyas.bench.serving.answer import RawStream, TimedAnswer
from eyas.bench.serving.counters import SpeculationCounts, read_metrics, read_server_info
from eyas.bench.serving.load import TEXT, Item, Load, run_load
from eyas.bench.serving.servers import Side
from eyas.errors import EndpointError
from eyas.types import SamplingParams

_NO_IDS = frozenset({400, 404, 405, 415, 422, 501})
"""Status codes with which servers refuse a prompt of token ids."""


@dataclass(frozen=True)
class LoadRun:
    """One run of one side under one load."""

    seconds: float
    """From the first request to the end of the last answer."""
    answers: list[TimedAnswer]
    counted: SpeculationCounts = field(default_factory=SpeculationCounts)
    """The server's counters during the run."""


class Client:
    """Sends requests to one side. Use it as an async context manager; raises EndpointError if the side isn't there."""

    def __init__(
        self,
        side: Side,
        params: SamplingParams,
        timeout: float,
        api_key: str | None = None,
        *,
        own_seeds: bool = True,
    ) -> None:
        """`own_seeds`: request number i has the seed plus i; else all have the same seed."""
        self.side, self.params, self._timeout, self._own_seeds = side, params, timeout, own_seeds
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
        """Whether the server completes a prompt of token ids. Raises EndpointError if it answers nothing at all."""
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
