"""A day of shifting traffic: one engine learns from it, others answer the same requests unchanged.

Every request's answer (as a hash), tokens and rounds go to `WORK/NAME.jsonl`, a line per window, so that a run can be
resumed. The figures are made from these files.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from subprocess import run
from typing import Annotated, Any, NamedTuple

from benchmarks.harness import Output, report
from benchmarks.learning.traffic import DAY, WINDOW, Traffic
from eyas.drafters.options import DrafterOptions
from eyas.engine import Engine
from eyas.learn.folder import LearnFolder, LearnState
from eyas.learn.serving import LearnConfig, Learning
from eyas.options import EngineOptions, TargetOptions
from eyas.session import Session
from eyas.types import Completion, Limits, Request

TREE = "chain:5"
SETTINGS = EngineOptions(tree=TREE, limits=Limits(max_running=8, prefix_tokens=8192))
LOOK = 30
"""Number of chunks after which the server checks its folder."""
PLAIN = "plain"
"""The name of the run without a drafter."""

Mix = Annotated[Sequence[Path], "prompts of the drafter's training mix"]
Unseen = Annotated[Sequence[Path], "prompts of the same kinds that it hasn't seen"]
Until = Annotated[int | None, "stop after this many windows of 50 requests; the same command resumes"]


class Answer(NamedTuple):
    """The recorded result of a request."""

    digest: str
    tokens: int
    """Number of tokens emitted in its drafted rounds."""
    rounds: int

    @classmethod
    def of(cls, done: Completion) -> Answer:
        digest = hashlib.blake2b(repr(list(done.token_ids)).encode(), digest_size=6).hexdigest()
        return cls(digest, done.stats.walked + done.stats.target_passes, done.stats.target_passes)


def windows(work: Path, name: str) -> list[dict[str, Any]]:
    """The windows that a run has written so far."""
    path = work / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def answers_of(work: Path, name: str) -> list[Answer | None]:
    """The answers of a run, in order; None for requests that it left out."""
    return [one and Answer(*one) for window in windows(work, name) for one in window["answers"]]


def _write(work: Path, name: str, window: dict[str, Any]) -> None:
    with (work / f"{name}.jsonl").open("a") as file:
        file.write(json.dumps(window) + "\n")


class Server:
    """An engine that learns, without HTTP; the server thread's work of once a second is done every `LOOK` chunks."""

    def __init__(
        self, session: Session, options: DrafterOptions, folder: Path, model: str, canary: float,
        settings: EngineOptions = SETTINGS,
    ) -> None:  # fmt: skip
        self.learning = Learning(LearnConfig(folder, canary=canary))
        wrapped = replace(settings, around=self.learning.wrap(options, model))
        self.engine: Engine = session.engine(session.drafter(options), wrapped)
        assert self.engine.speculation is not None
        self.learning.drafter = self.engine.speculation.drafter  # type: ignore[assignment]
        assert self.learning.folder is not None
        self.folder: LearnFolder = self.learning.folder

    def serve(self, requests: Sequence[Request], chaos: random.Random | None = None) -> Iterator[Completion]:
        """Answer requests, in order; with `chaos`, any generation may be promoted or reverted to at random."""
        done: dict[int, Completion] = {}
        for count, chunk in enumerate(self.engine.stream(requests)):
            if chunk.completion is not None:
                done[chunk.index] = chunk.completion
            if count % LOOK == 0:
                if chaos is not None and chaos.random() < 0.3:
                    self.swap(chaos.choice(self.folder.numbers()), chaos.random() < 0.5)
                self.learning.look()
        yield from (done[at] for at in range(len(requests)))

    def swap(self, number: int, at_once: bool) -> None:
        """Serve a generation immediately or on trial, as an operator might order at any moment."""

        def by_hand(state: LearnState) -> LearnState:
            return state.model_copy(update={"wanted": number, **({"settled": number} if at_once else {})})

        self.folder.change(by_hand, "reverted" if at_once else "promoted", generation=number, reason="by hand")


def day(
    model: str,
    drafter: str,
    work: Annotated[Path, "a folder; a run in it is resumed"],
    *,
    mix: Mix,
    unseen: Unseen,
    store: Annotated[Path, "the drafter's original store"],
    canary: float = 0.1,
    least_rows: int = 120,
    most_rows: int = 400,
    epochs: float = 2.0,
    until: Until = None,
) -> None:
    """Serve the day's requests with an engine that learns.

    Cycles run between windows when they are due; requests wait for them, as if these were idle hours.
    """
    session, name = Session.open(TargetOptions(model)), "learning"
    work.mkdir(parents=True, exist_ok=True)
    server = Server(session, DrafterOptions(drafter), work / "learn", model, canary)
    traffic, chaos = Traffic(session, mix, unseen), random.Random(0)
    words = [f"--least-rows={least_rows}", f"--most-rows={most_rows}", "--threads=1", f"--store={store}"]
    learn = ["-m", "eyas", "learn", "run", str(server.folder.path), "--once", *words, f"--epochs={epochs}"]
    assert server.learning.collector is not None
    for window in range(len(windows(work, name)), until or len(traffic)):
        swaps, settled = traffic.phase(window) == "swaps", server.folder.state.settled
        if not swaps:
            run([sys.executable, *learn], check=False)  # if it isn't due, it says so
            server.learning.look()
        made = list(server.serve(traffic.window(window), chaos if swaps else None))
        kept = {"phase": traffic.phase(window), "generation": server.learning.serving,
                "answers": [Answer.of(one) for one in made]}  # fmt: skip
        _write(work, name, kept)
        server.learning.collector.flush()
        if swaps:
            server.swap(settled, at_once=True)
        server.learning.look()
        print(window, kept["phase"], kept["generation"], server.folder.state.wanted, flush=True)
    server.learning.close()


