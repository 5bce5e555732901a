"""`eyas data regenerate`: the target answers the chats itself."""

from __future__ import annotations

import json as jsonlib
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Option

from eyas.cli.common.cluster import ClusterOptions
from eyas.cli.common.display import ProgressLines, next_step, note
from eyas.cli.common.display import output as screen
from eyas.cli.common.options import DraftOptions, Json, TargetOptions, readable
from eyas.cli.common.verb import FAILURE, keeping
from eyas.cli.data.answerers import (
    AnswererOptions,
    AnswerSamplingOptions,
    BatchFileOptions,
    EndpointOptions,
    RequestOptions,
    SlotOptions,
    WorkerEngineOptions,
    engine_worker,
)
from eyas.errors import UsageError
from eyas.urls import deliver, mirror

if TYPE_CHECKING:
    from eyas.data.regenerate import Answerer, RegenerationProgress, RegenerationSummary, RewriteRule


def regenerate(
    target: TargetOptions,
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

    It answers in this process, on the machines of a cluster (--on ray), through --endpoint, or in batch files.
    Interrupted at any moment, the same command goes on where it was. With --endpoint and batch files --model is the
    name of the model to ask for.
    """
    from eyas.data.regenerate import BatchAnswerer, RewriteRule
    from eyas.data.regenerate import regenerate as run

    answering = AnswererOptions(target, draft, slots, endpoint, files, request, sampling, workers)
    shared = cluster.check()
    answering.check(shared=shared)
    chats, local = readable(chats), mirror(output)
    if shared and answering.elsewhere:
        raise UsageError("--on shares the work of engines: leave it out, or --endpoint and batch files")
    rule = RewriteRule(turns, unfinished == "drop")
    if files.batch_write is not None:
        return _write(answering, files.batch_write, chats, local, rule, json)
    where = "the output" if local == output else str(local)
    kept = f"every answer given so far is kept in the journal beside {where}"
    with ExitStack() as stack:
        answerer = _on_cluster(answering, cluster, stack) if shared else answering.answerer()
        progress = stack.enter_context(RegenerateProgress())
        with keeping(kept):
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
        note(f"{answerer.unreadable} lines of the result files are no results; they were passed over")
    return FAILURE if summary.unanswered or summary.unreadable or summary.unasked else 0


def _on_cluster(answering: AnswererOptions, cluster: ClusterOptions, stack: ExitStack) -> Answerer:
    """An answerer whose workers have engines, or servers, of their own, until the stack is closed."""
    from eyas.cluster.crew import Crew
    from eyas.data.regenerate.workers import CrewAnswerer

    executor, make = stack.enter_context(cluster.executor()), partial(engine_worker, answering)
    crew = Crew(executor, make, workers=cluster.workers, ahead=answering.ahead)
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


SHOWN = 5
"""Most errors of a kind that are shown."""
ROWS = {
    "chats": "chats written",
    "answers": "answers in them",
    "tokens": "tokens of the answers",
    "unfinished": "answers cut off by the length limit",
    "calls": "answers that call tools",
    "refusals": "answers marked as refusals",
    "cut": "chats that end early: other tool calls than the original's",
    "rerendered": "answers that a later turn's template rendered otherwise (no exact tokens)",
    "dropped": "chats left out: unfinished",
    "nothing_to_answer": "chats left out: nothing to answer",
    "unasked": "chats still to be asked",
}
"""Count of a summary -> what the table calls it."""
ALWAYS = ("chats", "answers", "tokens")
"""Counts that are shown even if they are 0."""


class RegenerateProgress:
    """The progress of a run on standard error: a bar on a terminal, else a line now and then."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        screen = sys.stderr.isatty()
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True, disable=not screen)
        self._task = self._bar.add_task("chats", total=None)
        self.tally: RegenerationProgress | None = None
        self._lines = ProgressLines("chats")

    def __enter__(self) -> RegenerateProgress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def watch(self, tally: RegenerationProgress) -> None:
        """Show a tally of the run; called as it proceeds."""
        self.tally = tally
        text = f", {tally.tokens_per_second:.0f} tokens/s"
        if tally.stats.drafted_depth:
            text += f", accept length {tally.stats.accept_length:.2f}"
        if tally.unanswered:
            text += f", {tally.unanswered} unanswered"
        self._bar.update(self._task, completed=tally.settled, total=tally.total, description=f"chats{text}")
        self._lines.show(tally.settled, tally.total, text)


def show(summary: RegenerationSummary, tally: RegenerationProgress | None) -> None:
    """Print a table of what was written."""
    from rich.table import Table

    table = Table(box=None, show_header=False)
    for name, text in ROWS.items():
        if getattr(summary, name) or name in ALWAYS:
            table.add_row(str(getattr(summary, name)), text)
    for name, value in _speed(tally).items():
        table.add_row(str(value), f"{name.replace('_', ' ')} in this run")
    screen().print(table)


def report_errors(summary: RegenerationSummary) -> None:
    """Report chats without an answer and rows that are no chats on standard error: how many, and the first few."""
    for reason in summary.unreadable[:SHOWN]:
        note(f"error: {reason}")
    for name, reason in summary.unanswered[:SHOWN]:
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
