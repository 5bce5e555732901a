"""The client of a side: sends requests, keeps what comes and when, and reads the server's counters."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

import httpx

from eyas.bench.serve_answer import Answer, Received
from eyas.bench.serve_load import Load, run_load
from eyas.bench.serve_prompts import Item
from eyas.bench.serve_side import Side
from eyas.errors import EndpointError
from eyas.types import SamplingParams

_COUNTER = re.compile(r"^(?:eyas|vllm):(spec_decode_num_(?:drafts|accepted_tokens))(?:_total)?(?:{[^}]*})? (\S+)", re.M)


@dataclass(frozen=True)
class LoadRun:
    """One side under one load, once."""

    seconds: float
    """From the first request to the end of the last answer."""
    answers: list[Answer]
    drafts: float = 0.0
    """Drafts the server verified meanwhile and draft tokens it accepted, by its own counters; 0 if it has none."""
    accepted: float = 0.0


class Client:
    """Asks one side. Use it as an async context manager."""

    def __init__(self, side: Side, params: SamplingParams, timeout: float, api_key: str | None = None) -> None:
        self.side, self.params, self._timeout = side, params, timeout
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
        """Send every item under a load; `first` is the number of the first request, which its seed depends on."""
        before = await self._counters()
        began = time.perf_counter()

        async def ask(number: int) -> Received:
            return await self._ask(items[number], first + number, began)

        received = await run_load(load, ask, len(items), seed)
        seconds = time.perf_counter() - began
        after = await self._counters()
        grown = {name: after[name] - before.get(name, 0.0) for name in after}
        return LoadRun(
            seconds,
            [one.read() for one in received],
            grown.get("spec_decode_num_drafts", 0.0),
            grown.get("spec_decode_num_accepted_tokens", 0.0),
        )

    async def _ask(self, item: Item, number: int, origin: float) -> Received:
        body = item.body(self._model, self.params, number) | self.side.extra
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
        return Received(number, sent - origin, pieces, time.perf_counter() - sent, error)

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

    async def _counters(self) -> dict[str, float]:
        """The speculation counters at `/metrics`, summed over labels; none where there is no such page."""
        try:
            response = await self._http.get(f"{self.side.root}/metrics")
        except httpx.HTTPError:
            return {}
        sums: dict[str, float] = {}
        if response.is_success:
            for name, value in _COUNTER.findall(response.text):
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums
