"""What every route works with: the server's settings and shared state, and what is known of the request's sender.

Routes get the two as parameters, `context: Context` and `info: Info`, from FastAPI's dependency injection.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Depends
from pydantic import Field, SecretStr
from starlette.requests import Request

import eyas
from eyas.config import StrictModel
from eyas.engine.fair_queue import FairQueue, client_of, private
from eyas.errors import QueueFullError
from eyas.serve.engine_thread import EngineThread, ServedEngine
from eyas.serve.errors import ApiError, too_late, unavailable
from eyas.serve.observe.observer import Observer
from eyas.serve.tools.grammar_trials import GrammarTrials
from eyas.types import GrammarSpec

T = TypeVar("T")
_LARGE = 1 << 16
"""Characters of a large text, which may take a tenth of a second or more to tokenize."""
_SECONDS_PER_CHARACTER = 4e-8
"""The pace of large bodies: parsing one takes a quarter of this, during which no other Python code runs."""
_MOST_WAITING = 32 << 20
"""The most characters that wait; beyond it a client with any waiting is refused."""

log = logging.getLogger(__name__)


class ServeSettings(StrictModel):
    """Names, keys and limits of one server: what its operator decides. But for `seed`, none of them changes a token."""

    model_names: tuple[str, ...] = Field(min_length=1)
    """The names that requests may use for the model."""
    api_keys: tuple[SecretStr, ...] = ()
    """Any of these keys opens the API; without keys it is open to everyone."""
    host: str = "127.0.0.1"
    """The address that is listened on."""
    allowed_hosts: tuple[str, ...] = ()
    """Further names that clients may call the server by (`Host`): `NAME`, `*.DOMAIN`, or `*` for any."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses or networks of proxies whose `X-Forwarded-For` says who the client is; `*` = anyone's."""
    parse_special_tokens: bool = False
    """Whether special tokens that messages spell out are control tokens; else they are text."""
    max_connections: int | None = Field(default=None, ge=1)
    """Most connections at once; None = what file descriptors allow, at most 4096."""
    header_seconds: float = Field(default=10.0, gt=0)
    """How long a client may take from connecting, or from a request's first byte, to the end of its headers."""
    idle_seconds: float = Field(default=5.0, gt=0)
    """How long a connection is kept after an answer, for the next request."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Most tokens of a prompt and its answer; None = the model's context."""
    max_body_bytes: int = Field(default=8 << 20, ge=1)
    read_seconds: float = Field(default=30.0, gt=0)
    """How long a client may pause while it sends a body."""
    max_choices: int = Field(default=128, ge=1)
    """Most choices of one request: prompts times `n`."""
    request_seconds: float | None = Field(default=None, gt=0)
    """The longest a request may wait and run; None = as long as it takes."""
    write_seconds: float = Field(default=30.0, gt=0)
    """How long a client may read nothing of a stream before its request is cancelled."""
    backlog_chunks: int = Field(default=1024, ge=1)
    """Most chunks kept for a client that reads more slowly than the engine generates."""
    drain_seconds: float = Field(default=30.0, ge=0)
    """How long running requests may go on after SIGTERM."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the API (CORS); `*` = any."""
    root_path: str = ""
    """The path under which a proxy shows the server; requests come with it or without it."""
    ssl_certfile: Path | None = None
    """A certificate in PEM to serve HTTPS with; None = HTTP."""
    ssl_keyfile: Path | None = None
    """The certificate's key; None = it is in the certificate's file."""
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    """The seed of requests that have none; None = drawn for each."""
    per_request_spec_decode_metrics: Literal["none", "summary"] = "none"
    """`summary`: responses with one choice have vLLM's `metrics.speculative_decoding`."""


