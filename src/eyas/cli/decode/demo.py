"""`eyas demo`: a model answers the same questions plain and speculative, side by side."""

from __future__ import annotations

import json as jsonlib
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from typer import Option

from eyas.assets import SMOLLM2
from eyas.cli.common.aliases import DRAFTER_HELP, TARGET_HELP, ModelArgument
from eyas.cli.common.build import check_tree
from eyas.cli.common.display import note, output, quietly_refreshing
from eyas.cli.common.options import Json, MaxNewTokens, MaybePromptFile, RuntimeOptions
from eyas.cli.common.verb import FAILURE
from eyas.drafters.options import DrafterOptions
from eyas.errors import DataError, OutputError, RequestError, UsageError
from eyas.files import write_text
from eyas.options import EngineOptions
from eyas.tables import by_position, show_table
from eyas.types import Completion, Request, Stats

if TYPE_CHECKING:
    from eyas.engine import Engine
    from eyas.text.prompts import PromptRow

TINY = (
    "This model has 135 million parameters: it is tiny, and its answers below are often wrong. Speculation changes "
    "how fast they come, not what they say. With a model of your own: eyas demo MODEL"
)
CHANGE = "Add a one-line comment above every function of this file."
SHOWN_CHARACTERS = 400
"""Characters of a prompt that are shown."""

_TURN = 0.1
"""Seconds for which a lane of a race moves alone: its first round finds the caches full of another's weights."""


@dataclass(frozen=True)
class DemoTarget(RuntimeOptions):
    """The target, by default the small model that comes with eyas."""

    ALIASES: ClassVar[type] = ModelArgument
    model: Annotated[str, Option("--model", "--model-path", help=f"Your own model: {TARGET_HELP} (the default).")] = (
        SMOLLM2
    )


def demo(
    target: DemoTarget,
    max_new_tokens: MaxNewTokens = 128,
    draft_model: Annotated[
        str | None,
        Option(help=f"A drafter for your model: {DRAFTER_HELP} (default: smollm2's own; for other models none)."),
    ] = None,
    tree: Annotated[
        str | None,
        Option(
            help="The draft tree; auto (the default, without --methods): as large as pays off on this machine, "
            "measured first."
        ),
    ] = None,
    methods: Annotated[
        bool, Option("--methods", help="Race all drafting methods that the pair can run, each with its own trees.")
    ] = False,
    prompt_file: MaybePromptFile = None,
    edit: Annotated[
        Path | None,
        Option(
            exists=True, dir_okay=False, help="A text file for the model to rewrite with one change: copies pay most."
        ),
    ] = None,
    change: Annotated[str, Option(help="With --edit: the change.")] = CHANGE,
    svg: Annotated[
        Path | None, Option(dir_okay=False, help="Also draw the first texts and the table into this SVG file.")
    ] = None,
    json: Json = False,
) -> int:
    """Watch a model answer with and without speculation.

    Without MODEL, the small model that comes with eyas answers. With your own model and no drafter, suffix decoding
    copies from prompt and answer. Your own prompts come from --prompt-file, a file to edit from --edit.

    Examples:
        eyas demo
        eyas demo --methods
        eyas demo FILE.gguf --edit my_code.py
    """
    from eyas.text.dialogue import Dialogue
    from eyas.text.prompts import question_of
    from eyas.types import SamplingParams

    check_tree(tree)
    if change != CHANGE and edit is None:
        raise UsageError("--change says what to change in a file: give --edit FILE")
    if draft_model is not None:
        DrafterOptions(draft_model).check()
    target.of(target.model).check()
    asked = _asked(prompt_file, edit, change)
    engines = _engines(target, draft_model, tree, methods)
    plain = engines["plain"]
    params = SamplingParams(max_tokens=max_new_tokens)
    screen = output()
    show = not json and screen.is_terminal
    if show:
        screen.print(LEGEND)
    if target.model == SMOLLM2 and not json:
        screen.print(TINY)
    results, raced = [], []
    for number, (kind, row) in enumerate(asked):
        text = question_of(row, plain.tokenizer)
        dialogue = Dialogue(row)
        request = dialogue.next_request(plain, params)
        if request is None:
            raise RequestError(str(dialogue.error))
        lanes = [Lane(name, engine) for name, engine in engines.items()]
        if number == 0:
            race([replace(lane) for lane in lanes], request, lambda: None)  # warm-up, not shown and not counted
        if not json:
            screen.print(f"\n[{kind}] {_shortened(text.strip())}")
        with quietly_refreshing(partial(_picture, lanes, screen), show) as refresh:
            race(lanes, request, refresh)
        completions = [lane.completion for lane in lanes if lane.completion is not None]
        results.append((kind, completions))
        raced.append((text, lanes))
        if not json and not show:
            screen.print(completions[1].text)
    report = _report(results, list(engines), plain.target.precision | {"max_new_tokens": max_new_tokens}, methods)
    table = _methods_table(report) if methods else _table(report)
    if json:
        typer.echo(jsonlib.dumps(report))
    else:
        show_table(screen, table)
        _explain(report)
    if svg is not None:
        _draw(svg, raced, table)
    _warn(report)
    exact = plain.target.native is not None or report["settings"]["dtype"] == "float32"
    broken = exact and not all(row["identical_output"] for row in report["rows"])
    return FAILURE if broken else 0


