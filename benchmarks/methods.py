"""The tables of docs/lab/methods.md, made of what `eyas bench methods --output` wrote.

    python -m benchmarks.methods --page docs/lab/methods.md [RESULT.json ...]

Without files it takes the newest `methods_*.json` in `benchmarks/results/`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any

from benchmarks.harness import script
from benchmarks.pages import insert, markdown
from eyas.bench.offline.report import training_words
from eyas.files import write_text

MARKS = "<!-- methods: begin -->", "<!-- methods: end -->"
RESULTS = Path(__file__).parent / "results"
NOTHING = "No comparison has been measured on a quiet machine yet."


def measured() -> list[Path]:
    """The newest comparison that is kept in this repository; docs/lab has the earlier ones."""
    return sorted(RESULTS.glob("*/methods_*.json"), key=lambda path: path.parent.name)[-1:]


def section(reports: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Markdown of each (name, report): its setting, figures, what the methods cost, and what couldn't run."""
    return "\n\n".join(part for name, report in reports for part in _parts(name, report)) or NOTHING


def _parts(name: str, report: Mapping[str, Any]) -> list[str]:
    settings, machine = report["settings"], report["machine"]
    sampling = settings["sampling"]
    penalty = sampling["frequency_penalty"]
    setting = fill(
        f"**{name}**: `{Path(settings['model']).name}`, {settings['dtype']}, batch {settings['batch_size']}, answers "
        f"of up to {sampling['max_tokens']} tokens{f', frequency penalty {penalty:g}' if penalty else ''}, "
        f"{settings['repeats']} repeats; {machine['cpu']}, {machine['threads']} threads. {report['equality']}",
        150,
    )
    parts = [setting, *(_figures(report, heat) for heat in settings["temperatures"]), _costs(report)]
    if report["skipped"]:
        parts.append(
            "Not measured: " + "; ".join(f"{one['name']} ({one['reason']})" for one in report["skipped"]) + "."
        )
    return parts


def _figures(report: Mapping[str, Any], heat: float) -> str:
    """Speedup with quartiles and accept length on every file, then their means and what they come from."""
    lines = {(line["task"], line["method"]): line for line in report["lines"] if line["temperature"] == heat}
    tasks = list(dict.fromkeys(task for task, _ in lines))
    names = list(dict.fromkeys(method for _, method in lines))
    heads = [f"T = {heat:g}", *tasks, "efficiency", "drafting", "equal answers"]
    rows = []
    for name in names:
        last = lines[tasks[-1], name]
        efficiency = "" if last["efficiency"] is None else f"{last['efficiency']:.2f}"
        equal = f"{last['same']} of {last['answers']}"
        cells = [_cell(lines[task, name]) for task in tasks]
        rows.append([f"`{name}`", *cells, efficiency, f"{last['draft_share']:.0%}", equal])
    return markdown(heads, rows)


def _cell(line: Mapping[str, Any]) -> str:
    if line["speedup_quartiles"] is None and not line["pairs"]:
        return f"{line['tokens_per_second']:.1f} tokens/s"
    spread = "" if line["speedup_quartiles"] is None else " ({:.2f} to {:.2f})".format(*line["speedup_quartiles"])
    return f"{line['speedup']:.2f}x{spread}, {line['accept_length']:.2f}"


def _costs(report: Mapping[str, Any]) -> str:
    rows = []
    for one in report["methods"]:
        sizes = [f"{one[name] / 1e6:.1f}" for name in ("weights_bytes", "cache_bytes")]
        rows.append([f"`{one['method']}`", f"`{one['tree']}`", *sizes, training_words(one["training"])])
    return markdown(["method", "tree", "weights, MB", "cache, MB", "training"], rows)


def read(paths: Sequence[Path]) -> list[tuple[str, Any]]:
    """The reports, each called by its day and file."""
    return [(f"{path.parent.name}, {path.stem}", json.loads(path.read_text(encoding="utf-8"))) for path in paths]


@script
def main(
    results: Annotated[Sequence[Path], "files that eyas bench methods wrote (default: the newest)"] = (),
    *,
    page: Annotated[Path, "the page whose tables are replaced"],
) -> None:
    made = section(read(results or measured()))
    write_text(page, insert(page.read_text(encoding="utf-8"), MARKS, made))


if __name__ == "__main__":
    raise SystemExit(main())
