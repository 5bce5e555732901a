"""An engine without a model: it generates a given text, a few tokens per step, and records its requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from torch import nn

from eyas.errors import QueueFullError, RequestError
from eyas.types import Chunk, Completion, EngineState, PromptLogprobs, Request, Stats, TokenLogprobs

from ..pairs import tokenizer

_MODEL = nn.Linear(1000, 1000)
"""What is shown as the size of a fake engine's model."""


def ids(text: str) -> list[int]:
    """A text's tokens."""
    found: list[int] = tokenizer()(text, add_special_tokens=False)["input_ids"]
    return found


@dataclass
class _Sequence:
    request: Request
    left: list[int]
    taken: list[int] = field(default_factory=list)


class FakeEngine:
    """A fake with the interface of `Engine`: `submit`, `cancel`, `step` and so on."""

    def __init__(
        self,
        text: str | Sequence[int] = "Natalia sold 48/2 clips in May.",
        *,
        stride: int = 2,
        most: int = 64,
        context: int | None = 256,
        chars: Any = None,
        pause: float = 0.0,
    ) -> None:
        self.tokenizer = chars or tokenizer()
        self.target = SimpleNamespace(
            max_length=context,
            vocab_size=len(self.tokenizer),
            device="cpu",
            config=SimpleNamespace(model_type="llama"),
            model=_MODEL,
            precision={"dtype": "float32", "weights": "float32"},
        )
        self.controller = self.outcome = None
        self.text = ids(text) if isinstance(text, str) else list(text)
        self.stride = stride
        self.most = most
        self.pause = pause
        self.requests: list[Request] = []
        self.keys: list[str] = []
        self.deadlines: list[float | None] = []
        self.cancelled: list[int] = []
        self.go = threading.Event()
        """Steps wait for this event: clear it to pause the engine."""
        self.go.set()
        self.step_error: Exception | None = None
        self.ending: str = "length"
        self.lossy = False
        self.error = "it broke"
        """The error of sequences that finish with `error`."""
        self._sequences: dict[int, _Sequence] = {}
        self._outbox: list[Chunk] = []
        self._begun: set[int] = set()

    def check(self, request: Request) -> None:
        if any(token >= self.target.vocab_size for token in request.prompt):
            raise RequestError("the prompt has a token outside the vocabulary")

    def submit(self, request: Request, *, deadline: float | None = None, queue_key: str = "") -> int:
        self.check(request)
        if len(self._sequences) >= self.most:
            raise QueueFullError("too many requests wait", 7.4)
        index = len(self.requests)
        self.requests.append(request)
        self.keys.append(queue_key)
        self.deadlines.append(deadline)
        self._sequences[index] = _Sequence(request, list(self.text[: request.params.max_tokens]))
        return index

    def cancel(self, index: int) -> None:
        if index in self._sequences:
            self.cancelled.append(index)
            self._outbox.append(self._end(index, (), "cancelled"))

    def step(self) -> list[Chunk]:
        assert self.go.wait(30)
        time.sleep(self.pause)
        if self.step_error is not None:
            raise self.step_error
        chunks = self._outbox
        self._outbox = []
        for index, sequence in list(self._sequences.items()):
            tokens = tuple(sequence.left[: self.stride])
            sequence.left = sequence.left[self.stride :]
            sequence.taken += tokens
            chunks.append(self._chunk(index, tokens) if sequence.left else self._end(index, tokens, self.ending))
        return chunks

    @property
    def idle(self) -> bool:
        return not self._sequences and not self._outbox

    def state(self) -> EngineState:
        return EngineState(len(self._sequences), 0, 0, 0, 0, None, 0, 0, 0, 0, 0, 0, 0, {})

    def _end(self, index: int, tokens: tuple[int, ...], reason: str) -> Chunk:
        sequence = self._sequences.pop(index)
        stats = Stats(tokens=len(sequence.taken))
        stats.record(max(0, self.stride - 1), self.stride, 9)
        stats.steps.append((self.stride, max(0, self.stride - 1)))
        error = self.error if reason == "error" else None
        done = Completion(sequence.request.id, sequence.taken, "", reason, stats, lossy=self.lossy, error=error)
        return self._chunk(index, tokens, done, sequence.request)

    def _chunk(
        self, index: int, tokens: tuple[int, ...], done: Completion | None = None, request: Request | None = None
    ) -> Chunk:
        request = request or self._sequences[index].request
        count = request.params.logprobs
        scores = None
        if count is not None:
            scores = tuple(TokenLogprobs(t, -0.5, tuple((t + i, -0.5 - i) for i in range(count))) for t in tokens)
        first = index not in self._begun
        self._begun.add(index)
        alternatives = request.params.prompt_logprobs
        prompt = None
        if first and alternatives is not None:
            tops = [tuple((t + i, -0.25 - i) for i in range(alternatives)) for t in request.prompt[1:]]
            prompt = tuple(PromptLogprobs(t, -0.25, top, 1) for t, top in zip(request.prompt[1:], tops, strict=True))
        return Chunk(index, tokens, max(0, len(tokens) - 1), done, None, scores, prompt)
