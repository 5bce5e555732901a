"""A server with canned answers behind the real page: the text of a message selects the response."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import torch  # noqa: F401  # imported by the first /stats after a step, which must not wait for it
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from eyas.serve.errors import ApiError
from eyas.serve.playground.page import Gauges, playground
from eyas.types import EngineState

WORDS = ["The", " eagle", " sees", " its", " prey", " from", " afar", ",", " and", " dives", ".\n", "```", "py", "\nx"]
MARKDOWN = [
    "# Su", "ms\n\n", "Add **", "both", "** [num", "bers](https://example.org/a_b)", ":\n\n| a | b |\n|---|--:|\n",
    "| 1 | 2 |\n\n", "```python\ndef add", "(a, b):\n    return", " a + b  # <sum>\n",
    "```\n\n1. one\n2. ", "two &amp; *three*\n",
]  # fmt: skip
HOSTILE = ["<img src=x", " onerror=\"document.body.id='taken'\">", "<script>", "document.body.id='taken'", "</script>"]


class FakeServer:
    """A fake server that records its requests and whether a client disconnected."""

    def __init__(self, key: str = "", pause: float = 0.0, model: str = "fake-model") -> None:
        self.key = key
        self.pause = pause
        self.model = model
        self.written: list[str] = []
        """The answer to "write"."""
        self.drafts = True
        self.loading = False
        self.bodies: list[dict[str, Any]] = []
        self.left = threading.Event()
        self.polls = 0
        self.url = ""
        self.app = FastAPI()
        self.gauges = Gauges()
        self.app.include_router(playground(self.gauges, self._count, with_keys=bool(key)))
        self.app.get("/v1/models")(self.models)
        self.app.post("/v1/chat/completions")(self.chat)

    def _count(self) -> bool:
        self.polls += 1
        if self.loading:
            raise ApiError(503, "the model is being loaded")
        return True

    async def models(self, request: Request) -> Response:
        return self.refused(request) or JSONResponse({"object": "list", "data": [{"id": self.model}]})

    def refused(self, request: Request) -> Response | None:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return _error(401, "no or wrong API key")
        return None

    async def chat(self, request: Request) -> Response:
        refused = self.refused(request)
        if refused is not None:
            return refused
        body = json.loads(await request.body())
        self.bodies.append(body)
        said = body["messages"][-1]["content"]
        if said == "too long":
            return _error(400, "the prompt has 3000 tokens, the model's context holds 2048: shorten the prompt")
        if said == "busy":
            return _error(429, "the queue is full", {"Retry-After": "7"})
        return StreamingResponse(self.stream(body, said), media_type="text/event-stream")

    async def stream(self, body: dict[str, Any], said: str) -> AsyncIterator[str]:
        canned = {"hostile": HOSTILE, "endless": WORDS * 1000, "markdown": MARKDOWN, "write": self.written}
        if body.get("continue_final_message"):
            canned = {said: [" And", " so", " on", "."]}
        words = canned.get(said, WORDS)[: body.get("max_tokens")]
        cut = len(words) < len(canned.get(said, WORDS))
        rounds = 3 if body["eyas"]["speculate"] and self.drafts else 0
        done = passes = accepted = 0
        try:
            while done < len(words):
                taken = words[done : done + rounds + 1]
                end = done + len(taken) == len(words)
                yield _event(
                    _choice(
                        taken,
                        len(taken) - 1,
                        rounds > 0,
                        ("length" if cut or said == "full" else "stop") if end else None,
                    )
                )
                done += len(taken)
                passes += 1
                accepted += len(taken) - 1
                if said == "lost" and done > 4:
                    return
                if said == "broken" and done > 4:
                    yield _event({}, error={"message": "the engine stopped", "type": "server_error", "code": 500})
                    return
                await asyncio.sleep(0.05 if said == "endless" else self.pause * (1 + 3 * (rounds == 0)))
            if body["stream_options"]["include_usage"]:
                # as the engine counts: the last draft was accepted beyond the answer's end
                told = {"target_passes": passes, "accept_length": 1 + (accepted + bool(rounds)) / max(passes, 1)}
                yield _event({}, usage={"completion_tokens": len(words), "eyas": told})
            yield "data: [DONE]\n\n"
        finally:
            if done < len(words):
                self.left.set()


def engine_state(**changes: Any) -> EngineState:
    """The state of an idle engine, apart from `changes`."""
    counts = dict.fromkeys(EngineState.__dataclass_fields__, 0) | {"cache_limit": None, "finished_total": {}}
    return EngineState(**(counts | changes))


def _choice(taken: list[str], accepted: int, drafted: bool, finish: str | None) -> dict[str, Any]:
    told: dict[str, Any] = {
        "accepted": accepted,
        "token_ids": [WORDS.index(word) if word in WORDS else 99 for word in taken],
        "pieces": taken,
    }
    if drafted:
        # each accepted token has a sibling, which has a child
        pieces = list[str]()
        parents = list[int]()
        logprob = list[float]()
        path = list[int]()
        last, total = -1, 0.0
        for place, word in enumerate([*taken[:accepted], " or"]):
            at = len(pieces)
            pieces += [word, " but", " then"]
            parents += [last, last, at + 1]
            logprob += [total + math.log(0.8), total + math.log(0.15), total + math.log(0.1)]
            if place < accepted:
                path.append(at)
            last = at
            total += math.log(0.8)
        ids = list(range(200, 200 + len(pieces)))
        told["draft"] = {"tokens": ids, "parents": parents, "logprob": logprob, "path": path, "pieces": pieces}
    return {"index": 0, "delta": {"content": "".join(taken)}, "finish_reason": finish, "eyas": told}


def _event(choice: dict[str, Any], **more: Any) -> str:
    return f"data: {json.dumps({'choices': [choice] if choice else [], **more})}\n\n"


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": error}, status, headers)


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """Run an app in a thread on a free port during the block, which gets its address."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="off", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(10)


if __name__ == "__main__":  # to look at the page
    with serving(FakeServer(pause=0.05).app) as url:
        print(url, flush=True)
        threading.Event().wait()
