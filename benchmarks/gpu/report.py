"""The results of all steps as a Markdown page with a table for every section."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu.steps import Results, Row, Step
from benchmarks.pages import markdown

NOTES = {
    "kernels": "Linear layers of an 8B model's shapes in Triton: the greatest difference from the product in float32, "
    "as a share of the greatest output; whether a row has the same bits alone and among 2 to 64; how fast weights "
    "are read. Passes of the random pair by their number of nodes. Prompts of the pair, read whole and in pieces.",
    "random": "A random target of an 8B model's shape. Accept lengths are set: an oracle drafts the plain continuation "
    "with a fixed probability per level, while a drafter network of that shape runs as usual (except `for free`).",
    "int4": "The random pair with the target's weights in 4 bits.",
    "modules": "The random pair without kernels in Triton.",
    "SmolLM2": "SmolLM2-135M with its drafter: `auto` against plain decoding of the same prompts, one at a time, with "
    "kernels in Triton and with the model's modules.",
    "wide": "The demo pair in wider matrices (1024 x 3072 on a GPU). Its drafter knows chats; prompts are random.",
    "lossless: families": "`graphs`: how many passes were recorded as CUDA graphs; 0 if the model can't be recorded.",
    "lossless: hybrids": "Models with recurrent layers, whose passes are never recorded.",
    "rounds": "`device ms`: kernel time. `exposed host ms`: the rest of the round. `host waits`: how often per round "
    "the host waits for the device, including copies from pageable memory.",
}
"""Section -> explanation of its figures."""


def page(results: Results, steps: Sequence[Step]) -> str:
    """All sections in the order of their steps, including steps not run yet."""
    identity = results.identity
    lines = [f"# eyas on {identity['device']}", ""]
    lines += [", ".join(f"{name} {value}" for name, value in identity.items() if name != "device"), ""]
    if identity["sizes"] != "full":
        lines += ["**The stand-in: tiny shapes on a CPU. These figures only show that the script works.**", ""]
    for section in dict.fromkeys(step.section for step in steps):
        lines += [f"## {section}", ""]
        if section in NOTES:
            lines += [NOTES[section], ""]
        lines += [_section(results, [step for step in steps if step.section == section]), ""]
    return "\n".join(lines)


def _section(results: Results, steps: Sequence[Step]) -> str:
    rows: list[Row] = []
    for step in steps:
        entry = results.entry(step)
        if entry is None:
            rows.append({"step": step.name, "result": "not run yet"})
            continue
        result = {"step": step.name, "result": _result(entry), "s": entry["seconds"]}
        rows += [result | row for row in entry.get("rows") or [{}]]
    return table(rows)


def _result(entry: Mapping[str, Any]) -> str:
    return entry["status"] if entry["status"] == "done" else f"{entry['status']}: {entry['error']}"


def table(rows: Sequence[Row]) -> str:
    """Markdown with a column for every key of the rows, in order of appearance."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return markdown(columns, ([_cell(row.get(column)) for column in columns] for row in rows))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    text = f"{value:.2g}" if isinstance(value, float) and 0 < abs(value) < 1e-3 else str(value)
    return " ".join(text.replace("|", "/").split())[:300]
