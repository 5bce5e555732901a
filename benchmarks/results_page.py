"""The tables of docs/results.md, made from files that eyas's verbs wrote with `--output`; the page names the commands.

    python -m benchmarks.results_page --page docs/results.md

Each table stands between two marks and is made from the newest results of its name (`PARTS`) in `benchmarks/results/`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any

from benchmarks.harness import script
from benchmarks.pages import insert, markdown
from eyas.bench.offline.report import describe_training
from eyas.files import write_text
from eyas.labs.sweep.trial import format_value, short_key

RESULTS = Path(__file__).parent / "results"
_TREES = 10
"""Maximum number of trees in a table; slower ones are only in the JSON."""
Report = Mapping[str, Any]


def methods(report: Report) -> str:
    """Results of `eyas bench methods`: speedups with quartiles and accept lengths, then the costs of the methods."""
    parts = [*(_heat(report, heat) for heat in report["settings"]["temperatures"]), _costs(report)]
    if report["skipped"]:
        missing = "; ".join(f"{one['name']} ({one['reason']})" for one in report["skipped"])
        parts.append(f"Not measured: {missing}.")
    return "\n\n".join((setting(report, report["equality"]), *parts))


def _heat(report: Report, heat: float) -> str:
    lines = {(line["task"], line["method"]): line for line in report["lines"] if line["temperature"] == heat}
    tasks = list(dict.fromkeys(task for task, _ in lines))
    # then a sentence says so
    rows = []
    told = all(line["same"] == line["answers"] for line in lines.values())
    for name in dict.fromkeys(method for _, method in lines):
        last = lines[tasks[-1], name]
        efficiency = "" if last["efficiency"] is None else f"{last['efficiency']:.2f}"
        cells = [_speed(lines[task, name]) for task in tasks]
        equal = () if told else (f"{last['same']} of {last['answers']}",)
        rows.append([f"`{name}`", *cells, efficiency, f"{last['draft_share']:.0%}", *equal])
    head = [f"T = {heat:g}", *tasks, "efficiency", "drafting"]
    return markdown(head if told else [*head, "equal answers"], rows)


def _speed(line: Report) -> str:
    if line["speedup_quartiles"] is None and not line["pairs"]:
        return f"{line['tokens_per_second']:.1f} tokens/s"
    spread = "" if line["speedup_quartiles"] is None else " ({:.2f}-{:.2f})".format(*line["speedup_quartiles"])
    return f"{line['speedup']:.2f}x{spread}, {line['accept_length']:.2f}"


def _costs(report: Report) -> str:
    rows = []
    for one in filter(lambda one: one["weights_bytes"], report["methods"]):
        sizes = [f"{one[name] / 1e6:.1f}" for name in ("weights_bytes", "cache_bytes")]
        rows.append([f"`{one['method']}`", f"`{one['tree']}`", *sizes, describe_training(one["training"])])
    return markdown(["method", "tree", "weights, MB", "cache, MB", "training"], rows)


def trees(report: Report) -> str:
    """Results of `eyas bench trees` for the fastest trees, each from the last pass it took part in."""
    last: dict[str, tuple[int, Report]] = {}
    for done in report["passes"]:
        last |= {one["name"]: (done["prompts"], one["mean"]) for one in done["candidates"]}
    ranked = sorted(last.items(), key=lambda item: (-item[1][0], -item[1][1]["speedup"]))
    rows = []
    for name, (prompts, mean) in ranked[:_TREES]:
        length, speedup = mean["accept_length"], mean["speedup"]
        rows.append([f"`{name}`", f"{length:.2f}", f"{speedup:.2f}x", f"{speedup / length:.2f}", str(prompts)])
    table = markdown(["tree", "accept length", "speedup", "efficiency", "prompts of each set"], rows)
    return f"{setting(report, '')} The fastest of {len(ranked)} trees:\n\n{table}"


def checkpoints(report: Report) -> str:
    """Results of `eyas bench checkpoints`: accept length of every checkpoint on every task, in order of steps."""
    found = {one["name"]: one for one in report["ranked"]}
    tasks = list(report["ranked"][0]["tasks"])
    rows = []
    for checkpoint in report["checkpoints"]:
        one = found[checkpoint["name"]]
        lengths = [one["tasks"][task]["accept_length"] for task in tasks]
        rows.append(
            [f"{checkpoint['step']:,}", *(f"{length:.2f}" for length in (*lengths, one["mean"]["accept_length"]))]
        )
    return f"{setting(report, '')}\n\n{markdown(['step', *tasks, 'mean'], rows)}"


def sweep(report: Report) -> str:
    """The trials of `eyas sweep`, best first."""
    knobs = list(report["config"]["knobs"])
    rows = []
    for trial in report["trials"]:
        length, speed = trial["accept_length"], trial["tokens_per_second"]
        figures = [
            trial["failure"] or f"{length:.2f}",
            "" if speed is None else f"{speed:.0f}",
            "" if trial["seconds"] is None else f"{trial['seconds'] / 60:.0f} min",
        ]
        rows.append([*(format_value(trial["values"][knob]) for knob in knobs), *figures])
    columns = zip([*map(short_key, knobs), "accept length", "tokens/s", "training"], *rows, strict=True)
    head, *rows = map(list, zip(*(column for column in columns if any(column[1:])), strict=True))
    return f"**`{report['config']['recipe']}`**, {_place(report)}.\n\n{markdown(head, rows)}"


def load(report: Report) -> str:
    """Results of `eyas bench serve` by number of concurrent clients."""
    rows = []
    told = all(line["same"] == line["compared"] for line in report["lines"])
    for line in report["lines"]:
        ratio = f"{line['ratio_median']:.2f} ({line['ratio_least']:.2f})"
        length = "" if line["accept_length"] is None else f"{line['accept_length']:.2f}"
        cells = [f"{line['tokens_per_second_median']:.0f}", ratio, f"{line['ttft_ms']['p50']:.0f}", length]
        equal = () if told else (f"{line['same']} of {line['compared']}",)
        rows.append([f"{line['load']['level']:g}", line["side"], *cells, *equal])
    head = ["clients", "side", "tokens/s", "ratio (least)", "first token, ms", "accept length"]
    table = markdown(head if told else [*head, "equal answers"], rows)
    return f"Baseline: `{report['baseline']}`, {_place(report)}.{' All answers are equal.' * told}\n\n{table}"


def accuracy(report: Report) -> str:
    """Results of `eyas bench accuracy`: correct answers with and without speculation."""
    names = list(dict.fromkeys(name for line in report["lines"] for name in line["metrics"]))
    rows = []
    for line in report["lines"]:
        scores = [_score(line["metrics"].get(name), line["problems"]) for name in names]
        equal = f"{line['equal']} of {line['compared']}" if line["compared"] else ""
        rows.append([line["task"], f"`{line['method']}`", *scores, equal])
    return f"{setting(report, '')}\n\n{markdown(['task', 'method', *names, 'equal to plain'], rows)}"


def _score(score: Report | None, problems: int) -> str:
    """The number of correct answers, and their share with its standard error."""
    if score is None:
        return ""
    return f"{score['right']} of {problems} ({score['share']:.1%} ± {score['standard_error']:.1%})"


PARTS: dict[str, tuple[str, Callable[[Report], str]]] = {
    "methods": ("smollm2_methods", methods),
    "data of EAGLE-3": ("smollm2_data_eagle3", sweep),
    "data of EAGLE-1": ("smollm2_data_eagle1", sweep),
    "checkpoints": ("smollm2_checkpoints", checkpoints),
    "sweep": ("smollm2_sweep", sweep),
    "trees": ("smollm2_trees", trees),
    "load": ("smollm2_load", load),
    "accuracy": ("smollm2_accuracy", accuracy),
}
"""Part of the page -> the name of its results and the function that makes its table."""


def setting(report: Report, remark: str) -> str:
    """What was measured, and where."""
    settings = report["settings"]
    sampling = settings["sampling"]
    # only what is timed is repeated
    penalty = sampling["frequency_penalty"]
    repeats = settings.get("repeats")
    weights = settings.get("weights") or settings["dtype"]
    text = (
        f"**`{Path(settings['model']).name}`**, {weights}, batch {settings['batch_size']}, answers of up to "
        f"{sampling['max_tokens']} tokens{f', frequency penalty {penalty:g}' if penalty else ''}"
        f"{f', {repeats} ' + ('repeat' if repeats == 1 else 'repeats') if repeats else ''}; {_place(report)}. {remark}"
    )
    return fill(text.strip(), 150)


def _place(report: Report) -> str:
    threads = report["machine"]["threads"]
    return f"{report['machine']['cpu']}, {threads} {'thread' if threads == 1 else 'threads'}"


def newest_of(part: str) -> Path | None:
    """The newest results of a part in this repository; None if it was never measured."""
    found = sorted(RESULTS.glob(f"*/{PARTS[part][0]}.json"), key=lambda path: path.parent.name)
    return found[-1] if found else None


def marks(part: str) -> tuple[str, str]:
    """The marks before and after a part of the page."""
    return f"<!-- results: {part} -->", f"<!-- end of {part} -->"


def made(part: str) -> str:
    """A measured part of the page, with the date of its results."""
    path = newest_of(part)
    assert path is not None
    return f"{path.parent.name}: {PARTS[part][1](json.loads(path.read_text(encoding='utf-8')))}"


@script
def main(*, page: Annotated[Path, "the page whose tables are replaced"]) -> None:
    text = page.read_text(encoding="utf-8")
    for part in filter(newest_of, PARTS):
        text = insert(text, marks(part), made(part))
    write_text(page, text)


if __name__ == "__main__":
    raise SystemExit(main())
