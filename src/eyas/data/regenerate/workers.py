"""Answers from engines in this process, and from workers on many machines that have such engines.

Only the process that runs the crew keeps a journal; a question without an answer in it is asked again.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.data.regenerate.journal import Answer, Answerer, AnswerTokens, Question, Reply, Take, unanswered
from eyas.drafters.options import DrafterOptions
from eyas.engine import Engine
from eyas.errors import RequestError, UsageError
from eyas.options import EngineOptions, TargetOptions
from eyas.session import open_engine
from eyas.targets.fingerprint import fingerprint
from eyas.text.chats import Message
from eyas.text.template import encode_chat, encode_user_turn
from eyas.types import Completion, Request, SamplingParams
from eyas.work import Crew, Unit, UnitReport
from eyas.work import Take as TakeUnits


class EngineAnswerer:
    """Renders questions with the target's chat template; answers carry the exact token ids of prompt and answer."""

    def __init__(self, engine: Engine, params: SamplingParams, max_length: int | None = None) -> None:
        """`max_length`: maximum tokens of question and answer together; None: the target's context."""
        if not (engine.rule.lossless and engine.rule.seeded):
            raise UsageError("answers must be the target's own: regenerate with a lossless engine")
        if not getattr(engine.tokenizer, "chat_template", None):
            raise UsageError("the target's tokenizer has no chat template, so it can't answer chats")
        self._engine = engine
        self._params = params
        self._max_length = max_length

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of target and sampling; drafter, tree, batch size and device don't change the output."""
        target = self._engine.target
        template = str(getattr(self._engine.tokenizer, "chat_template", None))
        return {
            "answered_by": "engine",
            "target": fingerprint(target.model),
            "chat_template": hashlib.sha256(template.encode()).hexdigest()[:16],
            "dtype": str(target.dtype).removeprefix("torch."),
            "sampling": {k: v for k, v in self._params.model_dump(mode="json").items() if k != "bad_words_ids" or v},
            **({} if self._max_length is None else {"max_length": self._max_length}),
        }

    def answers(self, take: Take) -> Generator[Reply, None, None]:
        """Yield replies in order of completion."""
        running: dict[int, tuple[Question, tuple[int, ...]]] = {}
        refused: deque[Reply] = deque()
        submitted = 0

        def requests(room: int) -> list[Request]:
            nonlocal submitted
            found: list[Request] = []
            while len(found) < room and (questions := take(room - len(found))):
                for question in questions:
                    try:
                        request = self._request(question)
                    except RequestError as error:
                        refused.append(unanswered(question, str(error)))
                        continue
                    running[submitted] = (question, request.prompt)
                    submitted += 1
                    found.append(request)
            return found

        for chunk in self._engine.stream_from(requests):
            while refused:
                yield refused.popleft()
            if chunk.completion is not None:
                yield _reply(*running.pop(chunk.index), chunk.completion)
        yield from refused

    def _request(self, question: Question) -> Request:
        update: dict[str, Any] = {"seed": question.seed(self._params.seed)}
        if question.role == "user":
            prompt, end = encode_user_turn(self._engine.tokenizer, question.messages)
            update["stop_token_ids"] = (*self._params.stop_token_ids, end)
        else:
            prompt = encode_chat(self._engine.tokenizer, question.messages, question.tools)
        params = self._params.model_copy(update=update)
        if self._max_length is not None:
            room = self._max_length - len(prompt)
            if room < 1:
                raise RequestError(
                    f"the question has {len(prompt)} tokens, which leaves no room for an answer within "
                    f"{self._max_length}: raise `max_length=`, or prepare shorter chats"
                )
            params = params.model_copy(update={"max_tokens": min(room, params.max_tokens)})
        request = Request(prompt, params, question.id, chat=True)
        self._engine.check(request)
        return request


def _reply(question: Question, prompt: tuple[int, ...], completion: Completion) -> Reply:
    kept = _common_prefix(question.held, prompt)
    answer = Answer(
        id=question.id,
        turn=question.turn,
        asked=question.digest,
        message=Message(role=question.role, content=completion.text),
        finish_reason=completion.finish_reason,
        count=len(completion.token_ids),
        tokens=AnswerTokens(kept=kept, prompt=prompt[kept:], answer=tuple(completion.token_ids)),
    )
    return Reply(answer, completion.stats)


def _common_prefix(held: tuple[int, ...], prompt: tuple[int, ...]) -> int:
    kept = 0
    for old, new in zip(held, prompt, strict=False):
        if old != new:
            break
        kept += 1
    return kept


class AnswererWorker:
    """Answers questions with an answerer on its own machine."""

    def __init__(self, answerer: Answerer) -> None:
        self._answerer = answerer

    @property
    def identity(self) -> dict[str, Any]:
        """What the answers depend on: the answerer's settings."""
        return self._answerer.settings

    def work(self, take: TakeUnits) -> Iterator[UnitReport]:
        """Answer questions; each report carries a reply."""

        def questions(room: int) -> Sequence[Question]:
            return [unit.content for unit in take(room)]

        for reply in self._answerer.answers(questions):
            yield UnitReport((reply.entry.id, reply.entry.turn), reply)


@dataclass(frozen=True)
class EngineAnswererMaker:
    """Makes an answering engine, in this process or in a worker on another machine."""

    target: TargetOptions
    drafter: DrafterOptions | None
    options: EngineOptions
    params: SamplingParams
    max_length: int | None

    def answerer(self) -> EngineAnswerer:
        """Load the engine. Raises RequestError for sampling parameters that it can't run for any chat."""
        engine = open_engine(self.target, self.drafter, self.options)
        engine.check(Request((0,), self.params))
        return EngineAnswerer(engine, self.params, self.max_length)

    def __call__(self) -> AnswererWorker:
        """Load the engine in this process and wrap it in a worker."""
        return AnswererWorker(self.answerer())


class CrewAnswerer:
    """Has the workers of a crew answer; the answers don't depend on which worker gives them."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that all workers share; waits for the first worker."""
        return self._crew.identity()

    def answers(self, take: Take) -> Generator[Reply, None, None]:
        """Yield replies in order of completion."""

        def units(room: int) -> list[Unit]:
            return [Unit((question.id, question.turn), question) for question in take(room)]

        for report in self._crew.run(units):
            yield report.value
