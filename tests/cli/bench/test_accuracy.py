"""`eyas bench accuracy`: scores, equal answers, servers, what is executed, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eyas.session import load
from eyas.targets import Target
from eyas.tree import NodeLogits

from ...bench.serving.fake_server import serving, stream
from ...pairs import Pair, write_rows
from ..conftest import Run

MATH = [
    {"question": "How many are 48/2?", "answer": "48/2 = 24\n#### 24"},
    {"question_id": 5, "turns": ["And half of that?"], "reference": ["#### 12"]},
]
CODE = [
    {
        "task_id": "HumanEval/0",
        "prompt": 'def one():\n    """One."""\n',
        "test": "def check(candidate):\n    assert candidate() == 1\n",
        "entry_point": "one",
    }
]
FEW = ("--max-new-tokens", 8)


@pytest.fixture
def math(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "math.jsonl", MATH)


@pytest.fixture
def code(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "code.jsonl", CODE)


def lines_of(report: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(line["task"], line["method"]): line for line in report["lines"]}


@pytest.mark.parametrize("temperature", [0, 1])
def test_methods_beside_plain_decoding(
    run: Run, pair: Pair, math: Path, code: Path, tmp_path: Path, temperature: int
) -> None:
    file = tmp_path / "out.json"
    result = run(
        *("bench", "accuracy", pair.model, "--draft-model", pair.drafter, "--method", "eagle3", "--method", "ngram"),
        *("--task", f"gsm8k={math}", "--task", f"humaneval={code}", "--temperature", temperature, "--batch-size", 2),
        *("--shots", 1, "--shots-file", math, "--output", file, *FEW),
    )
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    lines = lines_of(report)
    assert list(lines) == [(task, name) for task in ("gsm8k", "humaneval") for name in ("none", "eagle3", "ngram")]
    for (task, name), line in lines.items():
        count = {"gsm8k": 2, "humaneval": 1}[task]
        assert (line["equal"], line["compared"]) == ((0, 0) if name == "none" else (count, count))
        assert line["metrics"] == lines[task, "none"]["metrics"]
        assert line["differences"] == []
    assert list(lines["gsm8k", "none"]["metrics"]) == ["strict-match", "flexible-extract"]
    assert report["equal"] is True
    assert report["settings"]["tasks"] == {
        "gsm8k": {"problems": 2, "shots": 1},
        "humaneval": {"problems": 1, "executed": False},
    }
    assert result.stdout.rstrip().endswith("EQUAL: all 6 answers")


def test_trees_and_json(run: Run, pair: Pair, math: Path) -> None:
    trees = ("--tree", "chain:2", "--tree", "dynamic:2,3,5")
    result = run(
        *("bench", "accuracy", pair.model, "--draft-model", pair.drafter, *trees, "--task", f"gsm8k={math}"),
        *("--limit", 1, "--json", *FEW),
    )
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    names = [f"{pair.drafter} chain:2", f"{pair.drafter} dynamic:2,3,5"]
    assert [line["method"] for line in report["lines"]] == ["none", *names]
    assert {line["problems"] for line in report["lines"]} == {1}


def test_a_difference_is_shown_and_fails(
    run: Run, pair: Pair, math: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Verification passes whose logits are off by one token."""
    verify = Target.verify

    def tilted(target: Target, cache: Any, rows: range, roots: Any, tree: Any, taps: Any) -> Any:
        verified = verify(target, cache, rows, roots, tree, taps)
        moved = NodeLogits(verified.logits.rows.roll(1, -1), verified.logits.index)
        return verified._replace(logits=moved) if tree.size else verified

    monkeypatch.setattr(Target, "verify", tilted)
    file = tmp_path / "out.json"
    result = run(
        *("bench", "accuracy", pair.model, "--draft-model", pair.drafter, "--task", f"gsm8k={math}", "--ignore-eos"),
        *(*FEW, "--output", file),
    )
    assert result.exit_code == 1
    assert "NOT EQUAL: 2 of 2 answers differ" in result.stdout
    assert "a real difference" in result.stdout
    report = json.loads(file.read_text())
    drafted = report["lines"][1]
    assert (report["equal"], drafted["equal"], drafted["broken"]) == (False, 0, 2)
    assert all(one["gap"] > one["tolerance"] and not one["tie"] for one in drafted["differences"])
    assert len(report["answers"]["gsm8k"][str(pair.drafter)]) == 2


