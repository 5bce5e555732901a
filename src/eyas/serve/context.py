"""What every route works with: the server's settings and shared state, and what is known about the request.

Routes get them as parameters, `context: Context` and `info: Info`, through FastAPI's dependency injection.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Depends
from pydantic import Field, SecretStr, field_validator
from starlette.requests import Request

import eyas
from eyas.config import StrictModel
from eyas.serve.engine_thread import EngineThread, ServedEngine
from eyas.serve.errors import ApiError, too_late, unavailable
from eyas.serve.fair_turns import FairTurns, FairWorkers
from eyas.serve.observe.observer import Observer
from eyas.serve.tools.grammar_trials import GrammarTrials
from eyas.text.reasoning import AUTO, ReasoningMarks, check_parser, reasoning_marks
from eyas.types import GrammarSpec

T = TypeVar("T")
_LARGE_TEXT = 1 << 16
"""Characters beyond which a text is large: it may take a tenth of a second or more to tokenize."""
_SECONDS_PER_CHARACTER = 4e-8
"""The pace at which large bodies are admitted, because parsing one takes a quarter of that time and holds the GIL."""
_TRACE_HEADERS = ("traceparent", "tracestate")

log = logging.getLogger(__name__)


class ServeSettings(StrictModel):
    """Names, keys and limits, set by the operator. Only `seed`, `parse_special_tokens`, `fim_tokens` and
    `reasoning_parser` can change a token."""

    model_names: tuple[str, ...] = Field(min_length=1)
    """The names that requests may use for the model."""
    api_keys: tuple[SecretStr, ...] = ()
    """Any of these keys opens the API; without keys it is open to everyone."""
    host: str = "127.0.0.1"
    """The address to listen on."""
    allowed_hosts: tuple[str, ...] = ()
    """Additional names that clients may use for the server (`Host`): `NAME`, `*.DOMAIN`, or `*` for any."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses or networks of proxies whose `X-Forwarded-For` says who the client is; `*` = any."""
    parse_special_tokens: bool = False
    """Whether special tokens spelled out in messages are control tokens; otherwise they are text."""
    max_connections: int | None = Field(default=None, ge=1)
    """Maximum open connections; None = what file descriptors allow, at most 4096."""
    reasoning_parser: str = AUTO
    """Whose marks separate thoughts from answers (`eyas.text.reasoning.PARSERS`); `auto` = those that the model shows,
    `none` = thoughts stay in the text."""
    fim_tokens: str | None = None
    """The format in which gaps are filled (`eyas.text.fill`); None = the one that the model's tokens show."""
    header_seconds: float = Field(default=10.0, gt=0)
    """How long a client may take from connecting, or from a request's first byte, to the end of its headers."""
    idle_seconds: float = Field(default=5.0, gt=0)
    """How long a connection is kept open after a response, for the next request."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Maximum tokens of a prompt and its answer; None = the model's context."""
    max_body_bytes: int = Field(default=8 << 20, ge=1)
    read_seconds: float = Field(default=30.0, gt=0)
    """How long a client may pause while it sends a body."""
    max_choices: int = Field(default=128, ge=1)
    """Maximum choices per request: prompts times `n`."""
    request_seconds: float | None = Field(default=None, gt=0)
    """How long a request may wait and run in total; None = no limit."""
    write_seconds: float = Field(default=30.0, gt=0)
    """How long a client may read nothing from a stream before its request is cancelled."""
    backlog_chunks: int = Field(default=1024, ge=1)
    """Maximum chunks kept for a client that reads more slowly than the engine generates."""
    drain_seconds: float = Field(default=30.0, ge=0)
    """How long running requests may continue after SIGTERM."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the API (CORS); `*` = any."""
    root_path: str = ""
    """Path under which a proxy exposes the server; requests may arrive with or without it."""
    ssl_certfile: Path | None = None
    """PEM certificate for HTTPS; None = HTTP."""
    ssl_keyfile: Path | None = None
    """The certificate's private key; None = it is in the certificate file."""
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    """Seed for requests without one; None = a random one for each."""
    per_request_spec_decode_metrics: Literal["none", "summary", "detailed"] = "none"
    """`summary`: responses with one choice include vLLM's `metrics.speculative_decoding`; `detailed`: by round, too."""

    @field_validator("reasoning_parser")
    @classmethod
    def _known(cls, name: str) -> str:
        return check_parser(name)


