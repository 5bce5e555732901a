"""A drafter that learns from the traffic it serves."""

from __future__ import annotations

import json as jsonlib
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from eyas.cli.common.display import note, output
from eyas.cli.common.options import Device, Json
from eyas.errors import UsageError
from eyas.tables import show_table

if TYPE_CHECKING:
    from eyas.labs.learn.cycle import CycleConfig
    from eyas.labs.learn.folder import LearnFolder, LearnState

Folder = Annotated[Path, Argument(metavar="DIR", file_okay=False, help="The folder of `eyas serve --learn DIR`.")]


def run(
    folder: Folder,
    store: Annotated[
        Path | None, Option(exists=True, file_okay=False, help="The drafter's original store: its rows are mixed in.")
    ] = None,
    once: Annotated[bool, Option("--once", help="Run one cycle now, in this process, and end.")] = False,
    always: Annotated[
        bool, Option("--always", help="Train while the server works, too, at the lowest priority.")
    ] = False,
    threads: Annotated[int | None, Option(min=1, help="Cores to train on (default: those that are idle).")] = None,
    least_rows: Annotated[int, Option(min=1, help="New requests needed to begin a cycle.")] = 200,
    most_rows: Annotated[int, Option(min=1, help="Maximum requests per cycle, the newest ones.")] = 2000,
    epochs: Annotated[float, Option(min=0.01, help="Passes over the requests.")] = 2.0,
    confidence: Annotated[float, Option(min=0.5, max=0.9999, help="Confidence needed to promote a drafter.")] = 0.99,
    tolerance: Annotated[float, Option(min=0.0, max=1.0, help="Loss of accept length tolerated elsewhere.")] = 0.02,
    device: Device = None,
) -> int:
    """Train the drafter on the requests it serves (experimental).

    Each cycle copies the newest requests, continues training from the drafter in service, and compares the two on
    held-out requests. A winner is promoted: the server starts using it. Training pauses while the server works, and a
    cycle that was killed resumes where it was.

    Examples:
        eyas learn run DIR
        eyas learn run DIR --once --threads 2
    """
    opened = _opened(folder)
    from eyas.labs.learn.cycle import CycleConfig, due, run_cycle
    from eyas.labs.learn.gate import GateConfig
    from eyas.labs.learn.supervise import supervise

    config = CycleConfig(
        store, least_rows, most_rows, epochs, threads, device, GateConfig(confidence=confidence, tolerance=tolerance)
    )
    if once:
        made = run_cycle(opened, config, note)
        output().print("nothing was promoted" if made is None else f"generation {made} was promoted")
        return 0
    supervise(opened, _cycle_command(folder, config), partial(due, opened, config), yields=not always)
    return 0


def _cycle_command(folder: Path, config: CycleConfig) -> list[str]:
    """The command of a child process that runs one cycle."""
    options: dict[str, Any] = {
        "store": config.store, "threads": config.threads, "least-rows": config.min_rows, "most-rows": config.max_rows,
        "epochs": config.epochs, "confidence": config.gate.confidence, "tolerance": config.gate.tolerance,
        "device": config.device,
    }  # fmt: skip
    given = [f"--{name}={value}" for name, value in options.items() if value is not None]
    return [sys.executable, "-m", "eyas", "learn", "run", str(folder), "--once", *given]


