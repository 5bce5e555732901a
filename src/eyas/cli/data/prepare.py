"""`eyas data prepare`: from sources to a chat folder."""

from __future__ import annotations

import json as jsonlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from eyas.cli.common.aliases import TARGET_HELP, in_options
from eyas.cli.common.display import counting, next_step, note, output
from eyas.cli.common.options import Json
from eyas.cli.common.verb import note_if_interrupted
from eyas.errors import UsageError
from eyas.hub import find_target
from eyas.tables import show_table

if TYPE_CHECKING:
    from rich.table import Table


def prepare(
    sources: Annotated[
        list[str],
        Argument(
            metavar="SOURCE",
            help="A JSON Lines, JSON or Parquet file, a folder of them, `stdlib` (Python's own library) or the name of "
            "a data set, each with options after commas: weight=2 (its share of the chats), split=train (of a folder "
            "or data set), subset=..., layout=openai|sharegpt|alpaca, name=... (hf:NAME is always a data set).",
        ),
    ],
    output_: Annotated[Path, Option("--output", "-o", help="The chat folder to create.")],
    model: Annotated[
        str | None, Option(help=f"The target, whose chat template renders the chats: {TARGET_HELP}.")
    ] = None,
    samples: Annotated[int | None, Option(min=1, help="Number of chats (default: all that the shares allow).")] = None,
    seed: Annotated[int, Option(help="Decides which chats are drawn, and their order.")] = 0,
    held_out_share: Annotated[
        float | None, Option(min=0, max=0.99, help="Validation's share of questions (default: 2%, more for few chats).")
    ] = None,
    exclude: Annotated[
        list[Path] | None, Option(help="A prompt file of an evaluation: chats that ask its questions are dropped.")
    ] = None,
    drop_unanswered: Annotated[
        bool, Option("--drop-unanswered", help="Drop chats that end with a question (default: keep, to be answered).")
    ] = False,
    max_length: Annotated[int | None, Option(min=2, help="Maximum tokens per chat.")] = None,
    too_long: Annotated[
        Literal["drop", "cut"], Option(help="Longer chats: drop them, or cut them after an answer.")
    ] = "drop",
    min_answer_tokens: Annotated[int, Option(min=0, help="Drop chats with fewer answer tokens.")] = 0,
    near_duplicates: Annotated[
        str,
        Option(
            help="Drop chats whose question shares at least this much of its word 5-grams (Jaccard, 0.1 to 1) with "
            "another chat's or an excluded question; off; auto: 0.8 if datasketch is installed (eyas[data])."
        ),
    ] = "auto",
    json: Json = False,
) -> None:
    """Blend, deduplicate and split chats from files and data sets.

    With --model they are rendered by its chat template. A report says what was read, dropped and written.

    Chats are copies if everything before the last answer is equal, apart from case, whitespace and Unicode form.
    Near-duplicates are compared in the same form, by all that the user says before the last answer; the one that the
    blend takes first stays. Chats that begin with the same question land on the same side of the split.

    Examples:
        eyas data prepare my_chats.jsonl --model MODEL --output CHATS
        eyas data prepare my_chats.jsonl,weight=2 stdlib --model FILE.gguf --samples 10000 --output CHATS
    """
    from eyas.config import validated
    from eyas.data.chats.config import PrepareConfig
    from eyas.data.chats.sources import parse_source

    config = validated(
        PrepareConfig,
        {
            "sources": [parse_source(text) for text in sources],
            "output": output_,
            "model": model,
            "samples": samples,
            "seed": seed,
            "held_out_share": held_out_share,
            "exclude": exclude or [],
            "drop_unanswered": drop_unanswered,
            "max_length": max_length,
            "too_long": too_long,
            "min_answer_tokens": min_answer_tokens,
            "near_duplicates": _threshold(near_duplicates),
        },
        "the command line",
    )
    if model is not None:
        find_target(model)
    from eyas.data.chats.prepare import prepare as make

    with (
        note_if_interrupted("nothing is written before all chats are gathered, so they are read again"),
        counting() as progress,
    ):
        report = make(config, progress)
    if json:
        typer.echo(jsonlib.dumps(report, ensure_ascii=False))
    else:
        _show(report, output_)
    if model is not None:
        target = ["--model", model, "--chats", output_]
        next_step("data", "regenerate", *target, "--output", output_.parent / "answers")


def _threshold(text: str) -> str | float | None:
    """The setting that `--near-duplicates` names. Raises UsageError."""
    if text in ("auto", "off"):
        return "auto" if text == "auto" else None
    try:
        similarity = float(text)
    except ValueError:
        similarity = 0.0
    if not 0.1 <= similarity <= 1:
        raise UsageError(f"--near-duplicates {text}: write auto, off, or a similarity from 0.1 to 1")
    return similarity


def _show(report: dict[str, Any], folder: Path) -> None:
    screen = output()
    for line in report["notes"]:  # first, where the result differs from the request
        screen.print(in_options(f"note: {line}"))
    show_table(screen, _sources_table(report))
    show_table(screen, _splits_table(report))
    for source in report["sources"]:
        for reason, dropped in source["dropped"].items():
            screen.print(f"dropped, {source['name']}: {dropped['count']} x {reason}")
            for example in dropped["first"]:
                screen.print(f"    {example}")
    note(f"{folder} is complete")


def _sources_table(report: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table("source", title="what was read")
    for name in ("rows", "dropped", "not needed", "cut", "chats", "share"):
        table.add_column(name, justify="right")
    for source in report["sources"]:
        dropped = sum(reason["count"] for reason in source["dropped"].values())
        wanted = "" if source["share_asked"] is None else f" (asked {source['share_asked']:.0%})"
        numbers = (source["rows"], dropped, source["not_needed"], source["cut"], source["chats"])
        table.add_row(source["name"], *map(str, numbers), f"{source['share']:.0%}{wanted}")
    return table


def _splits_table(report: dict[str, Any]) -> Table:
    from rich.table import Table

    rendered = report["settings"]["model"] is not None
    table = Table("split", title="what was written")
    for name in ("chats", "turns", "answers", "unanswered", "tokens" if rendered else "characters"):
        table.add_column(name, justify="right")
    table.add_column("length 5% 50% 95% 100%", justify="right")
    if rendered:
        for name in ("answer tokens", "share", "distinct"):
            table.add_column(name, justify="right")
    for name, split in report["splits"].items():
        lengths = [split["length"]["quantiles"].get(key, 0) for key in ("0.05", "0.5", "0.95", "1")]
        cells = [str(split[key]) for key in ("chats", "turns", "answers", "unanswered")]
        cells += [str(split["length"]["total"]), " ".join(map(str, lengths))]
        if rendered:
            cells += [str(split.get("answer_tokens", 0)), f"{split.get('answer_share', 0):.0%}"]
            cells.append(str(split.get("distinct_answer_tokens", 0)))
        table.add_row(name, *cells)
    return table
