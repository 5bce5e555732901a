"""What the controller predicts for one tree shape after another, against what was measured.

    python -m benchmarks.controller MODEL DRAFTER --output FILE.json [--batches 1 4 16]

It pins the controller to a shape and has it say, before each plan, what it expects. Every shape decodes the same
prompts in turn, again and again; only rounds with the whole batch running count, planning and learning included.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import eyas
from benchmarks.harness import interleave, report, script
from eyas.assets import PROMPTS
from eyas.engine import Engine, Speculation
from eyas.engine.controller import Controller, CostTable, RoundRecord, costs_for, make_controller
from eyas.engine.controller.gain import THRESHOLDS
from eyas.engine.controller.planner import Shape
from eyas.text.chats import Message
from eyas.text.template import encode_chat
from eyas.tree import TreeSpec

SHAPES = ((1, 1, 8), (1, 1, 16), (2, 1, 8), (2, 3, 6), (3, 1, 8), (3, 3, 6), (4, 4, 5), (5, 4, 4), (6, 6, 3), (8, 8, 2))
"""Depth, width, index of the threshold."""


class Meter:
    """Plans as a controller does, and counts the rounds in which the whole batch runs."""

    def __init__(self, planner: Pinned, rows: int) -> None:
        self.planner, self.rows = planner, rows
        self.turn: list[float] = [0.0, 0.0]
        """Tokens and seconds."""
        self._planning = 0.0

    def plan(self, rows: int, lengths: Sequence[int], *batch: Sequence[Any] | None) -> TreeSpec | None:
        began = time.perf_counter()
        spec = self.planner.plan(rows, lengths, *batch)
        self._planning = time.perf_counter() - began
        return spec

    def learn(self, record: RoundRecord) -> None:
        began = time.perf_counter()
        self.planner.learn(record)
        if record.rows == self.rows:
            self.turn[0] += record.emitted
            self.turn[1] += (record.seconds or 0.0) + self._planning + time.perf_counter() - began

    @property
    def probing(self) -> bool:
        return self.planner.probing

    def take(self) -> tuple[float, list[float]]:
        """Tokens per second since the last call, and what each plan promised."""
        (tokens, seconds), self.turn = self.turn, [0.0, 0.0]
        expected, self.planner.expected = self.planner.expected, []
        return tokens / seconds if seconds else 0.0, expected


class Pinned(Controller):
    """Always the same shape; notes what it was expected to bring."""

    shape: Shape | None = None
    """None = plain."""

    def pin(self, shape: Shape | None) -> Pinned:
        self.shape = shape
        self.expected: list[float] = []
        return self

    def _replan(self, rows: int, lengths: Sequence[int], groups: Sequence[int], room: int, *, settles: bool) -> None:
        super()._replan(rows, lengths, groups, room, settles=settles)
        assert self._prospects is not None
        self._choice = None if self.shape is None else self._prospects.of(self.shape)
        self.expected.append(self._prospects.plain_rate if self._choice is None else self._choice.rate)

    def _new_probe(self, rows: int, reading: float) -> None:
        del rows, reading


def requests(engine: Engine, rows: int, params: eyas.SamplingParams, files: Sequence[Path]) -> list[eyas.Request]:
    """As many prompts as rows, over again if there are fewer, each answered to the same length."""
    texts = [text for _, text in PROMPTS]
    if files:
        lines = [line for path in files for line in path.read_text(encoding="utf-8").splitlines()]
        texts = [json.loads(line)["turns"][0] for line in lines]
    made = []
    for number, text in enumerate(islice(cycle(texts), rows if rows > 4 else 4 * rows)):
        tokens = tuple(encode_chat(engine.tokenizer, [Message(role="user", content=text)]))
        made.append(eyas.Request(tokens, params.model_copy(update={"seed": number})))
    return made


def run(engine: Engine, meter: Meter, batch: Sequence[eyas.Request]) -> tuple[float, list[float]]:
    """A turn: all prompts, a batch at a time; tokens per second, and what each plan promised."""
    assert engine.speculation is not None
    speculation = Speculation(engine.speculation.drafter, None)
    runner = Engine(engine.target, None, speculation, batch_size=meter.rows, controller=meter)  # type: ignore[arg-type]
    for begin in range(0, len(batch), meter.rows):
        runner.generate(batch[begin : begin + meter.rows])
    return meter.take()


def pinned(engine: Engine, costs: CostTable, rows: int) -> dict[str, Meter]:
    """A controller for each shape."""
    assert engine.speculation is not None
    meters = {}
    for shape in (None, *SHAPES):
        made = make_controller(engine.target, engine.speculation.drafter, "auto", rows, costs)
        made.__class__ = Pinned
        assert isinstance(made, Pinned)
        name = "plain" if shape is None else f"depth {shape[0]}, width {shape[1]}, value {THRESHOLDS[shape[2]]:g}"
        at = None if shape is None else Shape(made._widths.index(shape[1]), shape[0] - 1, shape[2])
        meters[name] = Meter(made.pin(at), rows)
    return meters


@script
def main(
    model: str,
    drafter: str,
    *,
    output: Path,
    batches: Sequence[int] = (1, 4, 16),
    repeats: int = 5,
    dtype: str = "bfloat16",
    costs: Path | None = None,
    max_new_tokens: int = 96,
    temperature: float = 0.0,
    prompt_file: Annotated[Sequence[Path], "JSON Lines with `turns`"] = (),
) -> None:
    """Every shape's predicted and measured tokens per second, by batch size."""
    params = eyas.SamplingParams(max_tokens=max_new_tokens, temperature=temperature, ignore_eos=True)
    engine = eyas.load(model, drafter, dtype=dtype)
    assert engine.speculation is not None
    table = costs_for(engine.target, engine.speculation.drafter, max(batches), costs)
    found: dict[str, Any] = {}
    for rows in batches:
        batch = requests(engine, rows, params, prompt_file)
        sides = {name: partial(run, engine, meter, batch) for name, meter in pinned(engine, table, rows).items()}
        found[str(rows)] = {
            name: {
                "predicted": round(median([rate for _, expected in turns for rate in expected] or [0.0]), 2),
                "measured": round(median(rate for rate, _ in turns), 2),
            }
            for name, turns in interleave(sides, repeats).items()
        }
        report({"dtype": dtype, "temperature": temperature, "max_new_tokens": max_new_tokens, "batches": found}, output)


if __name__ == "__main__":
    raise SystemExit(main())
