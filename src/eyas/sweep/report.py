"""What a sweep found: ranked table and JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from eyas.bench.choice import Choice
from eyas.sweep.sweep import Outcome, Sweep
from eyas.sweep.trial import short, shown


def report_dict(sweep: Sweep, choice: Choice | None, machine: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON object; trials in order of rank, then the failed ones."""
    return {
        "config": sweep.config.model_dump(mode="json"),
        "machine": dict(machine),
        "choice": None if choice is None else {"pick": choice.best.name, "reason": choice.reason},
        "trials": [_row(outcome) for outcome in (*sweep.ranked, *sweep.failed)],
    }


def _row(outcome: Outcome) -> dict[str, Any]:
    trial, timed = outcome.trial, outcome.timed
    return {
        "trial": trial.name,
        "values": trial.values,
        "accept_length": None if outcome.failure else round(outcome.accept_length, 4),
        "tasks": {name: round(length, 4) for name, length in outcome.accept_lengths.items()},
        "tokens_per_second": None if timed is None else round(timed.mean("tokens_per_second"), 2),
        "speedup": None if timed is None else round(timed.mean("speedup"), 4),
        "seconds": trial.seconds,
        "drafter": None if outcome.failure else str(trial.drafter),
        "failure": outcome.failure,
    }


def table_of(sweep: Sweep) -> Table:
    """Best first; failed trials at the end."""
    knobs = list(sweep.config.knobs)
    table = Table("", "trial", *map(short, knobs), title=f"Sweep over {sweep.config.recipe}")
    for header in ("accept length", "tokens/s", "speedup", "trained s"):
        table.add_column(header, justify="right")
    for place, outcome in enumerate(sweep.ranked, start=1):
        timed = outcome.timed
        table.add_row(
            str(place),
            outcome.trial.name,
            *(shown(outcome.trial.values[knob]) for knob in knobs),
            f"{outcome.accept_length:.3f}",
            "" if timed is None else f"{timed.mean('tokens_per_second'):.1f}",
            "" if timed is None else f"{timed.mean('speedup'):.2f}x",
            "" if outcome.trial.seconds is None else f"{outcome.trial.seconds:.0f}",
        )
    for outcome in sweep.failed:
        table.add_row("", outcome.trial.name, *(shown(outcome.trial.values[knob]) for knob in knobs), "failed")
    return table
