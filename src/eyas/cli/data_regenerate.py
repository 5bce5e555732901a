"""`eyas data regenerate`: the target answers the chats itself."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from eyas.cli.answerers import BatchFileOptions, EndpointOptions, RequestOptions, SlotOptions, Ways, one_of
from eyas.cli.display import note
from eyas.cli.guard import FAILURE
from eyas.cli.options import DraftOptions, Json, SamplingOptions, TargetOptions
from eyas.cli.regeneration import Progress, as_dict, complain, show

if TYPE_CHECKING:
    from eyas.data.regenerate import Rule


def regenerate(
    target: TargetOptions,
    draft: DraftOptions,
    slots: SlotOptions,
    endpoint: EndpointOptions,
    files: BatchFileOptions,
    request: RequestOptions,
    sampling: SamplingOptions,
    chats: Annotated[Path, Option(exists=True, help="A chat folder, or a .jsonl file of chats.")],
    output: Annotated[
        Path, Option("--output", "-o", help="Where the answered chats go: a folder for a folder, a file for a file.")
    ],
    turns: Annotated[str, Option(help="last: the turn a chat ends with. all: every turn in order.")] = "last",
    unfinished: Annotated[
        str, Option(help="keep or drop chats with an answer that reached the length limit.")
    ] = "keep",
    json: Json = False,
) -> int:
    """Answer chats anew: in this process, through --endpoint, or with batch files.

    Interrupted at any moment, the same command goes on where it was. With --endpoint and batch files --model is the
    name of the model to ask for.
    """
    from eyas.data.regenerate import BatchAnswerer, Rule
    from eyas.data.regenerate import regenerate as run

    ways = Ways(target, draft, slots, endpoint, files, request, sampling)
    ways.check()
    drop = one_of("--unfinished", unfinished, "keep", "drop") == "drop"
    rule = Rule("all" if one_of("--turns", turns, "last", "all") == "all" else "last", drop)
    if files.batch_write is not None:
        return _write(ways, files.batch_write, chats, output, rule, json)
    answerer = ways.answerer()
    with Progress() as progress:
        summary = run(chats, output, answerer, rule, progress.watch)
    if json:
        typer.echo(jsonlib.dumps(as_dict(summary, progress.tally), ensure_ascii=False))
    else:
        show(summary, progress.tally)
    complain(summary)
    if isinstance(answerer, BatchAnswerer) and answerer.unreadable:
        note(f"{answerer.unreadable} lines of the result files are no results; they were passed over")
    return FAILURE if summary.unanswered or summary.unreadable or summary.unasked else 0


def _write(ways: Ways, path: Path, chats: Path, output: Path, rule: Rule, json: bool) -> int:
    from eyas.data.regenerate import write_requests

    written = write_requests(chats, output, path, ways.completions(), rule)
    if json:
        typer.echo(jsonlib.dumps([{"path": str(part.path), "requests": part.requests} for part in written]))
        return 0
    for part in written:
        typer.echo(f"{part.requests} requests in {part.path}")
    typer.echo(
        "Upload them as batches, then read the results with --batch-read." if written else "Nothing is left to ask."
    )
    return 0
