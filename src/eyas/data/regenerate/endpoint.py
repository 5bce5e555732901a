"""Answers questions at any OpenAI-compatible endpoint: concurrent requests, retries with backoff, reported failures."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Generator
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
from pydantic import Field

from eyas.config import StrictModel
from eyas.data.regenerate.completions import CompletionSettings, GarbageError
from eyas.data.regenerate.entries import Question, Reply, Take, unanswered
from eyas.errors import UsageError

PATH = "/chat/completions"
TRY_AGAIN = frozenset({408, 409, 425, 429})
"""Client errors after which a request is retried, as after all server errors."""
WRONG_FOR_ALL = frozenset({401, 402, 403, 404, 405})
"""Client errors that would meet every chat: the key, the model or the address is wrong."""


class RetryPolicy(StrictModel):
    """Exponential backoff with jitter: waits between half and all of `first * 2^(n-1)` seconds after failure n."""

    attempts: int = Field(default=6, ge=1)
    """Requests in all, including the first."""
    first: float = Field(default=1.0, ge=0)
    """The most seconds to wait after the first failure."""
    longest: float = Field(default=60.0, ge=0)
    """The most seconds to wait at all, unless the endpoint asks for more by Retry-After."""

    def wait(self, failures: int, requested: float | None = None) -> float:
        """Seconds to wait after `failures` failures, at least 1; no less than the endpoint `requested`."""
        backoff = min(self.longest, self.first * 2.0 ** min(failures - 1, 30)) * random.uniform(0.5, 1.0)
        return backoff if requested is None else max(requested, backoff)


def retry_after(value: str | None) -> float | None:
    """Seconds that a Retry-After header (a number or a date) asks for; None if it is absent or malformed."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


class Connection(StrictModel):
    """How requests are sent to the endpoint; nothing here changes an answer."""

    concurrency: int = 16
    """The most requests at a time."""
    timeout: float = 600.0
    """Seconds that a whole answer may take."""
    retry: RetryPolicy = RetryPolicy()


class EndpointAnswerer:
    """Sends questions to the API at `url`, given up to and including `/v1`. The key is never written anywhere."""

    def __init__(
        self,
        url: str,
        completions: CompletionSettings,
        connection: Connection = Connection(),  # noqa: B008  # frozen
        api_key: str | None = None,
    ) -> None:
        self._url = url.rstrip("/").removesuffix(PATH)
        if not self._url.startswith(("http://", "https://")):
            raise UsageError(f"the endpoint {url!r} is not a URL: give it as http://HOST:PORT/v1")
        self._completions, self._connection = completions, connection
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    @property
    def settings(self) -> dict[str, Any]:
        """The endpoint and the settings of the requests; see `Answerer.settings`."""
        return {"answered_by": self._url, **self._completions.model_dump(mode="json")}

    def answers(self, take: Take) -> Generator[Reply, None, None]:
        """Yield replies in order of completion."""
        loop = asyncio.new_event_loop()
        client = httpx.AsyncClient(
            headers=self._headers,
            timeout=self._connection.timeout,
            limits=httpx.Limits(max_connections=self._connection.concurrency),
        )
        running: set[asyncio.Task[Reply]] = set()
        try:
            while True:
                for question in take(self._connection.concurrency - len(running)):
                    running.add(loop.create_task(self._reply(client, question)))
                if not running:
                    return
                done, running = loop.run_until_complete(asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED))
                for task in done:
                    yield task.result()
        finally:
            for task in running:
                task.cancel()
            loop.run_until_complete(_ended(running))
            loop.run_until_complete(client.aclose())
            loop.run_until_complete(asyncio.sleep(0))  # connections are closed in the next turn of the loop
            loop.close()

    async def _reply(self, client: httpx.AsyncClient, question: Question) -> Reply:
        retry = self._connection.retry
        body = self._completions.body(question)
        reason = ""
        for attempt in range(1, retry.attempts + 1):
            requested = None
            try:
                response = await asyncio.wait_for(client.post(self._url + PATH, json=body), self._connection.timeout)
                if response.is_success:
                    return Reply(self._completions.answer(question, _json(response)))
                reason = f"{self._url} says {response.status_code}: {_message(response)}"
                if response.status_code < 500 and response.status_code not in TRY_AGAIN:
                    wrong_for_all = response.status_code in WRONG_FOR_ALL
                    return unanswered(question, reason, outage=wrong_for_all, rejected=not wrong_for_all)
                requested = retry_after(response.headers.get("Retry-After"))
            except GarbageError as error:
                reason = f"{self._url}: {error}"
            except (httpx.TimeoutException, asyncio.TimeoutError):
                reason = f"{self._url} gave no answer within {self._connection.timeout:g} s"
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                reason = f"{self._url} can't be reached: {error or type(error).__name__}"
            if attempt < retry.attempts:
                await asyncio.sleep(retry.wait(attempt, requested))
        return unanswered(question, f"{reason} (tried {retry.attempts} times)", outage=True)


async def _ended(tasks: set[asyncio.Task[Reply]]) -> None:
    """Wait until all cancelled tasks have ended."""
    await asyncio.gather(*tasks, return_exceptions=True)


def _json(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError as error:  # JSON errors and broken UTF-8 alike
        raise GarbageError(f"the response is not JSON: {response.text[:80]!r}") from error


def _message(response: httpx.Response) -> str:
    """The error message in a response, on one line of at most 200 characters."""
    try:
        body = response.json()
    except ValueError:
        body = None
    error = body.get("error", body) if isinstance(body, dict) else None
    text = error.get("message") if isinstance(error, dict) else error
    return " ".join(str(text or response.text or response.reason_phrase).split())[:200]