def _asked(prompt_file: Path | None, edit: Path | None, change: str) -> list[tuple[str, PromptRow]]:
    """What the model is asked, as (kind, row): the user's own prompts and file, else the demo's questions.

    Raises DataError for a row that can't be read.
    """
    from eyas.assets import PROMPTS
    from eyas.text.prompts import BadRow, PromptRow, read_prompts

    found: list[tuple[str, PromptRow]] = []
    for row in [] if prompt_file is None else read_prompts(prompt_file):
        if isinstance(row, BadRow):
            raise DataError(row.error)
        found.append((row.category or "own prompts", row))
    if edit is not None:
        try:
            text = edit.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"can't read {edit} as text: {error}") from error
        words = f"{change} Write the whole file again, with no other change.\n\n{edit.name}:\n```\n{text.strip()}\n```"
        found.append(("edit", PromptRow("edit", str(edit), words)))
    return found or [(kind, PromptRow(kind, "the demo", text)) for kind, text in PROMPTS]


def _shortened(text: str) -> str:
    """A long prompt by its beginning and its length."""
    if len(text) <= SHOWN_CHARACTERS:
        return text
    return f"{text[:SHOWN_CHARACTERS].rstrip()} ... ({len(text):,} characters)"


def _engines(target: DemoTarget, draft_model: str | None, tree: str | None, methods: bool) -> dict[str, Engine]:
    """The plain engine, and on the same model the drafter with suffix decoding, or every method that it can run.

    Without a drafter, suffix decoding alone. The tree is `auto` unless one is given; each of the methods has its own.
    """
    from eyas.bench.offline.methods import MethodOpener, all_choices, with_trees, without_drafter
    from eyas.cli.common.build import hide_progress_bars, open_session
    from eyas.drafters.loading import local_directory
    from eyas.drafters.small_lm.drafter import holds_language_model
    from eyas.session import Session

    hide_progress_bars()
    shipped = target.model == SMOLLM2
    source = SMOLLM2 if draft_model is None and shipped else draft_model
    loading = target.of(target.model)
    session = Session.open(loading) if shipped else open_session(loading)
    plain = {"plain": session.engine()}
    if not methods:
        options = DrafterOptions(method="suffix") if source is None else DrafterOptions(source, "+suffix")
        if source is not None and holds_language_model(local_directory(source)):
            options = DrafterOptions(source)  # a small language model drafts alone
        return plain | {"speculative": session.engine(session.drafter(options), EngineOptions(tree or "auto"))}
    drafters = {} if source is None else {"eagle3" if shipped and source == SMOLLM2 else Path(source).name: source}
    choices = with_trees(all_choices(drafters), {} if tree is None else {None: tree})
    racing, failed = MethodOpener(session).open(choices)
    for name, reason in failed:
        note(f"not in this race: {name}: {reason}")
    if missing := without_drafter(racing):
        note(f"not in this race, because there is no drafter for them: {', '.join(missing)}")
    return plain | {one.choice.name: one.engine for one in racing}


def _pooled(results: list[Any], kind: str, lane: int) -> tuple[Stats, bool]:
    """A lane's own counts for a kind of text (or `all`), and whether its tokens equal the first lane's."""
    pooled = Stats()
    same = True
    for name, completions in results:
        if kind in (name, "all"):
            pooled.merge(completions[lane].stats)
            same &= completions[lane].token_ids == completions[0].token_ids
    return pooled, same


def _figures(base: Stats, fast: Stats, same: bool) -> dict[str, Any]:
    speedup = fast.tokens_per_second / base.tokens_per_second
    return {
        "speedup": round(speedup, 3),
        "accept_length": round(fast.accept_length, 3),
        "efficiency": round(speedup / fast.accept_length, 3),
        "accepted_by_position": [round(rate, 3) for rate in fast.accepted_by_position],
        "identical_output": same,
    }


