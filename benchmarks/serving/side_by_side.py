"""What people would use instead: eyas, llama.cpp and OpenVINO on the same file and prompts, in turns, answers compared.

    python -m benchmarks.serving.side_by_side FILE.gguf --prompts EVAL/humaneval.jsonl EVAL/edits.jsonl
        EVAL/mt_bench.jsonl --llama LLAMA_SERVER [--openvino PYTHON] [--small SMALL.gguf] [--drafter DRAFTER]
        [--sides SIDE ...] [--clients 1 4] [--count 4] [--tokens 256] [--output FILE.json] [--json]

A side is a server of its own:

  plain                      eyas without a drafter
  suffix                     eyas with suffix decoding
  small, small+suffix        eyas with the language model SMALL.gguf as drafter, and with copies too
  drafter, drafter+suffix    eyas with DRAFTER
  llama                      llama.cpp without speculation
  llama+small                llama.cpp with SMALL.gguf as draft model
  llama+ngram-mod, ...       llama.cpp with this kind of speculation
  openvino                   OpenVINO GenAI, in the environment of PYTHON (`inside/openvino_server.py`)
  openvino+lookup            the same with prompt lookup; it reads no GGUF file as draft model

A side of eyas may end with a tree instead of `auto`: `suffix@chain:8`. In a turn, every side greedily answers the same
prompts, as many at once as there are clients; no server sees a prompt twice. Columns:

  first s     median time to an answer's first token, the reading of its prompt
  decode      median tokens per second of an answer after that
  all         tokens per second of all answers together, prompts included
  over plain  how much faster than plain in the same turn, by `all`: median of the turns
  accept      tokens per target pass
  GB          memory of the server and what it started: the most after any turn, mapped files included
  J           energy per token of the whole processor, if the machine counts it
  equal       answers that are those of plain; for eyas all must be, or the exit code is 1

With --output, each turn is kept at once, and the same command goes on where it was stopped.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from json import dumps, loads
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from rich.console import Console

from benchmarks.harness import Output, described, script, table
from eyas.bench.offline.runner import rotated
from eyas.bench.serving.client import Client, Item, Load, LoadRun, read_items
from eyas.bench.serving.servers import IdleMeter, ServerProcess, Side
from eyas.errors import UsageError
from eyas.files import write_json
from eyas.types import SamplingParams

LLAMA_KINDS = ("ngram-simple", "ngram-map-k", "ngram-mod")
OPENVINO = Path(__file__).parent / "inside" / "openvino_server.py"
CONTEXT = 8192
"""Tokens of a slot."""


class Models(NamedTuple):
    """The files and programs of a run."""

    file: Path
    small: Path | None
    drafter: str | None
    llama: Path | None
    openvino: Path | None = None

    def sides(self) -> list[str]:
        """All sides that these make possible."""
        lookups = ("", "+suffix")
        return [
            *("plain", "suffix"),
            *(f"small{lookup}" for lookup in lookups if self.small is not None),
            *(f"drafter{lookup}" for lookup in lookups if self.drafter is not None),
            *(("llama",) if self.llama is not None else ()),
            *(("llama+small",) if self.llama is not None and self.small is not None else ()),
            *(f"llama+{kind}" for kind in LLAMA_KINDS if self.llama is not None),
            *(("openvino", "openvino+lookup") if self.openvino is not None else ()),
        ]

    def command(self, side: str, slots: int) -> list[str]:
        """What serves a side, for up to `slots` requests at once, but for its port. UsageError if it lacks a file."""
        name, _, tree = side.partition("@")
        kind, _, lookup = name.partition("+")
        if kind == "llama":
            return self._llama(side, lookup, slots)
        if kind == "openvino":
            if self.openvino is None:
                raise UsageError(f"--sides {side} needs --openvino")
            return [str(self.openvino), str(OPENVINO), str(self.file), *(["--lookup"] if lookup else [])]
        drafting: list[str] = []
        if kind in ("small", "drafter"):
            source = self.small if kind == "small" else self.drafter
            if source is None:
                raise UsageError(f"--sides {side} needs --{kind}")
            drafting = ["--draft-model", str(source), *(["--method", f"+{lookup}"] if lookup else [])]
        elif kind != "plain":
            drafting = ["--method", name]
        common = ["--served-model-name", "m", "--max-running", str(slots), "--max-model-len", str(CONTEXT)]
        shape = ["--tree", tree or "auto"] if drafting else []
        program = [sys.executable, "-m", "eyas", "serve"]
        return [*program, str(self.file), *common, "--prefix-tokens", "0", *drafting, *shape]

    def _llama(self, side: str, kind: str, slots: int) -> list[str]:
        if self.llama is None:
            raise UsageError(f"--sides {side} needs --llama")
        own = ["-t", "2", "-c", str(CONTEXT * slots), "-np", str(slots), "-fa", "on", "--no-webui", "--no-cache-prompt"]
        drafting = ["--spec-type", kind] if kind else []
        if kind == "small":
            if self.small is None:
                raise UsageError(f"--sides {side} needs --small")
            drafting = ["--spec-type", "draft-simple", "-md", str(self.small)]
        return [str(self.llama), "-m", str(self.file), *own, *drafting, "--host", "127.0.0.1"]

    def server(self, side: str, slots: int) -> ServerProcess:
        """The server of a side, not started yet."""
        command = self.command(side, slots)
        return ServerProcess(side, lambda port: [*command, "--port", str(port)], ready_seconds=900)


class Turn(NamedTuple):
    """What is asked at once, or one request after another, of each side in turn."""

    set: str
    clients: int
    number: int
    items: list[Item]


def turns_of(prompts: Sequence[Path], clients: Sequence[int], count: int) -> Iterator[Turn]:
    """The turns of every set and number of clients, with at least `count` prompts each, none of them twice.

    Suffix decoding would copy the answer to a prompt that it has seen. Raises UsageError if a set has too few prompts.
    """
    for path in prompts:
        rest = read_items([path], None, seed=0)
        for at_once in clients:
            for number in range(-(-count // at_once)):
                items, rest = rest[:at_once], rest[at_once:]
                if len(items) < at_once:
                    raise UsageError(f"{path} has too few prompts for --count {count} and --clients: lower them")
                yield Turn(path.stem, at_once, number, items)


def joules() -> float | None:
    """The energy that the processors have used since some moment, in joules; None if the machine doesn't count it."""
    packages = [path for path in Path("/sys/class/powercap").glob("*:*") if path.name.count(":") == 1]
    try:
        return sum(float((path / "energy_uj").read_text()) for path in packages) / 1e6 if packages else None
    except OSError:  # only root may read it
        return None


