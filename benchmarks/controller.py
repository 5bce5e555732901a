"""The controller against fixed trees by batch size, and its predictions against what was measured.

Every alternative decodes the same prompts in turn, again and again, in an order that rotates; only rounds with the
whole batch running count, planning and learning included. The first turn is not counted.

    python -m benchmarks.controller compare MODEL DRAFTER --output FILE.json [--batches 1,2,4,8,16,32,64] [--repeats 5]
    python -m benchmarks.controller predict MODEL DRAFTER --output FILE.json [--batches 1,4,16]
    python -m benchmarks.controller plot FILE.json --output FILE.svg
    python -m benchmarks.controller simulate

`compare` has plain decoding, `auto`, `auto:chain` and a grid of fixed trees, and gives each repeat's ratios; `predict`
pins the controller to one shape after another and has it say, before each plan, what it expects.
`simulate` measures nothing: it runs the controller on the heavy pair's costs with made-up texts and a noisy clock, as
the tests do.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

import eyas
from eyas.assets import PROMPTS
from eyas.bench.machine import describe_machine
from eyas.engine import Engine, Speculation
from eyas.engine.controller import Controller, CostTable, RoundRecord, costs_for, make_controller
from eyas.engine.controller.gain import THRESHOLDS
from eyas.engine.controller.planner import Shape
from eyas.text.chats import Message
from eyas.text.template import encode_chat
from eyas.tree import TreeSpec, parse_tree

AUTO = ("auto", "auto:chain")
FIXED = ("chain:1", "chain:2", "chain:3", "chain:5", "dynamic:2,2,3", "dynamic:3,3,6", "dynamic:4,4,10",
         "dynamic:5,4,15", "dynamic:7,6,24")  # fmt: skip
SHAPES = ((1, 1, 8), (1, 1, 16), (2, 1, 8), (2, 3, 6), (3, 1, 8), (3, 3, 6), (4, 4, 5), (5, 4, 4), (6, 6, 3), (8, 8, 2))
"""Depth, width, index of the threshold."""


class Meter:
    """Plans as another does, or always the same, and counts the rounds in which the whole batch runs."""

    def __init__(self, planner: Controller | TreeSpec | None, rows: int) -> None:
        self.planner, self.rows = planner, rows
        self.turn: list[float] = [0.0, 0.0]
        """Tokens and seconds."""
        self._planning = 0.0

    def plan(self, rows: int, lengths: Sequence[int], sampled: Sequence[bool] | None = None) -> TreeSpec | None:
        if not isinstance(self.planner, Controller):
            return self.planner
        began = time.perf_counter()
        spec = self.planner.plan(rows, lengths, sampled)
        self._planning = time.perf_counter() - began
        return spec

    def learn(self, record: RoundRecord) -> None:
        began = time.perf_counter()
        if isinstance(self.planner, Controller):
            self.planner.learn(record)
        if record.rows == self.rows:
            self.turn[0] += record.emitted
            self.turn[1] += (record.seconds or 0.0) + self._planning + time.perf_counter() - began

    def take(self) -> float:
        """Tokens per second since the last call."""
        tokens, seconds = self.turn
        self.turn = [0.0, 0.0]
        return tokens / seconds if seconds else 0.0


class Pinned(Controller):
    """Always the same shape; notes what it was expected to bring."""

    shape: Shape | None = None
    """None = plain."""

    def pin(self, shape: Shape | None) -> Pinned:
        self.shape = shape
        self.expected: list[float] = []
        return self

    def _replan(self, rows: int, *situation: Any) -> None:
        super()._replan(rows, *situation)
        assert self._prospects is not None
        self._choice = None if self.shape is None else self._prospects.of(self.shape)
        self.expected.append(self._prospects.plain_rate if self._choice is None else self._choice.rate)

    def _new_probe(self, rows: int, lengths: Sequence[int]) -> None:
        del rows, lengths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, batches in (("compare", "1,2,4,8,16,32,64"), ("predict", "1,4,16")):
        one = verbs.add_parser(verb)
        one.add_argument("model")
        one.add_argument("drafter")
        one.add_argument("--batches", default=batches)
        one.add_argument("--repeats", type=int, default=5)
        one.add_argument("--max-new-tokens", type=int, default=96)
        one.add_argument("--dtype", default="bfloat16")
        one.add_argument("--temperature", type=float, default=0.0)
        one.add_argument("--prompt-file", type=Path, action="append", default=[], help="JSON Lines with `turns`")
        one.add_argument("--trees", default=";".join(FIXED), help="fixed trees of compare, ; between them")
        one.add_argument("--costs", type=Path)
        one.add_argument("--output", type=Path, required=True)
    one = verbs.add_parser("plot")
    one.add_argument("measured", type=Path)
    one.add_argument("--output", type=Path, required=True)
    verbs.add_parser("simulate")
    options = parser.parse_args()
    if options.verb == "simulate":
        simulate()
        return
    if options.verb == "plot":
        plot(json.loads(options.measured.read_text(encoding="utf-8")), options.output)
        return
    batches = [int(size) for size in options.batches.split(",")]
    engine = eyas.load(options.model, options.drafter, dtype=options.dtype)
    assert engine.speculation is not None
    costs = costs_for(engine.target, engine.speculation.drafter, max(batches), options.costs)  # type: ignore[arg-type]
    measure = compare if options.verb == "compare" else predict
    report = {"verb": options.verb, "machine": describe_machine(), "dtype": options.dtype,
              "temperature": options.temperature, "max_new_tokens": options.max_new_tokens, "batches": {}}  # fmt: skip
    for rows in batches:
        report["batches"][str(rows)] = measure(engine, costs, rows, requests(engine, rows, options), options)
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def requests(engine: Engine, rows: int, options: argparse.Namespace) -> list[eyas.Request]:
    """As many prompts as rows, over again if there are fewer, each answered to the same length."""
    texts = [text for _, text in PROMPTS]
    if options.prompt_file:
        lines = [line for path in options.prompt_file for line in path.read_text(encoding="utf-8").splitlines()]
        texts = [json.loads(line)["turns"][0] for line in lines]
    made = []
    for number, text in enumerate(islice(cycle(texts), rows if rows > 4 else 4 * rows)):
        tokens = tuple(encode_chat(engine.tokenizer, [Message(role="user", content=text)]))
        params = eyas.SamplingParams(
            max_tokens=options.max_new_tokens, temperature=options.temperature, seed=number, ignore_eos=True
        )
        made.append(eyas.Request(tokens, params))
    return made


def run(engine: Engine, meter: Meter, batch: Sequence[eyas.Request]) -> float:
    """A turn: all prompts, a batch at a time; tokens per second."""
    assert engine.speculation is not None
    speculation = Speculation(engine.speculation.drafter, None)
    runner = Engine(engine.target, None, speculation, batch_size=meter.rows, controller=meter)  # type: ignore[arg-type]
    for begin in range(0, len(batch), meter.rows):
        runner.generate(batch[begin : begin + meter.rows])
    return meter.take()


def compare(
    engine: Engine, costs: CostTable, rows: int, batch: list[eyas.Request], options: argparse.Namespace
) -> dict[str, Any]:
    assert engine.speculation is not None
    drafter = engine.speculation.drafter
    meters = {"plain": Meter(None, rows)}
    for text in AUTO:
        meters[text] = Meter(make_controller(engine.target, drafter, text, rows, costs), rows)  # type: ignore[arg-type]
    meters |= {text: Meter(parse_tree(text), rows) for text in options.trees.split(";") if text}
    rates: dict[str, list[float]] = {name: [] for name in meters}
    names = list(meters)
    for turn in range(1 + options.repeats):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            rate = run(engine, meters[name], batch)
            if turn:
                rates[name].append(rate)
    best = max((name for name in rates if name not in AUTO), key=lambda name: median(rates[name]))

    def ratio(one: str, other: str) -> list[float]:
        return [round(a / b, 4) for a, b in zip(rates[one], rates[other], strict=True)]

    result = {
        "tokens_per_second": {name: round(median(found), 2) for name, found in rates.items()},
        "best_fixed": best,
        "auto_to_plain": ratio("auto", "plain"),
        "auto_to_best_fixed": ratio("auto", best),
        "auto_to_auto_chain": ratio("auto", "auto:chain"),
        "chosen": {name: vars(m.planner.snapshot()) for name, m in meters.items() if isinstance(m.planner, Controller)},
    }
    shown = {key: f"{median(result[key]):.3f} ({min(result[key]):.3f}..)" for key in result if key.startswith("auto_")}
    print(f"batch {rows}: plain {median(rates['plain']):.1f} tokens/s, best fixed {best}, {shown}", flush=True)
    return result


def predict(
    engine: Engine, costs: CostTable, rows: int, batch: list[eyas.Request], options: argparse.Namespace
) -> dict[str, Any]:
    assert engine.speculation is not None
    drafter = engine.speculation.drafter
    pinned: dict[str, Pinned] = {}
    for shape in (None, *SHAPES):
        made = make_controller(engine.target, drafter, "auto", rows, costs)  # type: ignore[arg-type]
        made.__class__ = Pinned
        assert isinstance(made, Pinned)
        name = "plain" if shape is None else f"depth {shape[0]}, width {shape[1]}, value {THRESHOLDS[shape[2]]:g}"
        widths = made._widths
        pinned[name] = made.pin(None if shape is None else Shape(widths.index(shape[1]), shape[0] - 1, shape[2]))
    meters = {name: Meter(controller, rows) for name, controller in pinned.items()}
    rates: dict[str, list[float]] = {name: [] for name in meters}
    for turn in range(1 + options.repeats):
        for name, meter in meters.items():
            rate = run(engine, meter, batch)
            if turn:
                rates[name].append(rate)
            else:
                pinned[name].expected.clear()
    result = {}
    for name, found in rates.items():
        expected = pinned[name].expected or [0.0]
        result[name] = {"predicted": round(median(expected), 2), "measured": round(median(found), 2)}
        print(f"batch {rows}, {name}: predicted {median(expected):.1f}, measured {median(found):.1f}", flush=True)
    return result


def simulate() -> None:
    """Tables of what the tests assert; ratios of simulated rates."""
    from tests.engine.controller.simulation import contest

    print("SIMULATION, nothing measured: the heavy pair's pass times, made-up texts, 4 % of noise")
    print("| rows | best fixed | auto / it, 75 rounds | 300 rounds | auto / auto:chain | auto / plain |")
    print("|---|---|---|---|---|---|")
    for rows in (1, 2, 4, 8, 16, 32, 64):
        found = contest(rows)
        best, (early, late) = found.best, found.trees
        name = f"shared:{best.depth},{best.width},{best.budget}"
        ratios = (early / found.fixed, late / found.fixed, late / found.chains[1], late / found.plain)
        print(f"| {rows} | {name} | " + " | ".join(f"{ratio:.3f}" for ratio in ratios) + " |", flush=True)


def plot(measured: dict[str, Any], path: Path) -> None:
    """predict: every shape's predicted against measured tokens/s; compare: tokens/s by batch size over plain."""
    from eyas.bench.report.plots import COLOURS, GREY, canvas, label, svg
    from eyas.files import write_bytes

    with canvas(1, 1, 5.0, 4.0) as (figure, axes):
        area = axes[0][0]
        if measured["verb"] == "predict":
            for colour, (rows, shapes) in zip(cycle(COLOURS), measured["batches"].items(), strict=False):
                plain = shapes["plain"]["measured"]
                points = [(one["measured"] / plain, one["predicted"] / plain) for one in shapes.values()]
                area.plot(*zip(*points, strict=True), "o", color=colour, label=f"{rows} rows")
            limits = area.get_xlim()
            area.plot(limits, limits, color=GREY, linewidth=0.8)
            label(area, "measured tokens/s, plain = 1", "predicted", "Every point a tree shape")
        else:
            sizes = [int(rows) for rows in measured["batches"]]
            for colour, name in zip(COLOURS, ("auto", "auto:chain", "best fixed"), strict=False):
                ratios = []
                for found in measured["batches"].values():
                    rates = found["tokens_per_second"]
                    ratios.append(rates[found["best_fixed"] if name == "best fixed" else name] / rates["plain"])
                area.plot(sizes, ratios, "o-", color=colour, label=name)
            area.axhline(1.0, color=GREY, linewidth=0.8)
            area.set_xscale("log", base=2)
            area.set_xticks(sizes, [str(size) for size in sizes])
            label(area, "rows", "tokens/s, plain = 1")
        area.legend()
        write_bytes(path, svg(figure))


if __name__ == "__main__":
    main()
