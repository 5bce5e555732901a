"""Self-contained HTML reports: text, tables and plots in one file, with no scripts and nothing to load."""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

import eyas
from eyas.bench.offline.candidates import WORDS, Candidate, Criterion, doubt, joint_margin, with_margin
from eyas.bench.offline.report import DEFINITIONS, MEAN, describe_training
from eyas.bench.offline.runner import PLAIN
from eyas.bench.offline.trees import METRICS, TrainingRun
from eyas.bench.report.figures import (
    checkpoint_figure,
    learning_figure,
    methods_figure,
    serve_figure,
    training_figure,
    tree_figure,
)
from eyas.runtime import busy
from eyas.tables import by_position


@dataclass(frozen=True)
class Text:
    """A paragraph; `faint` ones are set in gray."""

    kind: ClassVar[str] = "text"
    text: str
    faint: bool = False


@dataclass(frozen=True)
class DataTable:
    """A table; numeric columns are right-aligned, `marked` rows are highlighted."""

    kind: ClassVar[str] = "table"
    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    marked: Sequence[int] = ()

    @property
    def numeric(self) -> list[int]:
        """Indices of the columns in which every cell looks like a number."""
        width = max((len(row) for row in self.rows), default=0)
        return [i for i in range(width) if self.headers and all(_number(row[i]) for row in self.rows)]


@dataclass(frozen=True)
class Image:
    """A plot; `alt` describes it for readers who can't see it."""

    kind: ClassVar[str] = "image"
    svg: bytes
    alt: str

    @property
    def data(self) -> str:
        """The SVG in base64, for a data URL."""
        return base64.b64encode(self.svg).decode("ascii")


@dataclass(frozen=True)
class Json:
    """A JSON document with a title, collapsed until it is clicked."""

    kind: ClassVar[str] = "json"
    title: str
    value: Any

    @property
    def text(self) -> str:
        """The document as indented JSON."""
        return json.dumps(self.value, indent=2, ensure_ascii=False)


@dataclass(frozen=True)
class Tiles:
    """Headline figures. `values`: (label, figure, what it refers to)."""

    kind: ClassVar[str] = "tiles"
    values: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class ShellCommand:
    """A command line to copy."""

    kind: ClassVar[str] = "command"
    line: str


Block = Text | DataTable | Image | Json | Tiles | ShellCommand


@dataclass(frozen=True)
class Section:
    """A heading and the blocks below it."""

    title: str
    blocks: Sequence[Block]


def render(title: str, lead: Sequence[Block], sections: Sequence[Section]) -> str:
    """Render a report as HTML: title, summary blocks, sections."""
    loader = PackageLoader("eyas.bench.report", package_path=".")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = environment.get_template("page.html.j2")
    return template.render(title=title, lead=lead, sections=sections, version=eyas.__version__)


def pairs(values: dict[str, Any]) -> DataTable:
    """A table of names and values; empty values are left out."""
    rows = [(name.replace("_", " "), cell(value)) for name, value in values.items() if value not in (None, {}, [], "")]
    return DataTable((), rows)


def cell(value: Any) -> str:
    """Format a value as a table cell."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {cell(each)}" for name, each in value.items() if each is not None)
    return ", ".join(map(cell, value)) if isinstance(value, (list, tuple)) else str(value)


def _number(text: str) -> bool:
    return text == "" or text[0].isdigit() or (text[0] == "-" and text[1:2].isdigit())


Report = Mapping[str, Any]
ACCEPT_LENGTH, SPEEDUP = (
    next(line for line in DEFINITIONS if line.startswith(f"{name}:")) for name in ("accept length", "speedup")
)


class Learned(NamedTuple):
    """A checkpoint: what it was trained on, and its accept length on real tasks."""

    chats: int
    step: int
    tokens: int
    accept_length: float

    @staticmethod
    def of(made: Report, accept_length: float) -> Learned:
        """Read the counts from the provenance in a drafter's config.json."""
        step = made["steps"]
        return Learned(made["rows"], step, step * made["loop"]["accumulate"] * made["batch_tokens"], accept_length)