async def ask(server: ServerProcess, items: Sequence[Item], tokens: int) -> LoadRun:
    """Greedy answers to all items at once."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0)
    async with Client(Side(server.name, server.url, "m"), params, 1800.0) as client:
        return await client.run(Load("closed", len(items)), items, 0, 0)


def cell_of(turn: Turn, side: str, run: LoadRun, used: float | None, memory: int) -> dict[str, Any]:
    """A side's turn as it is kept. Raises SystemExit if a request failed."""
    failed = [answer.error for answer in run.answers if answer.error is not None]
    if failed:
        raise SystemExit(f"{side}, {turn.set}: {failed[0]}")
    return {
        "set": turn.set, "clients": turn.clients, "turn": turn.number, "side": side, "seconds": round(run.seconds, 3),
        "joules": None if used is None or used < 0 else round(used, 1),  # counters start over now and then
        "bytes": memory,
        "answers": [
            {
                "text": answer.text, "tokens": answer.tokens, "first": answer.first_seconds,
                "per_token": answer.seconds_per_token, "passes": answer.passes, "accepted": answer.accepted,
            }
            for answer in run.answers
        ],
    }  # fmt: skip


Cell = dict[str, Any]


def rows_of(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """A row for each set, number of clients and side, in the order of the cells."""
    plain = {_turn(cell): cell for cell in cells if cell["side"] == "plain"}
    groups: dict[tuple[str, int, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell["set"], cell["clients"], cell["side"]), []).append(cell)
    rows = []
    for (name, clients, side), own in groups.items():
        answers = [answer for cell in own for answer in cell["answers"]]
        tokens = sum(answer["tokens"] for answer in answers)
        beside = [(cell, plain[_turn(cell)]) for cell in own if _turn(cell) in plain]
        equal = [
            mine["text"] == theirs["text"]
            for cell, other in beside
            for mine, theirs in zip(cell["answers"], other["answers"], strict=True)
        ]
        energy = [cell["joules"] for cell in own]
        passes = sum(answer["passes"] for answer in answers)
        rows.append({
            "set": name,
            "at once": clients,
            "side": side,
            "first s": _median(answer["first"] for answer in answers),
            "decode": _median(1 / each for answer in answers if (each := answer["per_token"])),
            "all": round(tokens / sum(cell["seconds"] for cell in own), 1),
            "over plain": _median(_speed(cell) / _speed(other) for cell, other in beside),
            "accept": round(1 + sum(answer["accepted"] for answer in answers) / passes, 2) if passes else None,
            "GB": round(max(cell["bytes"] for cell in own) / 1e9, 2),
            "J": None if None in energy or not tokens else round(sum(energy) / tokens, 2),
            "equal": f"{sum(equal)}/{len(equal)}",
        })  # fmt: skip
    return rows


def _turn(cell: Cell) -> tuple[Any, ...]:
    return cell["set"], cell["clients"], cell["turn"]


def _speed(cell: Cell) -> float:
    return float(sum(answer["tokens"] for answer in cell["answers"]) / cell["seconds"])


def _median(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 2) if known else None


def all_equal(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether every answer of every side of eyas is plain decoding's."""
    ours = [row["equal"].split("/") for row in rows if not row["side"].startswith(("llama", "openvino"))]
    return all(equal == count for equal, count in ours)


@script
def main(
    file: Annotated[Path, "the target, a GGUF file"],
    *,
    prompts: Annotated[Sequence[Path], "files of prompts; each is a set"],
    small: Annotated[Path | None, "a small language model of the same family, a GGUF file"] = None,
    drafter: Annotated[str | None, "a trained drafter: a folder, GGUF file or name"] = None,
    llama: Annotated[Path | None, "llama.cpp's server"] = None,
    openvino: Annotated[Path | None, "a Python that has openvino-genai"] = None,
    sides: Annotated[Sequence[str], "default: all that are possible"] = (),
    clients: Annotated[Sequence[int], "requests at once"] = (1,),
    count: Annotated[int, "prompts of each set and number of clients"] = 4,
    tokens: Annotated[int, "most tokens of an answer"] = 256,
    output: Output = None,
    json: Annotated[bool, "print JSON instead of a table"] = False,
) -> int:
    """Measure the turns that aren't kept yet, and print all of them."""
    models = Models(file, small, drafter, llama, openvino)
    names = list(dict.fromkeys(("plain", *(sides or models.sides()))))
    settings = {
        "models": [None if path is None else str(path) for path in models[:3]], "tokens": tokens, "count": count,
        "prompts": [path.name for path in prompts], "clients": list(clients),
    }  # fmt: skip
    cells = _kept(output, settings)
    done = {(*_turn(cell), cell["side"]) for cell in cells}
    turns = list(turns_of(prompts, clients, count))
    asked = [
        (turn, name)
        for number, turn in enumerate(turns)
        for name in rotated(names, number)
        if (*turn[:3], name) not in done
    ]
    with ExitStack() as stack:
        needed = {name for _, name in asked}
        servers = {name: models.server(name, max(clients)) for name in names if name in needed}
        for server in servers.values():  # one after another: a controller measures the machine while it starts
            stack.enter_context(server)
            hello = Item("hello", "/chat/completions", {"messages": [{"role": "user", "content": "Say hello."}]})
            asyncio.run(ask(server, [hello], 8))
        rested = IdleMeter(servers)
        for turn, name in asked:
            with rested(name):
                before = joules()
                run = asyncio.run(ask(servers[name], turn.items, tokens))
                after = joules()
            used = None if before is None or after is None else after - before
            cells.append(cell_of(turn, name, run, used, servers[name].memory_bytes()))
            print(f"{turn.set} {turn.clients}.{turn.number} {name}: {_speed(cells[-1]):.1f} tokens/s", flush=True)
            _keep(output, settings, cells)
    made = described({"settings": settings, "unit": "tokens/s", "rows": rows_of(cells)})
    if json:
        print(dumps(made, indent=2))
    else:
        for name in dict.fromkeys(row["set"] for row in made["rows"]):
            shown = [{key: row[key] for key in row if key != "set"} for row in made["rows"] if row["set"] == name]
            Console(width=80).print(f"\n{name}", table(shown), sep="\n")
    _keep(output, settings, cells)
    return 0 if all_equal(made["rows"]) else 1


def _kept(output: Path | None, settings: Mapping[str, Any]) -> list[Cell]:
    """The cells of an earlier run with the same settings. Raises UsageError if the file is of another run."""
    if output is None or not output.exists():
        return []
    found = loads(output.read_text(encoding="utf-8"))
    if found.get("settings") != settings:
        raise UsageError(f"{output} is of a run with other settings: give another --output")
    cells: list[Cell] = found["cells"]
    return cells


def _keep(output: Path | None, settings: Mapping[str, Any], cells: Sequence[Cell]) -> None:
    if output is not None:
        write_json(output, described({"settings": settings, "rows": rows_of(cells), "cells": list(cells)}))


if __name__ == "__main__":
    raise SystemExit(main())
