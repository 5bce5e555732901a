"""What every route works with: the engine's thread, the settings, who watches; and how a request is run."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import Field, SecretStr

import eyas
from eyas.config import StrictModel
from eyas.serve.answer import Answer
from eyas.serve.encode import Job
from eyas.serve.engine_thread import EngineThread, ServedEngine
from eyas.serve.generation import Generation
from eyas.serve.http.errors import ApiError, unavailable
from eyas.serve.observe.observer import Observer, Received, Watch
from eyas.serve.tools.grammar_trials import GrammarTrials
from eyas.types import GrammarSpec

T = TypeVar("T")
_LARGE = 1 << 18
"""Characters: a tenth of a second of tokenizing, or more."""


@dataclass
class Context:
    """One server's."""

    thread: EngineThread
    settings: ServeSettings
    observer: Observer
    started: int = field(default_factory=lambda: int(time.time()))
    trials: GrammarTrials = field(default_factory=GrammarTrials)
    _workers: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, "tokenize"))
    _large: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "tokenize-large"))
    _trying: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "grammar"))

    @property
    def engine(self) -> ServedEngine:
        """The engine, once it is ready; 503 before and after."""
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
        """Most tokens of prompt and answer; None = no end."""
        ends = [end for end in (self.engine.target.max_length, self.settings.max_model_len) if end is not None]
        return min(ends, default=None)

    @property
    def fingerprint(self) -> str:
        """`system_fingerprint`."""
        return f"eyas-{eyas.__version__}"

    def check_model(self, name: str | None) -> None:
        """404 for a model that isn't here."""
        if name is not None and name not in self.settings.model_names:
            served = ", ".join(self.settings.model_names)
            message = f"there is no model {name[:100]!r} here: write {served}"
            raise ApiError(404, message, code="model_not_found", param="model")

    async def in_worker(self, function: Callable[..., T], *arguments: Any, characters: int = 0) -> T:
        """Run what takes long (templates, tokenizing) beside the event loop.

        Texts that take seconds wait for each other, nobody else for them.
        """
        workers = self._workers if characters <= _LARGE else self._large
        return await asyncio.get_running_loop().run_in_executor(workers, function, *arguments)

    async def check_grammar(self, grammar: GrammarSpec | None) -> None:
        """Compile it, where it can do no harm first; the engine finds it compiled. RequestError, UsageError."""
        if grammar is not None:
            loop, tokenizer = asyncio.get_running_loop(), self.engine.tokenizer
            await loop.run_in_executor(self._trying, self.trials.check, tokenizer, grammar)

    async def generate(
        self, job: Job, answer: Callable[[], Answer], *, endpoint: str, stream: bool, user: str, began: float
    ) -> Generation:
        """Hand the sequences to the engine; `began` is when they were asked for (`time.monotonic`)."""
        count, most = len(job.requests), self.settings.max_choices
        if count > most:
            message = f"{count} answers are asked for in one request, at most {most} are given"
            raise ApiError(400, message, code="too_many_choices", param="n")
        ticket = await self.thread.submit(job.requests, deadline=self.settings.request_seconds, queue_key=user)
        watches = [
            Watch(
                self.observer,
                Received(
                    id=request.id,
                    endpoint=endpoint,
                    prompt_tokens=len(request.prompt),
                    max_tokens=request.params.max_tokens,
                    temperature=request.params.temperature,
                    stream=stream,
                    speculate=request.speculate,
                ),
                began,
            )
            for request in job.requests
        ]
        return Generation(job, ticket, answer, watches)


# What an operator decides about a server; nothing here changes a token.


class ServeSettings(StrictModel):
    """Names, keys and limits of one server."""

    model_names: tuple[str, ...] = Field(min_length=1)
    """What requests may call the model; answers carry the first."""
    api_keys: tuple[SecretStr, ...] = ()
    """Any of them opens the API; none = open to everyone."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Most tokens of a prompt and its answer; None = the model's context."""
    max_body_bytes: int = Field(default=8 << 20, ge=1)
    read_seconds: float = Field(default=30.0, gt=0)
    """How long a client may pause while it sends a body."""
    max_choices: int = Field(default=128, ge=1)
    """Prompts times `n` of one request."""
    request_seconds: float | None = Field(default=None, gt=0)
    """The longest a request may wait and run; None = as long as it takes."""
    write_seconds: float = Field(default=30.0, gt=0)
    """How long a reader may take nothing before its request is cancelled."""
    backlog_chunks: int = Field(default=1024, ge=1)
    """Chunks kept for a reader that is slower than the engine."""
    drain_seconds: float = Field(default=30.0, ge=0)
    """How long running requests may go on after SIGTERM."""
    allowed_origins: tuple[str, ...] = ()
    """Web pages elsewhere that may call the API (CORS); `*` = any."""
