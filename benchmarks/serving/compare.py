"""Shared by the scripts of this folder: start servers, measure them in turns, and write reports."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import date
from functools import partial
from pathlib import Path

from eyas.bench.machine import describe_machine
from eyas.bench.serving.client import Client, Item, Load
from eyas.bench.serving.report import ServeReport, lines_of, markdown_of
from eyas.bench.serving.run import ServePlan, measure_sides
from eyas.bench.serving.servers import IdleMeter, ServerProcess, Side
from eyas.files import write_json
from eyas.types import SamplingParams


def compare(
    servers: Mapping[str, ServerProcess],
    clients: Sequence[int],
    items: Sequence[Item],
    params: SamplingParams,
    plan: ServePlan,
    *,
    speculate: Mapping[str, bool] | None = None,
) -> ServeReport:
    """Start the servers one after another, because a controller measures the machine while it starts. Then load each
    with every number of clients. The first server is the baseline. `speculate`: server -> whether its requests ask for
    speculation; a server that isn't in it decides for itself.
    """
    began = time.monotonic()
    with ExitStack() as stack:
        started = {name: stack.enter_context(server) for name, server in servers.items()}
        sides = [Side(name, server.url, speculate=(speculate or {}).get(name)) for name, server in started.items()]
        idle = IdleMeter(started)
        loads = [Load("closed", count) for count in clients]
        connect = partial(Client, params=params, timeout=600.0)
        results = asyncio.run(measure_sides(sides, loads, items, connect, plan, around=idle))
    kept = {
        "date": str(date.today()),
        "commands": {name: server.command for name, server in servers.items()},
        "plan": vars(plan),
        "sampling": params.model_dump(mode="json"),
        "seconds": round(time.monotonic() - began, 1),
    }
    baseline = next(iter(servers))
    return ServeReport(baseline, lines_of(results, baseline), kept, describe_machine(), idle.shares())


class Findings(dict[str, ServeReport]):
    """Reports by name, printed and written as they are added, so that nothing is lost if a later one fails."""

    def __init__(self, output: Path | None) -> None:
        super().__init__()
        self._output = output

    def add(self, name: str, report: ServeReport) -> None:
        """Print the report's table and verdicts, and write the JSON of all reports so far."""
        self[name] = report
        print(f"\n### {name} ({report.settings['seconds']:.0f} s)\n\n{markdown_of(report)}\n")
        print("\n".join((*report.verdicts(), *report.errors())))
        print(f"idle servers' share of a core: {json.dumps(dict(report.idle))}", flush=True)
        if self._output is not None:
            write_json(self._output, {each: found.as_dict() for each, found in self.items()})
