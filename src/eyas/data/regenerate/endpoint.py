"""Answers from other engines: any OpenAI-compatible endpoint, or OpenAI Batch files."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Generator, Iterable, Sequence
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eyas.config import StrictModel
from eyas.data.regenerate.journal import Answer, Question, Reply, Take, unanswered
from eyas.errors import DataError, OutputError, UsageError
from eyas.files import StagedFiles
from eyas.text.chats import FunctionCall, Message, ToolCall
from eyas.types import SamplingParams

_DEFAULTS = SamplingParams()


class BadResponseError(Exception):
    """A response that is not a chat completion. Answerers handle it: they retry, or give up the chat."""


class CompletionSettings(StrictModel):
    """The model, sampling and other request fields that are the same for all questions."""

    model: str
    sampling: SamplingParams
    keep_reasoning: bool = True
    tool_choice: str | None = None
    """`auto`, `none` or `required`; sent with chats that have tools."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Fields merged into every request body, overriding others; null removes a field."""

    def body(self, question: Question) -> dict[str, Any]:
        """The JSON body of the request for a question."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [as_sent(message) for message in question.messages],
            **sampling_fields(self.sampling, question.seed(self.sampling.seed)),
        }
        if question.tools:
            body["tools"] = list(question.tools)
            if self.tool_choice is not None:
                body["tool_choice"] = self.tool_choice
        return {name: value for name, value in (body | self.extra_body).items() if value is not None}

    def answer(self, question: Question, body: Any) -> Answer:
        """The answer in a response body. Raises BadResponseError if it is not a chat completion, or is empty."""
        try:
            response = _Response.model_validate(body)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "body"
            raise BadResponseError(f"the response is not a chat completion: {where}: {first['msg']}") from error
        if not response.choices:
            raise BadResponseError("the response has no choices")
        choice = response.choices[0]
        said = choice.message
        if said.content is None and not said.tool_calls and said.refusal is None and said.thoughts is None:
            raise BadResponseError("the response's message is empty")
        calls = tuple(call.tool_call() for call in said.tool_calls or ()) or None
        content = said.refusal if said.content is None else said.content
        message = Message(
            role="assistant",
            content="" if content is None and calls is None else content,
            reasoning_content=said.thoughts if self.keep_reasoning else None,
            tool_calls=calls,
        )
        return Answer(
            id=question.id,
            turn=question.turn,
            asked=question.digest,
            message=message,
            finish_reason=choice.finish_reason or "stop",
            refused=said.refusal is not None,
            count=response.usage.completion_tokens if response.usage is not None else 0,
        )


class _ReadModel(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class _Function(_ReadModel):
    name: str
    arguments: str | dict[str, Any] = ""


class _Call(_ReadModel):
    id: str | None = None
    function: _Function

    def tool_call(self) -> ToolCall:
        arguments = self.function.arguments
        if isinstance(arguments, str):
            try:
                parsed = json.loads(arguments or "{}")
            except ValueError:
                parsed = None
            arguments = parsed if isinstance(parsed, dict) else arguments
        return ToolCall(id=self.id, function=FunctionCall(name=self.function.name, arguments=arguments))


class _ResponseMessage(_ReadModel):
    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None

    @property
    def thoughts(self) -> str | None:
        """The reasoning text, which servers send under different names; None if there is none."""
        return self.reasoning_content if self.reasoning_content is not None else self.reasoning


class _Choice(_ReadModel):
    message: _ResponseMessage
    finish_reason: str | None = None


class _Usage(_ReadModel):
    completion_tokens: int = 0


class _Response(_ReadModel):
    choices: list[_Choice]
    usage: _Usage | None = None


def as_sent(message: Message) -> dict[str, Any]:
    """A message in the API's form, in which arguments of tool calls are JSON text."""
    sent = message.for_template()
    for call in sent.get("tool_calls", ()):
        if not isinstance(call["function"]["arguments"], str):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    if message.role == "assistant":
        sent.setdefault("content", None)
    return sent


def sampling_fields(params: SamplingParams, seed: int) -> dict[str, Any]:
    """Sampling parameters in the API's form.

    Parameters that OpenAI's API doesn't have are sent under the names that vLLM and SGLang use, and only if they differ
    from the defaults.
    """
    fields: dict[str, Any] = {"max_tokens": params.max_tokens, "temperature": params.temperature, "seed": seed}
    defaults = _DEFAULTS.model_dump(mode="json")
    return fields | {
        name: v for name, v in params.model_dump(mode="json").items() if name not in fields and v != defaults[name]
    }


PATH = "/chat/completions"
RETRIED_STATUSES = frozenset({408, 409, 425, 429})
"""Client errors after which a request is retried, as after all server errors."""
FATAL_STATUSES = frozenset({401, 402, 403, 404, 405})
"""Client errors that would occur for every chat: the key, the model or the address is wrong."""


class RetryPolicy(StrictModel):
    """Exponential backoff with jitter: waits between half and all of `first * 2^(n-1)` seconds after failure n."""

    attempts: int = Field(default=6, ge=1)
    """Maximum number of requests, including the first."""
    first: float = Field(default=1.0, ge=0)
    """Maximum seconds to wait after the first failure."""
    longest: float = Field(default=60.0, ge=0)
    """Maximum seconds of any wait, unless the endpoint asks for more with Retry-After."""

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
    """Maximum number of concurrent requests."""
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
        self._completions = completions
        self._connection = connection
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
            loop.run_until_complete(asyncio.sleep(0))  # connections are closed in the next iteration of the loop
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
                if response.status_code < 500 and response.status_code not in RETRIED_STATUSES:
                    is_fatal = response.status_code in FATAL_STATUSES
                    return unanswered(question, reason, outage=is_fatal, rejected=not is_fatal)
                requested = retry_after(response.headers.get("Retry-After"))
            except BadResponseError as error:
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
        raise BadResponseError(f"the response is not JSON: {response.text[:80]!r}") from error


