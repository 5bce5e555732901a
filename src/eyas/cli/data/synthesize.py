"""`eyas data synthesize`: the target makes up chats, for users without traffic to train on."""

from __future__ import annotations

import json as jsonlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer
from typer import Option

from eyas.cli.common.build import open_engine, sampling_params
from eyas.cli.common.display import counting, next_step
from eyas.cli.common.display import output as screen
from eyas.cli.common.options import DraftOptions, Json, MaxNewTokens, SamplingOptions, TargetPanel
from eyas.cli.common.verb import note_if_interrupted
from eyas.cli.data.progress import RegenerateProgress
from eyas.errors import DataError, UsageError
from eyas.files import read_text
from eyas.tables import show_table

if TYPE_CHECKING:
    from eyas.data.synthesize import SynthesisSummary


@dataclass(frozen=True)
class SynthesisSamplingOptions(SamplingOptions):
    """How messages are sampled: greedy decoding would make up the same chat again and again."""

    max_new_tokens: MaxNewTokens = 512
    temperature: Annotated[float, Option(help="1 = as the target would.")] = 1.0


@dataclass(frozen=True)
class SynthesisFilterOptions:
    """Which of the generated chats are good enough to keep."""

    PANEL: ClassVar[str] = "Filters"
    min_words: Annotated[int, Option(min=1, help="Minimum words in the first message.")] = 4
    max_words: Annotated[int, Option(min=1, help="Maximum words in any user message.")] = 400
    language: Annotated[
        str, Option(help="Languages to keep: any, or ISO 639-1 codes such as en or en,de (which need py3langid).")
    ] = "any"
    near_duplicates: Annotated[
        str, Option(help="Similarity at which a question counts as a repeat (needs datasketch); off: only equal ones.")
    ] = "0.8"


def synthesize(
    target: TargetPanel,
    draft: DraftOptions,
    sampling: SynthesisSamplingOptions,
    filters: SynthesisFilterOptions,
    chats: Annotated[int, Option(min=1, help="Chats to write.")],
    output: Annotated[Path, Option("--output", "-o", dir_okay=False, help="The .jsonl file to write.")],
    turns: Annotated[int, Option(min=1, help="User messages per chat; the target answers all but the last.")] = 1,
    topics: Annotated[
        Path | None,
        Option(exists=True, dir_okay=False, help="A file with one topic per line; an empty file: no topics."),
    ] = None,
    batch_size: Annotated[int, Option(min=1, help="Sequences decoded together.")] = 8,
    json: Json = False,
) -> int:
    """Have the target make up chats as its users would write them.

    The target reads its chat template up to the user's turn and continues from there (Magpie). If interrupted at any
    moment, the same command resumes there and writes the same file. `eyas data regenerate` then answers the chats.

    Examples:
        eyas data synthesize --model MODEL --chats 5000 --output my_chats.jsonl
        eyas data synthesize --model FILE.gguf --chats 500 --topics topics.txt --output my_chats.jsonl
    """
    from eyas.data.synthesize import TOPICS, SynthesisRule
    from eyas.data.synthesize import synthesize as run

    rule = SynthesisRule(
        chats=chats,
        turns=turns,
        topics=TOPICS if topics is None else _topics(topics),
        seed=sampling.seed,
        min_words=filters.min_words,
        max_words=filters.max_words,
        languages=() if filters.language == "any" else tuple(filters.language.split(",")),
        near_duplicates=None if filters.near_duplicates == "off" else _share(filters.near_duplicates),
    )
    engine = open_engine(target, draft, batch_size)
    params = sampling_params(sampling)
    from eyas.data.regenerate.workers import EngineAnswerer
    from eyas.types import Request

    engine.check(Request((0,), params))  # an error in every message is an error in the options
    answerer = EngineAnswerer(engine, params)
    with counting() as shown, note_if_interrupted("every message so far is kept in the journal next to the output"):
        summary = run(output, answerer, rule, RegenerateProgress(shown).watch)
    if json:
        typer.echo(jsonlib.dumps(summary.as_dict(), ensure_ascii=False))
    else:
        _show(summary)
    answered = output.with_name(f"{output.stem}_answered.jsonl")
    next_step("data", "regenerate", "--model", target.model, "--chats", output, "--output", answered)
    return 0


def _topics(path: Path) -> tuple[str, ...]:
    try:
        return tuple(line.strip() for line in read_text(path).splitlines() if line.strip())
    except UnicodeDecodeError:
        raise DataError(f"{path} isn't UTF-8 text: write one topic per line") from None


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = 0.0
    if not 0.0 < share <= 1.0:
        raise UsageError(f"--near-duplicates {text}: give a similarity above 0 and at most 1, or off")
    return share


def _show(summary: SynthesisSummary) -> None:
    from rich.table import Table

    table = Table(box=None, show_header=False)
    table.add_row(str(summary.chats), "chats written")
    table.add_row(f"{summary.yield_rate:.0%}", f"of {summary.tried} that were tried")
    for reason, count in summary.dropped.most_common():
        table.add_row(str(count), f"left out: {reason}")
    show_table(screen(), table)