@dataclass
class ServerContext:
    """The state that a server's routes share."""

    thread: EngineThread
    settings: ServeSettings
    observer: Observer
    started: int = field(default_factory=lambda: int(time.time()))
    """When the server started, in seconds since the epoch."""
    trials: GrammarTrials = field(default_factory=GrammarTrials)
    _ignored: set[str] = field(default_factory=set)
    """Fields that were already logged as ignored."""
    _workers: FairWorkers = field(default_factory=lambda: FairWorkers(2, "tokenize"))
    _large_workers: FairWorkers = field(default_factory=lambda: FairWorkers(1, "tokenize-large"))
    _turns: FairTurns = field(default_factory=lambda: FairTurns(1))
    _large_turns: FairTurns = field(default_factory=lambda: FairTurns(1))

    @property
    def engine(self) -> ServedEngine:
        """The engine. Raises ApiError 503 unless it accepts requests."""
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
        """Maximum tokens of a prompt and its answer; None = unlimited."""
        limits = [n for n in (self.engine.target.max_length, self.settings.max_model_len) if n is not None]
        return min(limits, default=None)

    @property
    def reasoning(self) -> ReasoningMarks | None:
        """The marks around thoughts in answers to chats; None if thoughts stay in the text."""
        return reasoning_marks(self.engine.tokenizer, self.settings.reasoning_parser)

    @property
    def fingerprint(self) -> str:
        """The `system_fingerprint` of responses."""
        return f"eyas-{eyas.__version__}"

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 if no model of this name is served; None stands for any model."""
        if name is not None and name not in self.settings.model_names:
            served = ", ".join(self.settings.model_names)
            message = f"there is no model {name[:100]!r} here: use {served}"
            raise ApiError(404, message, code="model_not_found", param="model")

    def seconds_left(self, received: float) -> float | None:
        """Seconds left for a request that arrived at this time (`time.monotonic`); None = no limit."""
        most = self.settings.request_seconds
        return None if most is None else max(0.0, received + most - time.monotonic())

    def log_ignored(self, fields: Iterable[tuple[str, str]]) -> None:
        """Log the ignored fields of a request with the reasons, each field only once."""
        for name, why in fields:
            if name not in self._ignored:
                self._ignored.add(name)
                log.info("a field is accepted and ignored", extra={"fields": {"field": name, "reason": why}})

    async def turn_to_read(self, client: str, characters: int) -> None:
        """Wait until it is the client's turn to have a body of `characters` characters parsed and checked."""
        if characters <= _LARGE_TEXT:
            turns = self._turns
            pause = 0.0
        else:
            turns = self._large_turns
            pause = _SECONDS_PER_CHARACTER * characters
        await turns.take(client, characters)
        # at most one begins in an iteration of the event loop
        asyncio.get_running_loop().call_later(pause, turns.give_back)

    async def in_worker(
        self, function: Callable[..., T], *arguments: Any, characters: int = 0, info: RequestInfo | None = None
    ) -> T:
        """Run a slow function (templates, tokenizing) on a worker thread, off the event loop.

        Texts of many `characters` have a separate thread, so that short ones never wait for them. Clients take turns;
        `info` says whose request it is. Raises QueueFullError, or ApiError 504 when the request's time is up.
        """
        workers = self._workers if characters <= _LARGE_TEXT else self._large_workers
        client, left = ("", None) if info is None else (info.client, self.seconds_left(info.received))
        try:
            return await asyncio.wait_for(workers.run(client, characters, function, *arguments), left)
        except asyncio.TimeoutError:
            raise too_late() from None

    async def check_grammar(self, grammar: GrammarSpec | None, client: str) -> None:
        """Compile a client's grammar for the engine to reuse. Raises RequestError, UsageError or QueueFullError."""
        if grammar is not None:
            await self.trials.check(self.engine.tokenizer, grammar, client)


@dataclass(frozen=True)
class RequestInfo:
    """What is known about a request apart from its body."""

    id: str
    """The value of `X-Request-Id`, also part of the response's id and of log lines."""
    received: float
    """When the request arrived, by `time.monotonic`."""
    client: str
    """The digest of the client's key, or the client's address if the server needs no keys."""
    private: bool = False
    """Whether the client forbids learning from its requests (`X-Eyas-Learn: off`)."""
    trace_headers: tuple[tuple[str, str], ...] = ()
    """Its headers that say whose trace it belongs to (W3C Trace Context)."""

    def queue_key(self, user: str | None) -> str:
        """Key of the queue that the request waits in: one per user; a client's users share the client's turns."""
        return f"{self.client}/{user or ''}"


async def _server_context(request: Request) -> ServerContext:
    context: ServerContext = request.app.state.context
    return context


async def _request_info(request: Request) -> RequestInfo:
    state = request.scope["state"]
    said = request.headers.get("x-eyas-learn", "").strip().lower()
    return RequestInfo(
        id=state["request_id"],
        received=state["received"],
        client=client_id(request),
        private=said in ("off", "no", "false", "0"),
        trace_headers=tuple((name, request.headers[name]) for name in _TRACE_HEADERS if name in request.headers),
    )


def client_id(request: Request) -> str:
    """The digest of the client's key, or the client's address if the server needs no keys."""
    key: str = request.scope["state"].get("key", "")
    return key or (request.client.host if request.client else "")


Context = Annotated[ServerContext, Depends(_server_context)]
"""The server's state, as a parameter of a route."""
Info = Annotated[RequestInfo, Depends(_request_info)]
"""What is known about the request, as a parameter of a route."""