def _message(response: httpx.Response) -> str:
    """The error message in a response, on one line of at most 200 characters."""
    try:
        body = response.json()
    except ValueError:
        body = None
    error = body.get("error", body) if isinstance(body, dict) else None
    text = error.get("message") if isinstance(error, dict) else error
    return " ".join(str(text or response.text or response.reason_phrase).split())[:200]


REQUESTS, BYTES = 50_000, 200_000_000
"""OpenAI's limits for one batch file: requests and bytes."""
URL = "/v1/chat/completions"


def custom_id(question: Question) -> str:
    """The `custom_id` of a question's request: `chat#turn`."""
    return f"{question.id}#{question.turn}"


def batch_settings(completions: CompletionSettings) -> dict[str, Any]:
    """The settings on which the answers of a batch depend, for the journal."""
    return {"answered_by": "batch", **completions.model_dump(mode="json")}


class BatchFile(NamedTuple):
    """A file to upload and the number of requests in it."""

    path: Path
    requests: int


def write_batch(
    path: Path,
    questions: Iterable[Question],
    completions: CompletionSettings,
    most_requests: int = REQUESTS,
    most_bytes: int = BYTES,
) -> list[BatchFile]:
    """Write requests to `path` and, once it is full, to `NAME-2.jsonl`, `NAME-3.jsonl` and so on next to it.

    All files appear together when they are complete. Raises UsageError if one exists already, since it may have been
    uploaded; DataError for a request that exceeds the limit of a file; OutputError if writing fails.
    """
    written: list[BatchFile] = []
    size = 0  # bytes in the last file
    try:
        with StagedFiles() as staged:
            for question in questions:
                line = _request_line(question, completions)
                if len(line) > most_bytes:
                    raise DataError(
                        f"chat {question.id}: its request has {len(line)} bytes, more than a batch file's {most_bytes}"
                    )
                if not written or written[-1].requests == most_requests or size + len(line) > most_bytes:
                    written.append(BatchFile(_unused(path, len(written) + 1), 0))
                    file = staged.open(written[-1].path, "wb")
                    size = 0
                file.write(line)
                size += len(line)
                written[-1] = BatchFile(written[-1].path, written[-1].requests + 1)
    except OSError as error:
        raise OutputError(f"can't write {path}: {error.strerror}. No file was written") from error
    return written


class BatchAnswerer:
    """Answers questions from the result files and error files of a batch, given in any order.

    If a request has several results, the first successful one counts.
    """

    def __init__(self, paths: Sequence[Path], completions: CompletionSettings) -> None:
        """Index the files by `custom_id`; DataError if one can't be read."""
        self._completions = completions
        self._lines: dict[str, tuple[Path, int]] = {}  # custom_id -> file, byte offset
        self.unreadable = 0
        """The number of lines that are not results."""
        self._good: set[str] = set()
        for path in paths:
            self._index(path)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the requests; see `Answerer.settings`."""
        return batch_settings(self._completions)

    def answers(self, take: Take) -> Generator[Reply, None, None]:
        """Yield replies to the questions that have a result, in the order of the questions."""
        while questions := take(1):
            question = questions[0]
            line_start = self._lines.get(custom_id(question))
            if line_start is not None:
                yield self._reply(question, *line_start)

    def _index(self, path: Path) -> None:
        try:
            with path.open("rb") as lines:
                offset = 0
                for line in lines:
                    self._note(line, path, offset)
                    offset += len(line)
        except OSError as error:
            raise DataError(f"can't read the results {path}: {error.strerror}") from error

    def _note(self, line: bytes, path: Path, offset: int) -> None:
        if line.isspace():
            return
        try:
            result = json.loads(line)
            name = result["custom_id"]
            good = result.get("error") is None and result["response"]["status_code"] == 200
        except (ValueError, KeyError, TypeError, AttributeError):
            self.unreadable += 1
            return
        if name not in self._lines or (good and name not in self._good):
            self._lines[name] = (path, offset)
        if good:
            self._good.add(name)

    def _reply(self, question: Question, path: Path, offset: int) -> Reply:
        with path.open("rb") as lines:
            lines.seek(offset)
            result = json.loads(lines.readline())
        response = result.get("response") or {}
        if result.get("error") is not None or response.get("status_code") != 200:
            problem = result.get("error") or response.get("body") or response
            return unanswered(question, f"the batch says {json.dumps(problem, ensure_ascii=False)[:200]}")
        try:
            return Reply(self._completions.answer(question, response.get("body")))
        except BadResponseError as error:
            return unanswered(question, f"the batch's result: {error}")


def _unused(path: Path, number: int) -> Path:
    """The path of file `number`, counted from 1; UsageError if it exists."""
    numbered = path if number == 1 else path.with_stem(f"{path.stem}-{number}")
    if numbered.exists():
        raise UsageError(f"{numbered} exists and may have been uploaded: choose another name, or remove the file")
    return numbered


def _request_line(question: Question, completions: CompletionSettings) -> bytes:
    request = {"custom_id": custom_id(question), "method": "POST", "url": URL, "body": completions.body(question)}
    return (json.dumps(request, ensure_ascii=False) + "\n").encode()
