"""A shift of traffic: a drafter that learns from it beside the same drafter that doesn't; and what collecting costs.

    python -m benchmarks.learning shift MODEL DRAFTER WORK --known EVAL/gsm8k.jsonl --store STORE --output FILE.json
    python -m benchmarks.learning cost MODEL DRAFTER --known EVAL/gsm8k.jsonl

`shift` answers known prompts, then requests for tool calls, then known ones again, with an engine that learns and one
whose drafter stays as it is. After every `--every` requests the learner runs a cycle, with the machine to itself:
counts are measured, not seconds. Of each window some answers, half of them at temperature 1,
are compared with plain decoding token by token.

`cost` decodes the same requests with and without a collector, in turns.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from subprocess import run
from typing import Annotated, Any

from benchmarks.harness import Output, interleave, paired, report, script, seconds_of
from eyas.drafters.options import DrafterOptions
from eyas.engine import Engine
from eyas.learn.folder import LearnFolder
from eyas.learn.serving import LearnConfig, Learning
from eyas.options import EngineOptions, TargetOptions
from eyas.session import Session
from eyas.text.chats import Message
from eyas.text.prompts import PromptRow, read_prompts
from eyas.text.template import encode_chat
from eyas.types import Limits, Request, SamplingParams, Stats

TOGETHER = 10
"""Requests between two looks of the server at its folder."""
_NOUNS = "weather stock flight hotel recipe route calendar contact invoice ticket parcel song movie article".split()
_VERBS = "get search book cancel update list create delete send find".split()
_FIELDS = "city date name quantity price currency language email priority limit status category".split()
_VALUES = "Lisbon tomorrow Ada 12 99.5 EUR German ada@example.org high 20 open books".split()


def tool_calls(seed: int) -> Iterator[list[Message]]:
    """Chats that ask for a call of a tool, without end: each has tools of its own."""
    rng = random.Random(seed)
    while True:
        tools = []
        for _ in range(rng.randint(1, 3)):
            fields = rng.sample(_FIELDS, rng.randint(1, 4))
            name = f"{rng.choice(_VERBS)}_{rng.choice(_NOUNS)}"
            tools.append({"name": name, "parameters": {field: {"type": "string"} for field in fields}})
        wanted = rng.choice(tools)
        call = {name: _VALUES[_FIELDS.index(name)] for name in wanted["parameters"]}
        wishes = ", ".join(f"{name} {value}" for name, value in call.items())
        system = (
            "You call functions. Answer with a list of JSON objects with the keys name and arguments, nothing else.\n"
            f"<tools>{json.dumps(tools)}</tools>"
        )
        asks = f"{rng.choice(['Please', 'Could you', 'I need you to'])} {wanted['name'].replace('_', ' ')}"
        yield [Message(role="system", content=system), Message(role="user", content=f"{asks}: {wishes}.")]


def known_chats(files: Sequence[Path], seed: int) -> Iterator[list[Message]]:
    """The first turns of prompt files, in random order, again and again."""
    rows = [row for path in files for row in read_prompts(path) if isinstance(row, PromptRow)]
    chats = [
        list(row.messages or [Message(role="user", content=row.prompt or (row.turns or ("",))[0])]) for row in rows
    ]
    rng = random.Random(seed)
    while True:
        yield from rng.sample(chats, len(chats))


def requests(session: Session, chats: Iterator[list[Message]], count: int, tokens: int, seed: int) -> list[Request]:
    """Requests of the next chats, every second one sampled."""
    made = []
    for at in range(count):
        prompt = tuple(encode_chat(session.tokenizer, next(chats)))
        params = SamplingParams(max_tokens=tokens, temperature=float(at % 2), seed=seed * 10_000 + at)
        made.append(Request(prompt, params, chat=True))
    return made


def engines(session: Session, options: DrafterOptions, folder: Path, model: str) -> tuple[Engine, Engine, Learning]:
    """An engine that learns, one that doesn't, and what is beside the first."""
    learning = Learning(LearnConfig(folder, canary=0.3))
    limits = Limits(max_running=8, prefix_tokens=4096)
    settings = EngineOptions(tree="dynamic:5,6,24", limits=limits)
    drafter = session.drafter(options)
    learns = session.engine(drafter, replace(settings, around=learning.wrap(options, model)))
    assert learns.speculation is not None
    learning.drafter = learns.speculation.drafter  # type: ignore[assignment]
    return learns, session.engine(drafter, settings), learning


