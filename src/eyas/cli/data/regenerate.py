"""`eyas data regenerate`: the target answers the chats itself."""

from __future__ import annotations

import json as jsonlib
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import typer
from typer import Option

from eyas.cli.common.aliases import option_name
from eyas.cli.common.build import check_engine, hide_progress_bars, sampling_params, walk_rule
from eyas.cli.common.cluster import ClusterOptions
from eyas.cli.common.display import counting, loading, next_step, note
from eyas.cli.common.display import output as screen
from eyas.cli.common.options import (
    DraftOptions,
    EngineArguments,
    EngineCommand,
    Json,
    SamplingOptions,
    TargetPanel,
    readable,
)
from eyas.cli.common.verb import FAILURE, note_if_interrupted
from eyas.cli.data.other_engine import other_engine
from eyas.cli.data.progress import RegenerateProgress
from eyas.errors import UsageError
from eyas.tables import show_table
from eyas.urls import deliver, mirror

if TYPE_CHECKING:
    from eyas.data.regenerate import (
        Answerer,
        CompletionSettings,
        Connection,
        RegenerationProgress,
        RegenerationSummary,
        RewriteRule,
    )
    from eyas.data.regenerate.workers import EngineAnswererMaker
    from eyas.work import MakeWorker


def regenerate(
    target: TargetPanel,
    draft: DraftOptions,
    slots: SlotOptions,
    endpoint: EndpointOptions,
    files: BatchFileOptions,
    request: RequestOptions,
    sampling: AnswerSamplingOptions,
    cluster: ClusterOptions,
    workers: WorkerEngineOptions,
    chats: Annotated[Path, Option(help="A chat folder, or a .jsonl file of chats; or its URL.")],
    output: Annotated[
        Path,
        Option("--output", "-o", help="Where answered chats go: a folder for a folder, a file for a file, or a URL."),
    ],
    turns: Annotated[
        Literal["last", "all"], Option(help="last: the turn a chat ends with. all: every turn in order.")
    ] = "last",
    unfinished: Annotated[
        Literal["keep", "drop"], Option(help="What to do with chats whose answer reached the length limit.")
    ] = "keep",
    json: Json = False,
) -> int:
    """Replace the answers of chats with the target's own.

    It answers in this process, on the machines of a cluster (--on ray), through --endpoint, or in batch files. If
    interrupted at any moment, the same command resumes there. With --endpoint and batch files, --model is the model's
    name in the requests.

    Examples:
        eyas data regenerate --model MODEL --chats CHATS --output ANSWERS
        eyas data regenerate --model NAME --chats CHATS --output ANSWERS --endpoint http://localhost:8000/v1
    """
    from eyas.data.regenerate import BatchAnswerer, RewriteRule
    from eyas.data.regenerate import regenerate as run

    answering = AnswererOptions(target, draft, slots, endpoint, files, request, sampling, workers)
    shared = cluster.check()
    answering.check(shared=shared)
    chats = readable(chats)
    local = mirror(output)
    if shared and answering.elsewhere:
        raise UsageError("--on shares the work of engines: leave it out, or --endpoint and batch files")
    rule = RewriteRule(turns, unfinished == "drop")
    if files.batch_write is not None:
        return _write(answering, files.batch_write, chats, local, rule, json)
    where = "the output" if local == output else str(local)
    kept = f"every answer so far is kept in the journal next to {where}"
    with ExitStack() as stack:
        answerer = _on_cluster(answering, cluster, stack) if shared else answering.answerer()
        progress = RegenerateProgress(stack.enter_context(counting()))
        with note_if_interrupted(kept):
            summary = run(chats, local, answerer, rule, progress.watch)
            deliver(output)
    if json:
        typer.echo(jsonlib.dumps(as_dict(summary, progress.tally), ensure_ascii=False))
    else:
        show(summary, progress.tally)
    report_errors(summary)
    if summary.unfinished:
        note(
            f"note: {_counted(summary.unfinished, 'answer')} cut off by the length limit: their chats are marked "
            "`cut_off`. Raise --max-length or --max-new-tokens, or leave them out with --unfinished drop"
        )
    if not (summary.unanswered or summary.unreadable or summary.unasked or answering.elsewhere):
        store = output.parent / "store"
        next_step("data", "capture", "--model", target.model, "--chats", output, "--output", store)
    if isinstance(answerer, BatchAnswerer) and answerer.unreadable:
        note(f"{answerer.unreadable} lines of the result files aren't results; they were skipped")
    return FAILURE if summary.unanswered or summary.unreadable or summary.unasked else 0


