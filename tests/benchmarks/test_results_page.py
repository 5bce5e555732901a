"""The tables of docs/results.md: what the results hold, and nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import results_page
from benchmarks.results_page import PARTS, accuracy, load, made, marks, methods, newest_of, sweep, trees

PAGE = Path(__file__).parents[2] / "docs" / "results.md"


def line(
    task: str, method: str, speedup: float, length: float, quartiles: Any = None, pairs: int = 4
) -> dict[str, Any]:
    return {
        "task": task, "method": method, "temperature": 0.0, "tokens_per_second": 20.0 * speedup, "speedup": speedup,
        "speedup_quartiles": quartiles, "pairs": pairs, "accept_length": length, "draft_share": 0.25,
        "efficiency": None if method == "none" else speedup / length, "same": 7, "answers": 8,
    }  # fmt: skip


REPORT = {
    "machine": {"cpu": "a processor", "threads": 2},
    "settings": {
        "model": "far/away/wide", "dtype": "bfloat16", "batch_size": 1, "repeats": 3, "temperatures": [0.0],
        "sampling": {"max_tokens": 64, "frequency_penalty": 0.5},
    },
    "methods": [
        {"method": "eagle3", "drafter": "d", "tree": "chain:3", "weights_bytes": 2_000_000, "cache_bytes": 100_000,
         "training": {"steps": 1500, "seconds": 600}},
    ],
    "skipped": [{"name": "mtp", "reason": "the checkpoint has no modules"}],
    "lines": [
        line("gsm8k", "none", 1.0, 1.0, pairs=0), line("gsm8k", "eagle3", 1.9, 3.0, [1.8, 1.95]),
        line("mean", "none", 1.0, 1.0, pairs=0), line("mean", "eagle3", 1.5, 2.5),
    ],
    "equality": "Every answer is the same.",
}  # fmt: skip


@pytest.mark.parametrize("part", list(filter(newest_of, PARTS)))
def test_the_page_has_what_the_results_say(part: str) -> None:
    begin, end = marks(part)
    assert PAGE.read_text(encoding="utf-8").split(begin)[1].split(end)[0].strip() == made(part)


def test_methods_in_tables() -> None:
    found = methods(REPORT)
    for words in (
        "**`wide`**, bfloat16, batch 1, answers of up to 64 tokens, frequency penalty 0.5, 3 repeats; a processor, "
        "2 threads. Every answer is the same.",
        "| T = 0 | gsm8k | mean | efficiency | drafting | equal answers |",
        "| `none` | 20.0 tokens/s | 20.0 tokens/s |  | 25% | 7 of 8 |",
        "| `eagle3` | 1.90x (1.80-1.95), 3.00 | 1.50x, 2.50 | 0.60 | 25% | 7 of 8 |",
        "| `eagle3` | `chain:3` | 2.0 | 0.1 | 1500 steps, 10 min |",
        "Not measured: mtp (the checkpoint has no modules).",
    ):
        assert words in found.replace("\n", " ")


def test_trees_count_with_their_last_pass() -> None:
    def candidate(name: str, length: float, speedup: float) -> dict[str, Any]:
        return {"name": name, "mean": {"accept_length": length, "speedup": speedup}}

    passes = [
        {"prompts": 2, "candidates": [candidate("chain:1", 1.4, 1.2), candidate("chain:5", 2.0, 0.9)]},
        {"prompts": 8, "candidates": [candidate("chain:1", 1.5, 1.1)]},
    ]
    table = trees(REPORT | {"passes": passes, "reason": "chain:1 is best."})
    assert "| `chain:1` | 1.50 | 1.10x | 0.73 | 8 |\n| `chain:5` | 2.00 | 0.90x | 0.45 | 2 |" in table


def test_trials_that_failed_say_so() -> None:
    trial = {"values": {"drafter.data_share": 0.125}, "tokens_per_second": None, "seconds": 90.0, "failure": None}
    report = {
        "config": {"recipe": "smollm2/eagle3", "knobs": {"drafter.data_share": [0.125]}},
        "machine": REPORT["machine"],
        "trials": [{**trial, "accept_length": 2.125}, {**trial, "accept_length": None, "failure": "out of memory"}],
    }
    head = "| data_share | accept length | training |"  # no trial has a speed
    assert f"{head}\n|---|---|---|\n| 0.125 | 2.12 | 2 min |\n| 0.125 | out of memory |" in sweep(report)


def test_the_load_says_what_it_is_compared_with() -> None:
    row = {
        "load": {"kind": "clients", "level": 4}, "side": "auto", "tokens_per_second_median": 120.4, "ratio_median": 1.2,
        "ratio_least": 1.05, "ttft_ms": {"p50": 90.2}, "accept_length": 1.8, "same": 15, "compared": 16,
    }  # fmt: skip
    table = load({"baseline": "plain", "machine": REPORT["machine"], "lines": [row]})
    assert table.startswith("Baseline: `plain`, a processor, 2 threads.")
    assert "| 4 | auto | 120 | 1.20 (1.05) | 90 | 1.80 | 15 of 16 |" in table


def test_right_answers_are_not_timed() -> None:
    def row(method: str, right: int, equal: int, compared: int) -> dict[str, Any]:
        score = {"right": right, "share": right / 8, "standard_error": 0.125}
        figures = {"metrics": {"number": score}, "problems": 8, "equal": equal, "compared": compared}
        return {"task": "gsm8k", "method": method, **figures}

    settings = {name: value for name, value in REPORT["settings"].items() if name != "repeats"}
    report = {"machine": REPORT["machine"], "settings": settings}
    table = accuracy(report | {"lines": [row("none", 2, 0, 0), row("eagle3", 3, 7, 8)]})
    assert "frequency penalty 0.5; a processor" in table
    assert "| task | method | number | equal to plain |" in table
    assert "| gsm8k | `none` | 2 of 8 (25.0% ± 12.5%) |  |" in table
    assert "| gsm8k | `eagle3` | 3 of 8 (37.5% ± 12.5%) | 7 of 8 |" in table


def test_the_script_writes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, day = tmp_path / "page.md", tmp_path / "2026-01-02"
    page.write_text("before\n" + "\n".join(f"{begin}\nold\n{end}" for begin, end in map(marks, PARTS)) + "\nafter\n")
    day.mkdir()
    (day / "smollm2_methods.json").write_text(json.dumps(REPORT))
    monkeypatch.setattr(results_page, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["results_page", "--page", str(page)])
    results_page.main()
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "2026-01-02: **`wide`**" in text
    assert "1.90x (1.80-1.95), 3.00" in text
    assert text.count("old") == len(PARTS) - 1  # nothing else was measured