def headline(
    checkpoints: Report | None, trees: Report | None, methods: Report | None, target: str, drafter: Path
) -> list[Block]:
    """The conclusion of the report: one verdict, its figures, and the command that serves what was measured.

    All three describe one measurement: the comparison of methods, else the best draft tree, else the best checkpoint.
    """
    if methods is not None:
        return _fastest(methods, target)
    report = checkpoints if trees is None else trees
    if report is None:
        return [Text("Nothing was measured on real tasks so far: run `eyas bench checkpoints`.")]
    best = Candidate.from_dict(report["ranked"][0])
    doubted = doubt(best)
    name = checkpoints["pick"] if checkpoints is not None else Path(report["drafter"]).name
    tree = "" if trees is None else f" with the draft tree {best.name}"
    role = "is the drafter to serve" if doubted is None else "is the best, but not certain to pay"
    tasks = ", ".join(best.tasks)
    counts = [sum(getattr(score, name) for score in best.tasks.values()) for name in ("same", "answers")]
    command = ["eyas", "serve", target]
    if doubted is None:
        command += ["--draft-model", str(drafter), *(("--tree", best.name) if trees is not None else ())]
    figures: dict[Criterion, Shown] = {by: (best.mean(by), best.margin(by)) for by in WORDS}
    return [
        Text(f"{name}{tree} {role}: mean over {tasks}. {f'{doubted}.' if doubted else ''}"),
        _tiles(figures, tasks, counts, "answers"),
        Text("Serve it:" if doubted is None else "Until then, serve the target alone:"),
        ShellCommand(shlex.join(command)),
    ]


Shown = tuple[float, float | None]
"""A figure and its margin."""


def _tiles(figures: Mapping[Criterion, Shown], tasks: str, counts: Sequence[int], answers: str) -> Tiles:
    """The headline figures; `counts`: answers equal to plain decoding's, and all answers."""
    return Tiles(
        (
            ("Speedup", with_margin("{:.2f}x", *figures["speedup"]), "of plain decoding, interleaved with it"),
            ("Accept length", with_margin("{:.2f}", *figures["accept_length"]), "tokens per pass of the target"),
            ("Tokens/s", with_margin("{:.1f}", *figures["tokens_per_second"]), f"on {tasks}"),
            ("Lossless", f"{counts[0]} of {counts[1]}", f"{answers} equal to plain decoding's"),
        )
    )


def _fastest(methods: Report, target: str) -> list[Block]:
    """The verdict of a comparison of methods, the best method's figures, and the command that serves what it says."""
    answers = [line for line in methods["lines"] if line["task"] != MEAN]
    lines = [line for line in answers if line["method"] == methods["fastest"]]
    tasks = ", ".join(dict.fromkeys(line["task"] for line in lines))
    counts = [sum(line[name] for line in answers) for name in ("same", "answers")]
    blocks: list[Block] = [Text(methods["verdict"])]
    if methods["fastest"] != PLAIN:
        figures = {by: _joint(lines, by) for by in WORDS}
        blocks.append(_tiles(figures, tasks, counts, "answers of all methods"))
    command = shlex.join(["eyas", "serve", target, *methods["serve"]])
    serve = "Serve it:" if methods.get("certain") else "Until more is known, serve:"
    return [*blocks, Text(serve), ShellCommand(command)]


def _joint(lines: Sequence[Report], by: str) -> Shown:
    """The mean of a figure over lines, with its margin."""
    return fmean(line[by] or 0.0 for line in lines), joint_margin([line.get("margins", {}).get(by) for line in lines])


def accept_length_section(checkpoints: Report | None, trees: Report | None, methods: Report | None) -> Section:
    """Every accept length of the report side by side, after its definition: why one drafter has several."""
    rows: list[tuple[str, str, str]] = []
    if checkpoints is not None:
        best = Candidate.from_dict(checkpoints["ranked"][0])
        training = next(row["training"] for row in checkpoints["checkpoints"] if row["name"] == best.name)
        for metric, words in _IN_TRAINING.items():
            if metric in training:
                rows.append((f"{best.name} {words}", "", f"{training[metric]:.2f}"))
        rows.append(_measured(best, f"{best.name}, among the checkpoints", checkpoints["settings"]["tree"]))
    if trees is not None:
        best = Candidate.from_dict(trees["ranked"][0])
        rows.append(_measured(best, f"{trees['drafter']}, with the best draft tree", best.name))
    if methods is not None:
        grown = {method["method"]: method["tree"] for method in methods["methods"]}
        for name, tree in grown.items():
            lines = [line for line in methods["lines"] if line["method"] == name and line["task"] != MEAN]
            length, margin = _joint(lines, "accept_length")
            rows.append((f"{name}, among the methods", tree, with_margin("{:.2f}", length, margin)))
    return Section(
        "Accept length: one definition, and what each figure was measured on",
        [
            Text(ACCEPT_LENGTH),
            Text(
                "So a drafter has another accept length with each tree and on other prompts. Trees sized by auto draft "
                "nothing where that doesn't pay, and such passes yield one token each. Figures from training are on "
                "validation chats, without a margin. ±: two standard errors over prompts; ±?: one group of prompts."
            ),
            DataTable(("figure", "tree", "accept length"), rows),
        ],
    )