def _on_cluster(answering: AnswererOptions, cluster: ClusterOptions, stack: ExitStack) -> Answerer:
    """An answerer whose workers have their own engines or servers, until the stack is closed."""
    from eyas.data.regenerate.workers import CrewAnswerer

    machines = stack.enter_context(cluster.connected())
    crew = machines.crew(answering.worker(), workers=cluster.workers, ahead=answering.ahead)
    return CrewAnswerer(stack.enter_context(crew))


def _write(answering: AnswererOptions, path: Path, chats: Path, output: Path, rule: RewriteRule, json: bool) -> int:
    from eyas.data.regenerate import write_requests

    written = write_requests(chats, output, path, answering.completions(), rule)
    if json:
        typer.echo(jsonlib.dumps([{"path": str(part.path), "requests": part.requests} for part in written]))
        return 0
    for part in written:
        typer.echo(f"{part.requests} requests in {part.path}")
    typer.echo(
        "Upload them as batches, then read the results with --batch-read." if written else "Nothing is left to ask."
    )
    return 0


SHOWN_ERRORS = 5
"""Maximum number of errors of a kind to show."""
ROWS = {
    "chats": "chats written",
    "answers": "answers in them",
    "tokens": "tokens of the answers",
    "unfinished": "answers cut off by the length limit",
    "calls": "answers that call tools",
    "refusals": "answers marked as refusals",
    "cut": "chats that end early: other tool calls than the original's",
    "rerendered": "answers that a later turn's template rendered differently (no exact tokens)",
    "dropped": "chats left out: unfinished",
    "nothing_to_answer": "chats left out: nothing to answer",
    "unasked": "chats still to be asked",
}
"""Count of a summary -> its label in the table."""
ALWAYS_SHOWN = ("chats", "answers", "tokens")
"""Counts that are shown even if they are 0."""


def show(summary: RegenerationSummary, tally: RegenerationProgress | None) -> None:
    """Print a table of what was written."""
    from rich.table import Table

    table = Table(box=None, show_header=False)
    for name, text in ROWS.items():
        if getattr(summary, name) or name in ALWAYS_SHOWN:
            table.add_row(str(getattr(summary, name)), text)
    for name, value in _speed(tally).items():
        table.add_row(str(value), f"{name.replace('_', ' ')} in this run")
    show_table(screen(), table)


def report_errors(summary: RegenerationSummary) -> None:
    """Report chats without an answer and rows that aren't chats on standard error: how many, and the first few."""
    for reason in summary.unreadable[:SHOWN_ERRORS]:
        note(f"error: {reason}")
    for name, reason in summary.unanswered[:SHOWN_ERRORS]:
        note(f"error: chat {name}: {reason}")
    if summary.unreadable or summary.unanswered:
        note(
            f"{_counted(len(summary.unanswered), 'chat')} got no answer (the same command tries them again), "
            f"{_counted(len(summary.unreadable), 'row')} can't be used; the first of them are above"
        )


