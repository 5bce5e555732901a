"""`eyas demo`: the embedded pair writes the same text plain and speculative, side by side."""

from __future__ import annotations

import json as jsonlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from eyas.cli.common.build import check_tree
from eyas.cli.common.display import output, quietly_refreshing
from eyas.cli.common.options import Dtype, Json, MaxNewTokens
from eyas.cli.common.verb import FAILURE
from eyas.types import Completion, Request

if TYPE_CHECKING:
    from rich.console import Console

    from eyas.engine import Engine
    from eyas.types import SamplingParams


def demo(
    max_new_tokens: MaxNewTokens = 120,
    dtype: Annotated[Dtype, Option(help="auto is float32 here.")] = "float32",
    tree: Annotated[
        str, Option(help="The draft tree; auto: as large as pays on this machine, measured at first.")
    ] = "auto",
    frequency_penalty: Annotated[
        float, Option(help="Keeps so small a model from writing one phrase over and over; 0 leaves it as it is.")
    ] = 0.5,
    json: Json = False,
) -> int:
    """Watch a small language model write texts plain and speculative."""
    from eyas.assets import PROMPTS
    from eyas.text.chats import Message
    from eyas.text.template import encode_chat
    from eyas.types import Request, SamplingParams

    check_tree(tree)
    plain, speculative = _engines(dtype, tree)
    params = SamplingParams(max_tokens=max_new_tokens, frequency_penalty=frequency_penalty)
    screen = output()
    show = not json and screen.is_terminal
    if show:
        screen.print(LEGEND)
    results = []
    for number, (kind, text) in enumerate(PROMPTS):
        chat = [Message(role="user", content=text)]
        request = Request(tuple(encode_chat(plain.tokenizer, chat)), params, chat=True)
        lanes = [Lane("plain", plain), Lane("speculative", speculative)]
        if number == 0:
            race([replace(lane) for lane in lanes], request, lambda: None)  # warm-up, not shown and not counted
        if not json:
            screen.print(f"\n[{kind}] {text.strip()}")
        with quietly_refreshing(partial(_picture, lanes, screen), show) as refresh:
            race(lanes, request, refresh)
        completions = [lane.completion for lane in lanes if lane.completion is not None]
        results.append((kind, completions))
        if not json and not show:
            screen.print(completions[1].text)
    report = _report(results, plain, dtype, params)
    if json:
        typer.echo(jsonlib.dumps(report))
    else:
        _print(report)
    broken = dtype == "float32" and not report["rows"][-1]["identical_output"]
    return FAILURE if broken else 0


def _picture(lanes: list[Lane], screen: Console) -> Any:
    return side_by_side(lanes, screen.size)


def _engines(dtype: str, tree: str) -> tuple[Engine, Engine]:
    """The plain and the speculative engine: one model, but slots of their own, so that they can take turns."""
    from eyas.assets import DEMO_DRAFTER, DEMO_TARGET
    from eyas.cli.common.build import quiet
    from eyas.engine import Engine, load
    from eyas.targets import Target

    quiet()
    speculative = load(DEMO_TARGET, DEMO_DRAFTER, tree=tree, dtype=dtype)
    target = speculative.target
    plain = Engine(Target(target.model, native=target.native), speculative.tokenizer)
    return plain, speculative