def _report(results: list[Any], names: list[str], settings: dict[str, Any], methods: bool) -> dict[str, Any]:
    """Figures of every lane by kind of text and over all; without `methods`, of all but the first, the plain one.

    Each engine's figures come from its own counter.
    """
    from eyas.bench.machine import describe_machine

    rows = []
    for lane, name in enumerate(names):
        for kind in [*dict.fromkeys(kind for kind, _ in results), "all"]:
            (base, _), (fast, same) = _pooled(results, kind, 0), _pooled(results, kind, lane)
            if methods:
                speed = {
                    "tokens_per_second": round(fast.tokens_per_second, 1),
                    "draft_share": round(fast.draft_share, 3),
                }
                rows.append({"method": name, "text": kind, **speed, **_figures(base, fast, same)})
            elif lane:
                speeds = {
                    f"{who}_tokens_per_second": round(stats.tokens_per_second, 1)
                    for who, stats in zip(names, (base, fast), strict=True)
                }
                rows.append({"text": kind, **speeds, **_figures(base, fast, same)})
    return {"rows": rows, "settings": settings, "machine": describe_machine()}


def _draw(path: Path, raced: Sequence[tuple[str, Sequence[Lane]]], table: Any) -> None:
    """Write the end of a race's first texts, and its table, as an SVG. Raises OutputError."""
    from rich.console import Console

    console = Console(record=True, width=DRAWN[0], file=StringIO(), force_terminal=True, color_system="truecolor")
    for text, lanes in raced[:2]:
        console.print(f"\n> {text.strip()}", markup=False, highlight=False)
        console.print(side_by_side(lanes, DRAWN))
    show_table(console, table)
    drawn = re.sub(r"@font-face {.*?}\s*", "", console.export_svg(title="eyas demo"), flags=re.DOTALL)
    try:
        write_text(path, drawn)  # without the fonts that it would fetch from the network
    except OSError as error:
        raise OutputError(f"can't write {path}: {error.strerror}") from error


def _title(report: dict[str, Any]) -> str:
    return f"The same model ({report['settings']['weights']}), the same text"


def _methods_table(report: dict[str, Any]) -> Any:
    """One row per method: its speedup by kind of text, and its overall figures."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    kinds = list(dict.fromkeys(row["text"] for row in report["rows"]))
    table = Table("method", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title=_title(report))
    for header in ("tokens/s", *(f"speedup,\n{kind}" for kind in kinds), "accept\nlength", "effi-\nciency", "drafting"):
        table.add_column(header, justify="right")
    table.add_column("identical\noutput")
    for name in dict.fromkeys(row["method"] for row in report["rows"]):
        mine = [row for row in report["rows"] if row["method"] == name]
        over_all = mine[-1]
        table.add_row(
            name,
            f"{over_all['tokens_per_second']:.0f}",
            *(f"{row['speedup']:.2f}x" for row in mine),
            f"{over_all['accept_length']:.2f}",
            f"{over_all['efficiency']:.2f}",
            f"{over_all['draft_share']:.0%}",
            "yes" if over_all["identical_output"] else "DIFFERENT",
        )
    return table


def _table(report: dict[str, Any]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table("text", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title=_title(report))
    for header in ("plain\ntokens/s", "speculative\ntokens/s", "speedup", "accept\nlength", "effi-\nciency"):
        table.add_column(header, justify="right")
    for header in ("accepted by\nposition, %", "identical\noutput"):
        table.add_column(header)
    for row in report["rows"]:
        table.add_row(
            row["text"],
            f"{row['plain_tokens_per_second']:.0f}",
            f"{row['speculative_tokens_per_second']:.0f}",
            f"{row['speedup']:.2f}x",
            f"{row['accept_length']:.2f}",
            f"{row['efficiency']:.2f}",
            by_position([100 * rate for rate in row["accepted_by_position"]], "{:.0f}"),
            "yes" if row["identical_output"] else "DIFFERENT",
        )
    return table


def _explain(report: dict[str, Any]) -> None:
    """Explain what the figures of a report mean."""
    console = output()
    console.print(
        "accept length: tokens per pass of the model. efficiency: speedup / accept length. Prefill is not counted."
    )
    runs = "all" if "method" in report["rows"][0] else "both"
    console.print(
        f"identical output: every token of {runs} runs was compared. See docs/metrics.md and docs/lossless.md."
    )
    if not all(row["identical_output"] for row in report["rows"]):
        console.print(
            "In half precision a near-tie can swap two tokens; `eyas verify` shows the gap. Try --dtype float32."
        )


def _warn(report: dict[str, Any]) -> None:
    """Warn about figures that can't be trusted."""
    from eyas.bench.offline.candidates import impossible
    from eyas.runtime import busy

    for row in report["rows"]:
        name = f"{row['method']} on {row['text']}" if "method" in row else row["text"]
        if (wrong := impossible(name, row["speedup"], row["accept_length"])) is not None:
            note(f"warning: {wrong}")
    if (warning := busy(report["machine"])) is not None:
        note(f"warning: {warning}")


