"""lm-eval: `local-completions` scores given continuations and generates, on two tasks written here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from common import MODEL, TOKENIZER, URL, post

CHOICES = [
    ("def add(a, b):\n    return a", [" + b", " unicorn"]),
    ("Natalia sold 48/2 =", [" <<48/2=24>>24 clips", "????"]),
]
"""A context and its continuations; the first is far more likely."""
CONTEXT = "def add(a, b):\n"


def write_task(folder: Path, name: str, rows: list[dict[str, Any]], **task: Any) -> None:
    """Write a task over rows of a file; lm-eval reads YAML, a superset of JSON."""
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
    (folder / f"{name}.yaml").write_text(json.dumps({**shared, "test_split": "test", "num_fewshot": 0, **task}))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Both tasks run as users run them: the results, and the samples of each task."""
    folder = tmp_path_factory.mktemp("tasks")
    write_task(
        folder,
        "choose",
        [{"context": context, "choices": choices, "gold": 0} for context, choices in CHOICES],
        output_type="multiple_choice",
        doc_to_text="{{context}}",
        doc_to_choice="choices",
        doc_to_target="gold",
        target_delimiter="",
        metric_list=[{"metric": "acc"}],
    )
    write_task(
        folder,
        "go_on",
        [{"context": CONTEXT, "answer": "x"}],
        output_type="generate_until",
        doc_to_text="{{context}}",
        doc_to_target="answer",
        metric_list=[{"metric": "exact_match"}],
        generation_kwargs={"until": ["\n\n"], "max_gen_toks": 24, "do_sample": False, "temperature": 0},
    )
    tokens = f"tokenizer={TOKENIZER},tokenizer_backend=huggingface,max_length=512"
    model = f"model={MODEL},base_url={URL}/v1/completions,{tokens}"
    command = [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args", model]
    tasks = ["--tasks", "choose,go_on", "--include_path", str(folder), "--batch_size", "2"]
    output = ["--output_path", str(folder / "out"), "--log_samples"]
    done = subprocess.run([*command, *tasks, *output], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    samples = {
        name: [json.loads(line) for file in (folder / "out").rglob(f"samples_{name}_*") for line in file.open()]
        for name in ("choose", "go_on")
    }
    (summary,) = (folder / "out").rglob("results_*.json")
    return {"results": json.loads(summary.read_text())["results"], **samples}


def test_continuations_are_scored_as_the_server_echoes_them(results: dict[str, Any]) -> None:
    assert results["results"]["choose"]["acc,none"] == 1.0
    for sample in results["choose"]:
        context, choices = CHOICES[sample["doc_id"]]
        for choice, response in zip(choices, sample["filtered_resps"], strict=True):
            echoed = post("/v1/completions", prompt=context + choice, max_tokens=1, echo=True, logprobs=1)
            scores = echoed["choices"][0]["logprobs"]
            begins = [at for at, offset in enumerate(scores["text_offset"]) if offset >= len(context)]
            given = len(context + choice)
            own = [scores["token_logprobs"][at] for at in begins if scores["text_offset"][at] < given]
            assert float(response[0]) == pytest.approx(sum(own), abs=1e-3)


def test_generation_stops_at_its_stop_text(results: dict[str, Any]) -> None:
    (sample,) = results["go_on"]
    expected = post("/v1/completions", prompt=CONTEXT, max_tokens=24, stop=["\n\n"])["choices"][0]["text"]
    assert sample["resps"][0][0] == expected