def test_two_servers_and_code_that_is_run(run: Run, code: Path, math: Path, tmp_path: Path) -> None:
    def good(body: dict[str, Any]) -> list[bytes]:
        return stream(["```python\ndef one():\n", "    return 1\n```"] if "Write" in str(body) else ["#### 24"])

    def bad(body: dict[str, Any]) -> list[bytes]:
        return stream(["```python\ndef one():\n", "    return 2\n```"] if "Write" in str(body) else ["#### 24"])

    file = tmp_path / "out.json"
    tasks = ("--task", f"gsm8k={math}", "--task", f"humaneval={code}", "--execute")
    with serving(good) as one, serving(bad) as two:
        both = ("--endpoint", two.url, "--baseline-endpoint", one.url, "--api-key", "k")
        differ = run("bench", "accuracy", *both, *tasks, *FEW, "--output", file)
        alike = run("bench", "accuracy", "--endpoint", one.url, "--baseline-endpoint", one.url, *tasks, *FEW)
        alone = run("bench", "accuracy", "--endpoint", one.url, *tasks, *FEW)
    lines = lines_of(json.loads(file.read_text()))
    assert differ.exit_code == 1
    assert "programs are run" in differ.stderr
    shares = {name: lines["humaneval", name]["metrics"]["pass@1"]["share"] for name in ("baseline", "endpoint")}
    assert shares == {"baseline": 1.0, "endpoint": 0.0}
    assert lines["gsm8k", "endpoint"]["metrics"]["strict-match"]["right"] == 1
    assert (lines["gsm8k", "endpoint"]["equal"], lines["humaneval", "endpoint"]["equal"]) == (2, 0)
    assert "from character 32 on '2\\n```', baseline '1\\n```'" in differ.stdout
    assert (alike.exit_code, alone.exit_code) == (0, 0), alike.output
    assert "EQUAL: all 3 answers" in alike.stdout
    assert "NOTHING COMPARED" in alone.stdout


def test_our_server_beside_our_engine(run: Run, pair: Pair, math: Path) -> None:
    pytest.importorskip("uvicorn")
    from ...serve.live import live

    with live(load(pair.model, pair.drafter, tree="chain:2"), model_names=("tiny",)) as server:
        result = run(
            *("bench", "accuracy", pair.model, "--endpoint", server.url, "--task", f"gsm8k={math}", *FEW, "--json"),
        )
    assert result.exit_code == 0, result.output
    lines = lines_of(json.loads(result.stdout))
    assert (lines["gsm8k", "endpoint"]["equal"], lines["gsm8k", "endpoint"]["compared"]) == (2, 2)


def test_a_server_that_fails(run: Run, math: Path) -> None:
    with serving(lambda _: 503) as server:
        result = run("bench", "accuracy", "--endpoint", server.url, "--task", f"gsm8k={math}", *FEW)
    assert result.exit_code == 1
    assert "error: gsm8k, endpoint: math.jsonl:1: 503" in result.stderr


def test_the_report_page_shows_it(run: Run, pair: Pair, math: Path) -> None:
    from eyas.bench.accuracy.compare import accuracy_section
    from eyas.bench.report.page import render

    result = run("bench", "accuracy", pair.model, "--method", "ngram", "--task", f"gsm8k={math}", *FEW, "--json")
    page = render("x", [], [accuracy_section(json.loads(result.stdout))])
    for words in ("no answer differs", "strict-match", "ngram", "2/2"):
        assert words in page


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--task gsm9k={math}", "--task gsm9k="),
        ("--task gsm8k", "write gsm8k=FILE or humaneval=FILE"),
        ("--task gsm8k={math} --task gsm8k={code}", "given twice"),
        ("--task gsm8k={math} --shots 5", "--shots 5 needs examples"),
        ("--task gsm8k={math} --shots-file {math}", "--shots-file would be ignored"),
        ("--task humaneval={code} --shots 1 --shots-file {math}", "--shots is about gsm8k"),
        ("--task gsm8k={math} --execute", "--execute is about code"),
        ("--task humaneval={eagle} --execute", "no `test` and `entry_point`"),
        ("--task gsm8k={math} --method none", "leave it out"),
        ("--task gsm8k={math} --method bush", "unknown method 'bush'"),
        ("--task gsm8k={math} --method eagle3", "method eagle3 needs a drafter: give one with --draft-model"),
        ("--task gsm8k={math} --method ngram --draft-model demo", "is for none of the methods"),
        ("--task gsm8k={math} --tree chain:2", "--tree and --coupled are about drafting"),
        ("--task gsm8k={math} --method ngram --tree bush", "unknown tree 'bush'"),
        ("--task gsm8k={math} --output {none}/out.json", "there is no directory"),
    ],
)
def test_what_is_refused(run: Run, pair: Pair, math: Path, code: Path, options: str, words: str) -> None:
    eagle = write_rows(math.parent / "eagle.jsonl", [{"turns": ["def f():"], "reference": ["    pass"]}])
    given = options.format(math=math, code=code, eagle=eagle, none=math.parent / "none").split()
    result = run("bench", "accuracy", pair.model, *given)
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert result.stdout == ""


def test_bad_rows_and_missing_files(run: Run, pair: Pair, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", [{"turns": ["How many?"]}])
    result = run("bench", "accuracy", pair.model, "--task", f"gsm8k={file}")
    assert result.exit_code == 1
    assert "rows.jsonl:1: `reference` is missing" in result.stderr
    result = run("bench", "accuracy", pair.model, "--task", f"gsm8k={tmp_path / 'none.jsonl'}")
    assert "can't read the problems" in result.stderr