LEGEND = (
    "Underlined: drafted, and accepted because the model itself writes exactly that. All take turns on this "
    "machine; each clock counts its own side only, prefill included (the table below leaves that out)."
)
DRAWN = (100, 24)
"""Columns and lines of the SVG file."""
_WIDEST, _LINES = 72, 14
"""Maximum number of columns and lines of a panel."""
_NARROWEST = 36
"""Minimum number of columns of a panel before lanes beyond the second go into another row."""


def side_by_side(lanes: Sequence[Lane], size: tuple[int, int]) -> Any:
    """All lanes as panels on a screen of `size` columns and lines, each showing the end of its text."""
    from rich.table import Table

    columns, rows = size
    across = min(len(lanes), max(2, columns // _NARROWEST))
    bands = [lanes[start : start + across] for start in range(0, len(lanes), across)]
    width = min(_WIDEST, columns // across)
    lines = max(3, min(_LINES, (rows - 2) // len(bands) - 2))
    grid = Table.grid()
    for _ in range(across):
        grid.add_column(width=width)
    for band in bands:
        grid.add_row(*(_panel(lane, width, lines) for lane in band))
    return grid


def _picture(lanes: Sequence[Lane], screen: Any) -> Any:
    return side_by_side(lanes, screen.size)


def _panel(lane: Lane, width: int, lines: int) -> Any:
    from rich.panel import Panel

    parts = [f"{lane.tokens} tokens", f"{lane.seconds:.2f} s"]
    if lane.seconds:
        parts.append(f"{lane.tokens / lane.seconds:.0f} tokens/s")
    title = f"{lane.name}: done" if lane.completion is not None else lane.name
    return Panel(_end_of(lane, width - 4, lines), title=title, subtitle=", ".join(parts), width=width, height=lines + 2)


def _end_of(lane: Lane, width: int, lines: int) -> Any:
    """The last `lines` lines of the text, wrapped to `width`."""
    from rich.console import Console
    from rich.text import Text

    text = Text(tab_size=4)
    for piece, accepted in lane.pieces:
        text.append(piece, style="green underline" if accepted else "")
    wrapped = text.wrap(Console(width=width), width)
    return Text("\n").join(wrapped[-lines:])


@dataclass
class Lane:
    """One of the engines that write the same text, with what it has written so far."""

    name: str
    engine: Engine
    pieces: list[tuple[str, bool]] = field(default_factory=list)
    """(text, whether it is an accepted draft token), piece by piece."""
    tokens: int = 0
    seconds: float = 0.0
    """Wall time of this lane alone, prefill included."""
    completion: Completion | None = None


def race(lanes: Sequence[Lane], request: Request, moved: Callable[[], None]) -> None:
    """Run `request` in every lane to the end; `moved` is called after each round, on no lane's time.

    The lanes take turns, and each is charged its own time only. The lane whose clock is behind moves next, for `_TURN`
    seconds, so that all always show what they would have written in about the same time, alone on the machine.
    """
    from eyas.text.detokenizer import Detokenizer

    streams = [lane.engine.stream([request]) for lane in lanes]
    texts = [Detokenizer(lane.engine.tokenizer) for lane in lanes]
    for lane in lanes:
        lane.pieces = []
        lane.tokens = 0
        lane.seconds = 0.0
        lane.completion = None
    while any(lane.completion is None for lane in lanes):
        behind = min((i for i, lane in enumerate(lanes) if lane.completion is None), key=lambda i: lanes[i].seconds)
        lane, text = lanes[behind], texts[behind]
        turn = lane.seconds + _TURN
        while lane.completion is None and lane.seconds < turn:
            began = time.perf_counter()
            chunk = next(streams[behind])
            lane.seconds += time.perf_counter() - began
            lane.tokens += len(chunk.token_ids)
            for index, token in enumerate(chunk.token_ids):
                lane.pieces.append((text.push(token), index < chunk.accepted))
            if chunk.completion is not None:
                lane.pieces.append((text.finish(), False))
                lane.completion = chunk.completion
            moved()