def status(folder: Folder, json: Json = False) -> int:
    """Show the generations, which one serves, and what happened last.

    Examples:
        eyas learn status DIR
        eyas learn status DIR --json
    """
    opened = _opened(folder)
    if json:
        typer.echo(jsonlib.dumps(opened.overview()))
        return 0
    state = opened.state
    events = opened.events()
    cards = {number: opened.card(number) for number in opened.numbers()}
    sizes = [path.stat().st_size for path in opened.traffic.glob("*.safetensors")]
    from rich.table import Table

    table = Table(
        "generation", "from", "made", "requests", "stored rows", "steps", "recent", "before", "state", box=None
    )
    for number, card in cards.items():
        gate = card.gate
        table.add_row(
            str(number),
            "" if card.parent is None else str(card.parent),
            _when(card.made),
            str(card.traffic_rows),
            str(card.store_rows),
            str(card.steps),
            _figure(gate, "recent_candidate"),
            _figure(gate, "recent_incumbent"),
            _standing(number, state),
        )
    show_table(output(), table)
    pinned = "; pinned" if state.pinned else ""
    output().print(f"{len(sizes)} shards of traffic, {sum(sizes) / 2**20:,.1f} MiB{pinned}")
    for event in events[-10:]:
        rest = ", ".join(f"{name} {value}" for name, value in event.items() if name not in ("time", "event"))
        output().print(f"{_when(event['time'])} {event['event']}: {rest}", markup=False, highlight=False)
    return 0


def _standing(number: int, state: LearnState) -> str:
    if number in state.refused and number != state.settled:
        return "reverted"
    return "serves" if number == state.settled else "on trial" if number == state.wanted else ""


def _when(seconds: float) -> str:
    return time.strftime("%m-%d %H:%M:%S", time.localtime(seconds))


def _figure(figures: dict[str, float], name: str) -> str:
    return f"{figures[name]:.3f}" if name in figures else ""


def promote(
    folder: Folder, generation: Annotated[int | None, Argument(metavar="N", help="Default: the newest.")] = None
) -> int:
    """Have the server try a generation again.

    That may be one that was refused before; it is reverted if it does worse.

    Examples:
        eyas learn promote DIR
        eyas learn promote DIR 3
    """
    opened = _opened(folder)
    number = _known(opened, max(opened.numbers()) if generation is None else generation)
    opened.change(
        lambda state: state.model_copy(update={"wanted": number}), "promoted", generation=number, reason="by hand"
    )
    output().print(f"the server will try generation {number} within a second")
    return 0


def revert(
    folder: Folder, generation: Annotated[int | None, Argument(metavar="N", help="Default: the one before.")] = None
) -> int:
    """Have the server go back to an earlier generation immediately.

    Examples:
        eyas learn revert DIR
        eyas learn revert DIR 2
    """
    opened = _opened(folder)
    state = opened.state
    before = state.settled if state.wanted != state.settled else opened.card(state.settled).parent or 0
    number = _known(opened, before if generation is None else generation)
    opened.change(
        lambda state: state.model_copy(update={"wanted": number, "settled": number}),
        "reverted",
        generation=state.wanted,
        to=number,
        reason="by hand",
    )
    output().print(f"the server will serve generation {number} within a second")
    return 0


def pin(folder: Folder, off: Annotated[bool, Option("--off", help="Let the learner promote again.")] = False) -> int:
    """Keep the generation in service.

    The learner keeps training, but promotes nothing.

    Examples:
        eyas learn pin DIR
        eyas learn pin DIR --off
    """
    opened = _opened(folder)
    opened.change(lambda state: state.model_copy(update={"pinned": not off}), "unpinned" if off else "pinned")
    output().print("the learner promotes again" if off else "the learner promotes nothing until `eyas learn pin --off`")
    return 0


def _opened(path: Path) -> LearnFolder:
    """Open the folder; UsageError if no server has made it, before anything heavy is imported."""
    if not (path / "learn.json").is_file():
        raise UsageError(f"{path} isn't a folder of `eyas serve --learn`: start the server with it first")
    from eyas.labs.learn.folder import LearnFolder

    return LearnFolder(path)


def _known(folder: LearnFolder, number: int) -> int:
    """The number; UsageError if there is no such generation."""
    if number not in folder.numbers():
        raise UsageError(f"there is no generation {number}: {', '.join(map(str, folder.numbers()))} are kept")
    return number


VERBS = {"run": run, "status": status, "promote": promote, "revert": revert, "pin": pin}