_IN_TRAINING = {
    "validation_accept_length": "in training, simulated: a chain along the true answers of validation chats",
    "decoded_accept_length": "in training, decoded: answers to prompts of validation chats",
}
"""A metric of training -> what it is measured on."""


def _measured(candidate: Candidate, words: str, tree: str | None) -> tuple[str, str, str]:
    figure = with_margin("{:.2f}", candidate.mean("accept_length"), candidate.margin("accept_length"))
    return words, tree or "its own", figure


def trained_section(run: TrainingRun, drafter: Report) -> Section:
    """What was trained on which data, from the recipe and the drafter's config.json."""
    made = drafter.get("eyas", {})
    sizes = {
        "layers": drafter.get("num_hidden_layers"),
        "hidden size": drafter.get("hidden_size"),
        "intermediate size": drafter.get("intermediate_size"),
        "draft vocabulary": f"{cell(drafter.get('draft_vocab_size'))} of {cell(drafter.get('vocab_size'))}",
    }
    facts = {
        "target": made.get("target") or run.recipe.get("target"),
        "kind": (made.get("shape") or {}).get("kind") or (run.recipe.get("shape") or {}).get("kind"),
        **sizes,
        "taps": made.get("taps") or drafter.get("eagle_aux_hidden_state_layer_ids"),
        "answer tokens the draft vocabulary covers": f"{made['covered']:.2%}" if "covered" in made else None,
        "warm start": made.get("warm_start"),
        "data": made.get("data"),
        "chats trained on": made.get("rows"),
        "source": run.recipe.get("source"),
        "loss": made.get("loss"),
        "steps": made.get("steps"),
        "training seconds": made.get("seconds"),
    }
    return Section("What was trained on what", [pairs(facts)])


def data_section(reports: Sequence[tuple[str, Report]]) -> Section:
    """Chat folders: what was read, dropped and written. `reports`: (the folder's name, its report.json)."""
    blocks: list[Block] = []
    for name, report in reports:
        blocks.append(Text(f"{name}, made by {report.get('made_by', 'an unknown tool')}"))
        if "sources" in report:
            blocks += _prepared(report)
        else:
            counts = {key: value for key, value in report.items() if isinstance(value, (int, float)) and value}
            blocks.append(pairs(counts))
        blocks.append(Json("the whole report", report))
    return Section("Data", blocks)


def _prepared(report: Report) -> list[Block]:
    sources = [
        (source["name"], cell(source["rows"]), cell(source["chats"]), f"{source['share']:.0%}")
        for source in report["sources"]
    ]
    splits = []
    for name, split in report["splits"].items():
        lengths = split["length"]["quantiles"]
        share = f"{split['answer_share']:.0%}" if "answer_share" in split else ""
        middle = " / ".join(cell(lengths.get(key, 0)) for key in ("0.05", "0.5", "0.95"))
        splits.append((name, cell(split["chats"]), cell(split["length"]["total"]), middle, share))
    dropped = [
        (source["name"], reason, cell(found["count"]))
        for source in report["sources"]
        for reason, found in source["dropped"].items()
    ]
    unit = "tokens" if report["settings"].get("model") else "characters"
    blocks: list[Block] = [
        DataTable(("source", "rows read", "chats taken", "share"), sources),
        DataTable(("split", "chats", unit, "length 5% / 50% / 95%", "answers' share"), splits),
    ]
    return [*blocks, DataTable(("source", "dropped because", "rows"), dropped)] if dropped else blocks