def others(
    model: str,
    name: Annotated[str, "the run's name: static, oracle or plain"],
    work: Path,
    *,
    mix: Mix,
    unseen: Unseen,
    drafter: Annotated[str | None, "a drafter that doesn't learn; without one, plain decoding"] = None,
    every: Annotated[int, "answer one of this many pairs of a greedy and a sampled request"] = 1,
    until: Until = None,
) -> None:
    """Answer the same requests without learning."""
    session = Session.open(TargetOptions(model))
    work.mkdir(parents=True, exist_ok=True)
    traffic = Traffic(session, mix, unseen)
    engine = session.engine(None if drafter is None else session.drafter(DrafterOptions(drafter)), SETTINGS)
    for window in range(len(windows(work, name)), until or len(traffic)):
        asked = traffic.window(window)
        chosen = [at for at in range(len(asked)) if at // 2 % every == 0]
        made = dict(zip(chosen, engine.generate([asked[at] for at in chosen]), strict=True))
        answers = [Answer.of(made[at]) if at in made else None for at in range(len(asked))]
        _write(work, name, {"phase": traffic.phase(window), "answers": answers})
        print(name, window, flush=True)


# Figures.

SPAN, STEP = 200, 25
"""Number of requests that each span of the figures covers, and its distance from the next span."""


def accept_length(answers: Sequence[Answer]) -> float:
    """Tokens per drafted round."""
    return sum(one.tokens for one in answers) / max(1, sum(one.rounds for one in answers))


def compared(runs: Mapping[str, Sequence[Answer | None]], part: slice) -> dict[str, float]:
    """Accept lengths of runs over the requests of a part that all runs have answered, and their number."""
    rows = [row for row in zip(*(each[part] for each in runs.values()), strict=True) if None not in row]
    found = {name: accept_length([row[at] for row in rows]) for at, name in enumerate(runs)}
    ratio = {"ratio": round(found["learning"] / found["static"], 4)} if rows else {}
    return {"requests": len(rows), **{name: round(one, 4) for name, one in found.items()}, **ratio}


def figures(
    work: Path,
    *,
    output: Output = None,
    plot: Annotated[Path | None, "an SVG of accept length over the day"] = None,
) -> None:
    """The figures of the part of the day that has run."""
    names = [name for name in ("static", "learning", "oracle") if windows(work, name)]
    runs = {name: answers_of(work, name) for name in names}
    known = min(map(len, runs.values()))
    runs = {name: each[:known] for name, each in runs.items()}
    first, phases = 0, {}
    for phase in DAY:
        if first < known:
            phases[phase.name] = compared(runs, slice(first, first + phase.requests))
        first += phase.requests
    over = [{"end": end, **compared(runs, slice(end - SPAN, end))} for end in range(SPAN, known + 1, STEP)]
    windowed = [compared(runs, slice(end - WINDOW, end)) for end in range(WINDOW, known + 1, WINDOW)]
    pairs = [
        (a, b)
        for a, b in zip(answers_of(work, "learning"), answers_of(work, PLAIN), strict=False)
        if a is not None and b is not None
    ]
    report(
        {
            "phases": phases,
            "least_ratio_of_200": min((one["ratio"] for one in over), default=None),
            "answers_compared_with_plain": len(pairs),
            "answers_that_differ": sum(a.digest != b.digest for a, b in pairs),
            "ratio_of_each_window": [one.get("ratio") for one in windowed],
            "spans": over,
            "events": [{**event, "time": 0} for event in LearnFolder(work / "learn").events()],
        },
        output,
    )
    if plot is not None:
        plot.write_bytes(_plotted(over, names))


def _plotted(over: Sequence[dict[str, float]], names: Sequence[str]) -> bytes:
    from eyas.bench.report.figures import GREY, canvas, label, svg

    with canvas(1, 1, 7.5, 2.8) as (figure, grid):
        axes = grid[0][0]
        for name in names:
            axes.plot([one["end"] for one in over], [one[name] for one in over], label=name)
        first = 0
        for phase in DAY:
            if first >= over[-1]["end"]:
                break
            axes.axvline(first, color=GREY, linewidth=0.5)
            axes.text(first + 8, axes.get_ylim()[1], phase.name, fontsize=8)
            first += phase.requests
        label(axes, f"requests (a point: the {SPAN} before)", "accept length")
        axes.legend(loc="upper left")
        return svg(figure)