def _counted(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def as_dict(summary: RegenerationSummary, tally: RegenerationProgress | None) -> dict[str, Any]:
    """The JSON form of a summary and of this run's speed."""
    return {**summary.as_dict(), "this_run": _speed(tally)}


def _speed(tally: RegenerationProgress | None) -> dict[str, Any]:
    if tally is None:
        return {"answers": 0}
    speed: dict[str, Any] = {
        "answers": tally.answers,
        "tokens": tally.tokens,
        "tokens_per_second": round(tally.tokens_per_second, 1),
    }
    if tally.stats.drafted_depth:
        speed["accept_length"] = round(tally.stats.accept_length, 3)
    return speed


MAX_LENGTH = 2048
"""Maximum tokens of an answered chat if no option sets it."""


@dataclass(frozen=True)
class AnswerSamplingOptions(SamplingOptions):
    """How answers are sampled: they may use all the room there is, unless a limit is given."""

    max_new_tokens: Annotated[
        int | None, Option(min=1, help="Maximum tokens per answer (default: what --max-length or the endpoint allows).")
    ] = None  # type: ignore[assignment]  # only here may there be no limit


@dataclass(frozen=True)
class SlotOptions:
    """How many sequences the engine in this process decodes together, and how long they may get."""

    PANEL: ClassVar[str] = "Answering here"
    batch_size: Annotated[int, Option(min=1, help="Sequences decoded together.")] = 8
    max_length: Annotated[
        int | None,
        Option(min=2, help=f"Maximum tokens per chat, with answers (default: {MAX_LENGTH}, or --max-new-tokens)."),
    ] = None


@dataclass(frozen=True)
class EndpointOptions:
    """The endpoint that answers, and how requests are sent to it."""

    PANEL: ClassVar[str] = "Answers of a server"
    endpoint: Annotated[str | None, Option(help="An OpenAI-compatible server, e.g. http://localhost:8000/v1.")] = None
    api_key_env: Annotated[str | None, Option(help="The environment variable with the endpoint's key.")] = None
    concurrency: Annotated[int, Option(min=1, help="Concurrent requests.")] = 16
    timeout: Annotated[float, Option(min=0.001, help="Seconds that an answer may take.")] = 600.0
    max_attempts: Annotated[int, Option(min=1, help="Attempts per chat before giving up on it.")] = 6


@dataclass(frozen=True)
class BatchFileOptions:
    """OpenAI Batch files in place of an endpoint."""

    PANEL: ClassVar[str] = "Batch files"
    batch_write: Annotated[Path | None, Option(dir_okay=False, help="Write the requests to this file.")] = None
    batch_read: Annotated[
        list[Path], Option(exists=True, dir_okay=False, help="Read results from this file; may be repeated.")
    ] = field(default_factory=list)


@dataclass(frozen=True)
class RequestOptions:
    """The contents of requests to an endpoint or in a batch."""

    PANEL: ClassVar[str] = "Answers of a server"
    tool_choice: Annotated[Literal["auto", "none", "required"] | None, Option(help="For chats with tools.")] = None
    reasoning: Annotated[Literal["keep", "drop"], Option(help="What to do with the reasoning of answers.")] = "keep"
    extra_body: Annotated[str | None, Option(help="A JSON object added to every request; null removes a key.")] = None


@dataclass(frozen=True)
class WorkerEngineOptions:
    """Which engine the workers of a cluster answer with."""

    PANEL: ClassVar[str] = "Another engine"
    engine: Annotated[
        Literal["eyas", "vllm"], Option(help="With --on: vllm has each worker start its own vLLM server.")
    ] = "eyas"
    engine_command: EngineCommand = None
    engine_option: EngineArguments = field(default_factory=list)


@dataclass(frozen=True)
class AnswererOptions:
    """All options that say who answers, and the answerer that they describe."""

    target: TargetPanel
    draft: DraftOptions
    slots: SlotOptions
    endpoint: EndpointOptions
    files: BatchFileOptions
    request: RequestOptions
    sampling: AnswerSamplingOptions
    workers: WorkerEngineOptions = WorkerEngineOptions()

    def check(self, *, shared: bool = False) -> None:
        """Raise UsageError for options that contradict each other or would be ignored; `shared`: with --on."""
        if self.workers.engine != "eyas":
            if not shared:
                raise UsageError(
                    f"--engine {self.workers.engine} is for the workers of a cluster: give --on ray, or start the "
                    "server yourself and give --endpoint"
                )
            if self.elsewhere:
                raise UsageError("--engine starts servers on the workers: leave it out, or --endpoint and batch files")
            if self.endpoint.api_key_env is not None:
                raise UsageError("--api-key-env would be ignored: a worker's own server has no key")
            _refuse("servers on the workers", [self.target, self.draft, self.slots])
            return
        _refuse("eyas itself: --engine names another", [self.workers])
        ways = {
            "--endpoint": self.endpoint.endpoint is not None,
            "--batch-write": self.files.batch_write is not None,
            "--batch-read": bool(self.files.batch_read),
        }
        chosen = [name for name, given in ways.items() if given]
        if len(chosen) > 1:
            raise UsageError(f"{' and '.join(chosen)} are different ways to get answers: give one of them")
        way = chosen[0] if chosen else "the engine in this process"
        here = [self.target, self.draft, self.slots]
        if chosen:
            _refuse(way, [*here, *([] if way == "--endpoint" else [self.endpoint])])
        else:
            _refuse(f"{way} (no --endpoint and no batch file is given)", [self.endpoint, self.request])

    @property
    def elsewhere(self) -> bool:
        """Whether an endpoint or a batch answers, not an engine."""
        files = self.files
        return self.endpoint.endpoint is not None or files.batch_write is not None or bool(files.batch_read)

    def completions(self) -> CompletionSettings:
        """The settings of requests to an endpoint or of a batch."""
        from eyas.data.regenerate import CompletionSettings

        unlimited = {"max_tokens": None} if self.sampling.max_new_tokens is None else {}
        return CompletionSettings(
            model=self.target.model,
            sampling=sampling_params(self.sampling),
            keep_reasoning=self.request.reasoning == "keep",
            tool_choice=self.request.tool_choice,
            extra_body=unlimited | _extra(self.request.extra_body),
        )

    def answerer(self) -> Answerer:
        """The answerer; loads the model if it is the engine in this process."""
        if self.endpoint.endpoint is not None:
            return self._endpoint(self.endpoint.endpoint)
        if self.files.batch_read:
            from eyas.data.regenerate import BatchAnswerer

            return BatchAnswerer(self.files.batch_read, self.completions())
        maker = self._engine()
        with loading(self.target.model):
            hide_progress_bars()
            return maker.answerer()

    @property
    def ahead(self) -> int:
        """Questions queued at a worker: enough that a slot that becomes free finds the next one there."""
        together = self.slots.batch_size if self.workers.engine == "eyas" else self.endpoint.concurrency
        return together * 5 // 4 + 1

    def worker(self) -> MakeWorker:
        """A factory of cluster workers, each of which answers with its own engine, or its own engine's server."""
        options = self.workers
        if options.engine == "eyas":
            return self._engine()
        program = other_engine(options.engine, options.engine_command, options.engine_option)
        return program.answerer(self.target.model, self.completions(), self._connection())

    def _connection(self) -> Connection:
        from eyas.data.regenerate import Connection
        from eyas.data.regenerate.endpoint import RetryPolicy

        options = self.endpoint
        retry = RetryPolicy(attempts=options.max_attempts)
        return Connection(concurrency=options.concurrency, timeout=options.timeout, retry=retry)

    def _endpoint(self, url: str) -> Answerer:
        from eyas.data.regenerate import EndpointAnswerer

        options = self.endpoint
        key = None
        if options.api_key_env is not None:
            key = os.environ.get(options.api_key_env)
            if not key:
                raise UsageError(f"--api-key-env {options.api_key_env}: there is no such environment variable")
        return EndpointAnswerer(url, self.completions(), self._connection(), key)

    def _engine(self) -> EngineAnswererMaker:
        tree = check_engine(self.target, self.draft)
        rule = walk_rule(self.draft.acceptance)
        from eyas.data.regenerate.workers import EngineAnswererMaker

        max_length, limit = self.slots.max_length, self.sampling.max_new_tokens
        if max_length is None and limit is None:
            max_length = MAX_LENGTH
        params = sampling_params(replace(self.sampling, max_new_tokens=limit or max_length))
        target = self.target.of(self.target.model)
        drafter = self.draft.drafter
        options = self.draft.engine(tree, self.slots.batch_size, rule=rule)
        return EngineAnswererMaker(target, drafter, options, params, max_length)


def _refuse(way: str, groups: Sequence[Any]) -> None:
    given = [
        option_name(option.name)
        for group in groups
        for option in fields(group)
        if _default(option) is not MISSING and getattr(group, option.name) != _default(option)
    ]
    if given:
        raise UsageError(f"{', '.join(given)} would be ignored: the answers come from {way}")


def _default(option: Any) -> Any:
    return option.default_factory() if option.default_factory is not MISSING else option.default


def _extra(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        extra = jsonlib.loads(text)
    except ValueError as error:
        raise UsageError(f"--extra-body isn't valid JSON: {error}") from None
    if not isinstance(extra, dict):
        raise UsageError(
            '--extra-body must be a JSON object, e.g. \'{"chat_template_kwargs": {"enable_thinking": false}}\''
        )
    return extra