def store_section(manifest: Report, planned: Sequence[tuple[str, int]], actual: int, ours: str) -> Section:
    """The store: bytes planned and bytes on disk. `planned`: (layout, bytes), the classic one first."""
    splits = manifest["settings"]["splits"]
    tokens = sum(split["tokens"] for split in splits.values())
    classic = planned[0][1]
    rows = [
        (name, f"{total:,}", f"{total / tokens:,.0f}", f"{total / classic:.2f}")
        for name, total in (*planned, (f"on disk: {ours}", actual))
    ]
    columns = ("rows", "tokens", "taught", "dropped")
    counts = [(name, *(cell(split[key]) for key in columns)) for name, split in splits.items()]
    return Section(
        "Store: plan and reality",
        [
            DataTable(("split", *columns), counts),
            DataTable(
                ("layout", "bytes", "bytes per token", "of classic"),
                rows,
                marked=[i for i, row in enumerate(rows) if ours in row[0]],
            ),
            Text(
                "classic: bf16 states of three taps and the final one, ids and mask as int64. Planned figures are "
                "what `eyas plan` gives for the same number of chats of the same mean length.",
                faint=True,
            ),
        ],
    )


def training_section(run: TrainingRun) -> Section:
    """The curves of the run's log over training time."""
    words = "Loss, top-1 accuracy at every draft step, and accept length, over the time spent training."
    return Section("Training", [Image(training_figure(run), words), Text(words, faint=True)])


def checkpoint_section(run: TrainingRun, report: Report) -> Section:
    """Every checkpoint on real tasks, and which one was chosen."""
    ranked = {candidate["name"]: candidate for candidate in report["ranked"]}
    tasks = list(report["ranked"][0]["tasks"])
    shown = [metric for metric in METRICS if any(metric in row["training"] for row in report["checkpoints"])]
    rows = []
    for row in report["checkpoints"]:
        candidate = ranked[row["name"]]
        whole = Candidate.from_dict(candidate)
        figures = [_length_and_speed(Candidate(whole.name, {task: whole.tasks[task]})) for task in tasks]
        metrics = [f"{row['training'][metric]:.3f}" if metric in row["training"] else "" for metric in shown]
        rows.append((row["name"], *metrics, *figures, _length_and_speed(whole)))
    chosen = [row["name"] for row in report["checkpoints"]].index(report["pick"])
    headers = ("checkpoint", *(metric.replace("_", " ") for metric in shown), *tasks, "mean")
    return Section(
        "Checkpoints on real tasks",
        [
            Text(f"Pick: {report['reason']}"),
            Image(checkpoint_figure(run, report), "Training metrics, accept length and speedup on one time axis."),
            DataTable(
                headers,
                rows,
                caption="accept length / speedup over plain decoding, ± two standard errors",
                marked=[chosen],
            ),
            *_warning(report),
        ],
    )


def _length_and_speed(candidate: Candidate) -> str:
    length = with_margin("{:.2f}", candidate.mean("accept_length"), candidate.margin("accept_length"))
    return f"{length} / {with_margin('{:.2f}x', candidate.mean('speedup'), candidate.margin('speedup'))}"


def learning_section(runs: Sequence[tuple[str, Sequence[Learned]]]) -> Section:
    """Accept length on real tasks by tokens trained on. `runs`: (name, its checkpoints in order of steps)."""
    rows = [
        (name, cell(one.chats), cell(one.step), cell(one.tokens), f"{one.accept_length:.3f}")
        for name, checkpoints in runs
        for one in checkpoints
    ]
    words = "Accept length on real tasks by the number of tokens trained on, one line for each run."
    points = [(name, [(one.tokens, one.accept_length) for one in found]) for name, found in runs]
    return Section(
        "Accept length by data",
        [
            Image(learning_figure(points), words),
            DataTable(("run", "chats", "step", "tokens read", "accept length"), rows),
            Text(
                "Tokens read assume full micro-batches and count every epoch. Where a line still rises, more epochs "
                "help; where a run on more chats lies above the others, more data helps.",
                faint=True,
            ),
        ],
    )


_OF_TREES: tuple[tuple[Criterion, str], ...] = (
    ("tokens_per_second", "{:.1f}"), ("speedup", "{:.2f}x"), ("accept_length", "{:.2f}"),
)  # fmt: skip


def tree_section(report: Report) -> Section:
    """The heat map of draft trees and its finalists."""
    rows = [
        (
            candidate.name,
            *(with_margin(form, candidate.mean(by), candidate.margin(by)) for by, form in _OF_TREES),
        )
        for candidate in map(Candidate.from_dict, report["ranked"])
    ]
    return Section(
        "Draft trees",
        [
            Text(f"Pick: {report['reason']}"),
            Image(tree_figure(report), "Heat map of speedup and accept length by depth, beam and nodes."),
            Text(
                "The map shows the last pass of every tree. Framed trees reached the final pass (prompts per file: "
                f"{report['passes'][-1]['prompts']}); only their figures can be compared. The star marks the pick.",
                faint=True,
            ),
            *_warning(report),
            DataTable(("finalist", "tokens/s", "speedup", "accept length"), rows, marked=[0]),
        ],
    )