def _report(results: list[Any], plain: Engine, dtype: str, params: SamplingParams) -> dict[str, Any]:
    """Figures by kind of text and over all; each engine's come from its own counter."""
    from eyas.bench.machine import describe_machine
    from eyas.types import Stats

    kinds = list(dict.fromkeys(kind for kind, _ in results))
    rows = []
    for kind in [*kinds, "all"]:
        base, fast = Stats(), Stats()
        same = True
        for name, (one, other) in results:
            if kind in (name, "all"):
                base.merge(one.stats)
                fast.merge(other.stats)
                same &= one.token_ids == other.token_ids
        speedup = fast.tokens_per_second / base.tokens_per_second
        rows.append(
            {
                "text": kind,
                "plain_tokens_per_second": round(base.tokens_per_second, 1),
                "speculative_tokens_per_second": round(fast.tokens_per_second, 1),
                "speedup": round(speedup, 3),
                "accept_length": round(fast.accept_length, 3),
                "efficiency": round(speedup / fast.accept_length, 3),
                "accepted_by_position": [round(rate, 3) for rate in fast.accepted_by_position],
                "identical_output": same,
            }
        )
    parameters = sum(p.numel() for p in plain.target.model.parameters())
    settings = {
        "dtype": dtype,
        "max_new_tokens": params.max_tokens,
        "frequency_penalty": params.frequency_penalty,
        "parameters": parameters,
    }
    return {"rows": rows, "settings": settings, "machine": describe_machine()}


def _print(report: dict[str, Any]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table("text", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title="The same model, the same text")
    for header in ("plain\ntokens/s", "EAGLE\ntokens/s", "speedup", "accept\nlength", "effi-\nciency"):
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
            " ".join(f"{100 * rate:.0f}" for rate in row["accepted_by_position"]),
            "yes" if row["identical_output"] else "DIFFERENT",
        )
    console = output()
    console.print(table)
    console.print(
        "accept length: tokens per pass of the model. efficiency: speedup / accept length. Prefill is not counted."
    )
    if penalty := report["settings"]["frequency_penalty"]:
        console.print(
            f"Answers are greedy with a frequency penalty of {penalty:g}: without it so small a model often loops, "
            "which is easy to draft and would flatter these figures."
        )
    console.print("identical output: every token of both runs was compared. See docs/metrics.md and docs/lossless.md.")
    if not report["rows"][-1]["identical_output"]:
        console.print(
            "In half precision a near-tie can swap two tokens; `eyas verify` shows the gap. Try --dtype float32."
        )


LEGEND = (
    "Underlined: drafted, and accepted because the model itself writes exactly that. The two take turns on this "
    "machine; each clock counts its own side only, reading the prompt included (the table below leaves that out)."
)
_WIDEST, _LINES = 72, 14
"""Most columns and lines of a panel."""


def side_by_side(lanes: Sequence[Lane], size: tuple[int, int]) -> Any:
    """All lanes as panels on a screen of `size` columns and rows, each showing the end of its text."""
    from rich.table import Table

    columns, rows = size
    width = min(_WIDEST, columns // len(lanes))
    lines = max(3, min(_LINES, rows - 4))
    grid = Table.grid()
    for _ in lanes:
        grid.add_column(width=width)
    grid.add_row(*(_panel(lane, width, lines) for lane in lanes))
    return grid


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
    """Must not share its target's slots with another lane's engine."""
    pieces: list[tuple[str, bool]] = field(default_factory=list)
    """(text, whether it is an accepted draft token), piece by piece."""
    tokens: int = 0
    seconds: float = 0.0
    """Wall time of this lane alone, prefill included."""
    completion: Completion | None = None


def race(lanes: Sequence[Lane], request: Request, moved: Callable[[], None]) -> None:
    """Run `request` in every lane to the end; `moved` is called after each round, on no lane's time.

    The lanes take turns, round by round, and each is charged its own time only. The lane whose clock is behind moves
    next, so that at any moment both show what they would have written in the same time, alone on the machine.
    """
    from eyas.text.detokenizer import Detokenizer

    streams = [lane.engine.stream([request]) for lane in lanes]
    texts = [Detokenizer(lane.engine.tokenizer) for lane in lanes]
    for lane in lanes:
        lane.pieces, lane.tokens, lane.seconds, lane.completion = [], 0, 0.0, None
    while any(lane.completion is None for lane in lanes):
        behind = min((i for i, lane in enumerate(lanes) if lane.completion is None), key=lambda i: lanes[i].seconds)
        lane, text = lanes[behind], texts[behind]
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