def window(
    session: Session, sides: tuple[Engine, Engine], learning: Learning, made: list[Request], checked: int
) -> dict[str, Any]:
    """Answer a window's requests with both engines; accept lengths, and how many answers differ from plain decoding."""
    stats, answers = [Stats(), Stats()], []
    for at in range(0, len(made), TOGETHER):
        for side, engine in enumerate(sides):
            for done in engine.generate(made[at : at + TOGETHER]):
                stats[side].merge(done.stats)
                answers += [list(done.token_ids)] if side == 0 else []
        learning.look()
    plain = session.engine(None, EngineOptions(batch_size=8)).generate(made[:checked])
    wrong = sum(list(one.token_ids) != answer for one, answer in zip(plain, answers, strict=False))
    learns, static = (one.accept_length for one in stats)
    return {
        "learning": round(learns, 4), "static": round(static, 4), "ratio": round(learns / static, 4),
        "generation": learning.serving, "checked": checked, "wrong": wrong,
    }  # fmt: skip


def shift(
    model: str,
    drafter: str,
    work: Annotated[Path, "a new folder"],
    *,
    known: Sequence[Path],
    store: Annotated[Path | None, "the drafter's original store"] = None,
    before: int = 200,
    shifted: int = 2000,
    after: int = 500,
    every: Annotated[int, "requests between two cycles"] = 250,
    size: Annotated[int, "requests of a window"] = 50,
    tokens: int = 96,
    checked: Annotated[int, "answers of a window compared with plain decoding"] = 40,
    least_rows: int = 100,
    output: Output = None,
) -> None:
    """Accept length by window, before, during and after a shift to tool calls."""
    session, folder = Session.open(TargetOptions(model)), work / "learn"
    learns, static, learning = engines(session, DrafterOptions(drafter), folder, model)
    rows: list[dict[str, Any]] = []
    answered, tools = 0, tool_calls(1)
    for phase, count, chats in (("known", before, known_chats(known, 0)), ("tools", shifted, tools),
                                ("back", after, known_chats(known, 1))):  # fmt: skip
        for _ in range(0, count, size):
            made = requests(session, chats, size, tokens, len(rows))
            rows.append({"phase": phase, **window(session, (learns, static), learning, made, checked)})
            print(json.dumps(rows[-1]), flush=True)
            answered += size
            if phase == "tools" and answered % every < size:
                _cycle(learning, folder, store, least_rows)
    learning.close()
    tail = [row for row in rows if row["phase"] == "tools"][-4:]
    back = [row for row in rows if row["phase"] == "back"]
    report(
        {
            "shift_ratio": _mean(tail), "back_ratio": _mean(back), "wrong": sum(row["wrong"] for row in rows),
            "checked": sum(row["checked"] for row in rows), "windows": rows,
            "events": [{**event, "time": 0} for event in LearnFolder(folder).events()],
        },
        output,
    )  # fmt: skip


def _cycle(learning: Learning, folder: Path, store: Path | None, least: int) -> None:
    """Have everything written, then run a cycle if there are rows enough."""
    assert learning.collector is not None
    learning.collector.flush()
    given = [] if store is None else [f"--store={store}"]
    line = [sys.executable, "-m", "eyas", "learn", "run", str(folder), "--once", f"--least-rows={least}", *given]
    done = run(line, check=False)
    print(f"the cycle ended with code {done.returncode}", flush=True)


def _mean(rows: Sequence[dict[str, Any]]) -> float | None:
    return round(sum(row["ratio"] for row in rows) / len(rows), 4) if rows else None


def cost(
    model: str,
    drafter: str,
    *,
    known: Sequence[Path],
    count: int = 64,
    tokens: int = 128,
    repeats: int = 5,
    output: Output = None,
) -> None:
    """Seconds with a collector and without, in turns; a ratio of 1.02 is a cost of 2 %."""
    session = Session.open(TargetOptions(model))
    with tempfile.TemporaryDirectory() as work:
        learns, static, learning = engines(session, DrafterOptions(drafter), Path(work) / "learn", model)
        made = requests(session, known_chats(known, 0), count, tokens, 0)
        found = interleave(
            {
                "collecting": lambda: seconds_of(lambda: learns.generate(made)),
                "not": lambda: seconds_of(lambda: static.generate(made)),
            },
            repeats,
        )
        learning.close()
        assert learning.collector is not None
        rows = dict(learning.collector.counts)
    report({"seconds_ratio": paired(found["collecting"], found["not"]), "seconds": found, "written": rows}, output)


if __name__ == "__main__":
    raise SystemExit(script(shift, cost)())