def methods_section(report: Report) -> Section:
    """The comparison of methods: speedup, accept length, and acceptance rate by draft position."""
    rows = [
        (
            line["method"], line["task"], f"{line['temperature']:g}", _with_margin(line, "speedup", "{:.2f}x"),
            "" if line["accept_length"] is None else _with_margin(line, "accept_length", "{:.2f}"),
            by_position(line["by_position"], "{:.0%}", " / "),
        )
        for line in report["lines"]
        if line["speedup"] is not None
    ]  # fmt: skip
    headers = ("method", "prompts", "T", "speedup", "accept length", "accepted by position")
    return Section(
        "Methods and acceptance by position",
        [
            Image(methods_figure(report), "Speedup, accept length and acceptance by draft position of each method."),
            DataTable(headers, rows, caption="speedup over plain decoding; share of drafts accepted at each position"),
            _costs(report),
            *_warning(report),
        ],
    )


def _with_margin(line: Report, name: str, form: str) -> str:
    """A figure of a line with its margin, if it has one."""
    margins = line.get("margins", {})  # missing in reports of earlier versions
    return with_margin(form, line[name], margins[name]) if name in margins else form.format(line[name])


def _costs(report: Report) -> DataTable:
    """What each method costs besides the time of a target pass."""
    shares = {
        method["method"]: [line["draft_share"] for line in report["lines"] if line["method"] == method["method"]]
        for method in report["methods"]
    }
    rows = [
        (
            method["method"], method["tree"], f"{method['weights_bytes'] / 1e6:.1f}",
            f"{method['cache_bytes'] / 1e6:.1f}", f"{fmean(shares[method['method']]):.0%}",
            describe_training(method["training"]),
        )
        for method in report["methods"]
    ]  # fmt: skip
    headers = ("method", "tree", "weights, MB", "cache, MB", "time spent drafting", "training")
    return DataTable(headers, rows, caption="what each method costs")


def sample_section(samples: Sequence[Report]) -> Section:
    """One prompt from each file and the target's answer, which is the same with any drafter."""
    blocks: list[Block] = []
    for sample in samples:
        blocks.append(Text(f"{sample['task']}: {sample['prompt']}", faint=True))
        blocks.append(Text(sample["answer"]))
    return Section("Sample answers", blocks)


def concurrency_section(report: Report) -> Section:
    """The served drafter under load: throughput and latency by load level."""
    rows = [
        (
            f"{line['load']['level']:g}", line["side"], f"{line['tokens_per_second_median']:.1f}",
            f"{line['ratio_median']:.2f}x",
            f"{line['ttft_ms']['p50']:.0f}" if line["ttft_ms"] else "",
            "" if line["accept_length"] is None else f"{line['accept_length']:.2f}",
        )
        for line in report["lines"]
    ]  # fmt: skip
    load = "concurrent clients" if report["lines"][0]["load"]["kind"] == "closed" else "requests per second"
    headers = (load, "side", "tokens/s", f"ratio to {report['baseline']}", "first token p50 (ms)", "accept length")
    return Section(
        "Concurrency",
        [
            Image(serve_figure(report), "Throughput, ratios, latencies and accept length by load."),
            DataTable(headers, rows, caption="medians of the rounds"),
            *_warning(report),
        ],
    )


def _warning(report: Report) -> list[Block]:
    warning = busy(report["machine"])
    return [] if warning is None else [Text(f"Beware: {warning}.")]


def provenance_section(drafter: Report, machine: Report, recipe: Report) -> Section:
    """The machine of the measurements, the drafter's provenance and the recipe."""
    blocks: list[Block] = [pairs({name: value for name, value in machine.items() if name != "load_average"})]
    if "eyas" in drafter:
        blocks.append(Json("the drafter's provenance", drafter["eyas"]))
    return Section("Machine and provenance", [*blocks, Json("the recipe", recipe)])


GLOSSARY = Section(
    "Words",
    [
        Text(ACCEPT_LENGTH),
        Text(SPEEDUP),
        Text("simulated: from teacher-forced validation; decoded: from generating answers to prompts."),
    ],
)