@dataclass(eq=False)
class _Job:
    """A call that waits for its turn."""

    index: int
    key: str
    longest: int
    """Its cost in characters."""
    turn: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class FairWorkers:
    """A pool of threads for one event loop, whose turns are shared fairly by clients and their users."""

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, name)
        self._free = threads
        self._queue = FairQueue[_Job]()
        self._submitted = 0

    async def run(self, key: str, characters: int, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function on one of the threads when it is the turn of this queue key; QueueFullError.

        A call that is cancelled before its turn is never made; later it goes on, and holds its thread until it ends.
        """
        waiting = sum(job.longest for job in self._queue)
        if waiting + characters > _MOST_WAITING and self._queue.count(client_of(key)):
            raise QueueFullError("too much text waits to be read: try again later", 5.0)
        job = _Job(self._submitted, key, characters)
        self._submitted += 1
        self._queue.push(job)
        self._give_turns()
        try:
            await job.turn
        except asyncio.CancelledError:
            if job in self._queue:
                self._queue.remove(job)
            elif not job.turn.cancelled():
                self._ended()
            raise
        loop, call = asyncio.get_running_loop(), self._pool.submit(function, *arguments)

        def ended(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._ended)

        call.add_done_callback(ended)
        return await asyncio.wrap_future(call)

    def _ended(self) -> None:
        self._free += 1
        self._give_turns()

    def _give_turns(self) -> None:
        while self._free and self._queue:
            turn = self._queue.pop().turn
            if not turn.cancelled():  # its request doesn't know yet
                self._free -= 1
                turn.set_result(None)


class FairTurns:
    """Lets requests begin in turns of clients, one in each pass of the event loop at most."""

    def __init__(self, pause: float = 0.0) -> None:
        """`pause`: seconds for each character of a request, until the next one may begin."""
        self._queue = FairQueue[_Job]()
        self._pause = pause
        self._submitted, self._giving = 0, False

    async def next(self, key: str, characters: int) -> None:
        """Wait until it is the turn of a request with `characters` characters."""
        loop = asyncio.get_running_loop()
        job = _Job(self._submitted, key, characters)
        self._submitted += 1
        self._queue.push(job)
        if not self._giving:
            self._giving = True
            loop.call_soon(self._give_turn, loop)
        try:
            await job.turn
        except asyncio.CancelledError:
            if job in self._queue:
                self._queue.remove(job)
            raise

    def _give_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._queue:
            job = self._queue.pop()
            if not job.turn.cancelled():  # its request doesn't know yet
                job.turn.set_result(None)
                loop.call_later(self._pause * job.longest, self._give_turn, loop)
                return
        self._giving = False


@dataclass
class ServerContext:
    """The state of one server that its routes share."""

    thread: EngineThread
    settings: ServeSettings
    observer: Observer
    started: int = field(default_factory=lambda: int(time.time()))
    """When the server started, in seconds since the epoch."""
    trials: GrammarTrials = field(default_factory=GrammarTrials)
    _ignored: set[str] = field(default_factory=set)
    """The fields that the log has named as ignored."""
    _workers: FairWorkers = field(default_factory=lambda: FairWorkers(2, "tokenize"))
    _large_workers: FairWorkers = field(default_factory=lambda: FairWorkers(1, "tokenize-large"))
    _turns: FairTurns = field(default_factory=FairTurns)
    _large_turns: FairTurns = field(default_factory=lambda: FairTurns(_SECONDS_PER_CHARACTER))

    @property
    def engine(self) -> ServedEngine:
        """The engine; ApiError 503 unless it takes requests."""
        status = self.thread.status
        if status == "ready":
            return self.thread.engine
        why = {
            "loading": "the model is being loaded",
            "draining": "the server is going down",
            "stopped": "the server is going down",
            "failed": "the engine failed",
        }
        raise unavailable(why[status])

    @property
    def max_model_len(self) -> int | None:
        """Most tokens of a prompt and its answer; None = unlimited."""
        limits = [n for n in (self.engine.target.max_length, self.settings.max_model_len) if n is not None]
        return min(limits, default=None)

    @property
    def fingerprint(self) -> str:
        """The `system_fingerprint` of responses."""
        return f"eyas-{eyas.__version__}"

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 if no model of this name is served; None is any model."""
        if name is not None and name not in self.settings.model_names:
            served = ", ".join(self.settings.model_names)
            message = f"there is no model {name[:100]!r} here: write {served}"
            raise ApiError(404, message, code="model_not_found", param="model")

    def seconds_left(self, received: float) -> float | None:
        """How long a request that came at this time (`time.monotonic`) may still take; None = as long as it takes."""
        most = self.settings.request_seconds
        return None if most is None else max(0.0, received + most - time.monotonic())

    def log_ignored(self, fields: Iterable[tuple[str, str]]) -> None:
        """Log fields of a request that change nothing, with the reasons; each field once."""
        for name, why in fields:
            if name not in self._ignored:
                self._ignored.add(name)
                log.info("a field is accepted and ignored", extra={"fields": {"field": name, "reason": why}})

    async def turn_to_read(self, client: str, characters: int) -> None:
        """Wait until it is the turn of a client's body to be parsed and checked, by its characters."""
        await (self._turns if characters <= _LARGE else self._large_turns).next(client, characters)

    async def in_worker(
        self, function: Callable[..., T], *arguments: Any, characters: int = 0, info: RequestInfo | None = None
    ) -> T:
        """Run a slow function (templates, tokenizing) on a worker thread, beside the event loop.

        Texts of many `characters` have a thread of their own, so that short ones never wait for them. Clients take
        turns: `info` says whose request it is. ApiError 504 when that has taken too long, QueueFullError.
        """
        workers = self._workers if characters <= _LARGE else self._large_workers
        client, left = ("", None) if info is None else (info.client, self.seconds_left(info.received))
        try:
            return await asyncio.wait_for(workers.run(client, characters, function, *arguments), left)
        except asyncio.TimeoutError:
            raise too_late() from None

    async def check_grammar(self, grammar: GrammarSpec | None, client: str) -> None:
        """Compile a client's grammar, which the engine then reuses; RequestError, UsageError, QueueFullError."""
        if grammar is not None:
            await self.trials.check(self.engine.tokenizer, grammar, client)


@dataclass(frozen=True)
class RequestInfo:
    """What is known of a request besides its body."""

    id: str
    """The value of `X-Request-Id`, which is also part of the response's id and of log lines."""
    received: float
    """When the request arrived, by `time.monotonic`."""
    client: str
    """The digest of the client's key, or its address where no keys are needed."""
    private: bool = False
    """Whether the client says that nothing may be learnt from it (`X-Eyas-Learn: off`)."""

    def queue_key(self, user: str | None) -> str:
        """The queue that the request waits in: one for each user of a client, who share what the client gets."""
        key = f"{self.client}/{user or ''}"
        return private(key) if self.private else key


async def _server_context(request: Request) -> ServerContext:
    context: ServerContext = request.app.state.context
    return context


async def _request_info(request: Request) -> RequestInfo:
    state = request.scope["state"]
    said = request.headers.get("x-eyas-learn", "").strip().lower()
    return RequestInfo(state["request_id"], state["received"], client_id(request), said in ("off", "no", "false", "0"))


def client_id(request: Request) -> str:
    """The digest of the client's key, or its address where no keys are needed."""
    key: str = request.scope["state"].get("key", "")
    return key or (request.client.host if request.client else "")


Context = Annotated[ServerContext, Depends(_server_context)]
"""The server's state, as a parameter of a route."""
Info = Annotated[RequestInfo, Depends(_request_info)]
"""What is known of the request, as a parameter of a route."""
