"""The tables of docs/lab/methods.md: what the results hold, and nothing else."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import methods
from benchmarks.methods import MARKS, NOTHING, measured, read, section

PAGE = Path(__file__).parents[2] / "docs" / "lab" / "methods.md"


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


def test_the_page_has_what_the_results_say() -> None:
    shown = PAGE.read_text(encoding="utf-8").split(MARKS[0])[1].split(MARKS[1])[0].strip()
    assert shown == section(read(measured()))


def test_a_report_in_tables() -> None:
    made = section([("a day, methods_wide", REPORT)])
    for words in (
        "**a day, methods_wide**: `wide`, bfloat16, batch 1, answers of up to 64 tokens, frequency penalty 0.5, "
        "3 repeats; a processor, 2 threads. Every answer is the same.",
        "| T = 0 | gsm8k | mean | efficiency | drafting | equal answers |",
        "| `none` | 20.0 tokens/s | 20.0 tokens/s |  | 25% | 7 of 8 |",
        "| `eagle3` | 1.90x (1.80 to 1.95), 3.00 | 1.50x, 2.50 | 0.60 | 25% | 7 of 8 |",
        "| `eagle3` | `chain:3` | 2.0 | 0.1 | 1500 steps, 10 min |",
        "Not measured: mtp (the checkpoint has no modules).",
    ):
        assert words in made.replace("\n", " ")
    assert section([]) == NOTHING


def test_the_script_writes_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, result = tmp_path / "page.md", tmp_path / "methods_x.json"
    page.write_text(f"before\n{MARKS[0]}\nold\n{MARKS[1]}\nafter\n")
    result.write_text(json.dumps(REPORT))
    monkeypatch.setattr(sys, "argv", ["methods", str(result), "--page", str(page)])
    methods.main()
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith(f"{MARKS[1]}\nafter\n")
    assert "1.90x (1.80 to 1.95), 3.00" in text
    assert "old" not in text
