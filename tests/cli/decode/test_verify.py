"""`eyas verify`: the certificate and its exit code."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result

from eyas.bench.offline.certificate import Cell, Certificate, Divergence
from eyas.cli.decode.verify import _print
from eyas.targets import Target
from eyas.tree import NodeLogits

from ...pairs import Pair, write_rows

Run = Callable[..., Result]


@pytest.fixture
def certify(run: Run, pair: Pair, tmp_path: Path) -> Run:
    def call(rows: list[Any], *options: Any) -> Result:
        file = write_rows(tmp_path / "rows.jsonl", rows)
        pair_options = ("--model", pair.model, "--draft-model", pair.drafter, "--max-new-tokens", 6)
        return run("verify", *pair_options, "--prompt-file", file, *options)

    return call


ROWS = [{"prompt": "def add(a, b):"}, {"id": "two", "token_ids": [50, 51, 52]}]


def test_equal(certify: Run) -> None:
    result = certify(ROWS, "--temperatures", "0,1", "--batch-sizes", "1,2", "--tree", "chain:2")
    assert result.exit_code == 0, result.output
    assert result.stdout.rstrip().endswith("\nEQUAL")
    compared = "Compared with plain decoding of one row at a time and the model's own modules"
    assert compared in " ".join(result.stdout.split())
    assert result.stderr.count(": equal\n") == 8  # T x (modules; chain alone; none and chain in a batch of two)


def test_json_and_the_default_trees(certify: Run) -> None:
    result = certify(ROWS, "--temperatures", "0", "--batch-sizes", "2", "--json")
    assert result.exit_code == 0
    certificate = json.loads(result.stdout)
    assert certificate["equal"] is True
    assert [cell["tree"] for cell in certificate["cells"]] == ["modules", "none", "chain:4", "dynamic:5,6,24"]
    assert len(certificate["compared_with"]) == 2
    for cell in certificate["cells"]:
        assert (cell["rows"], cell["tokens"], cell["verdict"]) == (2, 12, "equal")
    assert certificate["near_tie_relative"] == 1e-5


def test_the_modules_can_be_left_out_and_transformers_compared(certify: Run) -> None:
    given = ("--temperatures", "0", "--batch-sizes", "1", "--tree", "chain:2", "--json")
    trees = []
    for more in ("--no-modules", "--transformers"):
        result = certify(ROWS, *given, more)
        assert result.exit_code == 0, result.output
        trees.append([cell["tree"] for cell in json.loads(result.stdout)["cells"]])
    assert trees == [["chain:2"], ["modules", "transformers", "chain:2"]]
    refused = certify(ROWS, *given, "--no-modules", "--transformers")
    assert refused.exit_code == 2
    assert "leave out --no-modules" in refused.stderr


def test_a_difference_is_shown_and_fails(certify: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification passes whose logits are off by one token."""
    verify = Target.verify

    def tilted(target: Target, cache: Any, rows: range, roots: Any, tree: Any, taps: Any) -> Any:
        verified = verify(target, cache, rows, roots, tree, taps)
        return verified._replace(logits=tilt(verified.logits)) if tree.size else verified

    def tilt(logits: NodeLogits) -> NodeLogits:
        return NodeLogits(logits.rows.roll(1, -1), logits.index)

    monkeypatch.setattr(Target, "verify", tilted)
    result = certify(ROWS, "--temperatures", "0", "--batch-sizes", "1", "--tree", "chain:2")
    assert result.exit_code == 1
    assert result.stdout.rstrip().endswith("\nNOT EQUAL")
    assert "DIFFERENT in 2 of 2 rows" in result.stderr
    assert "row two, turn 0, position 1: plain" in result.stdout
    assert "a real difference" in result.stdout


def test_a_row_that_cannot_run_is_named_and_the_rest_compared(certify: Run) -> None:
    result = certify([*ROWS, {"prompt": ""}], "--temperatures", "0", "--batch-sizes", "1", "--tree", "chain:2")
    assert result.exit_code == 1
    assert "error: rows.jsonl:3: prompt" in result.stderr
    assert result.stdout.rstrip().endswith("\nEQUAL")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--temperatures", "0,-1"), "--temperatures 0,-1"),
        (("--temperatures", "nan"), "--temperatures nan"),
        (("--temperatures", "warm"), "--temperatures 'warm': write numbers"),
        (("--batch-sizes", "1.5"), "--batch-sizes 1.5"),
        (("--batch-sizes", "0"), "--batch-sizes 0"),
        (("--tree", "bush:3"), "unknown tree 'bush:3'"),
        (("--tree", "dynamic:2,200,300"), "asks for 200 children, the drafter can offer 120"),
    ],
)
def test_a_bad_grid_is_a_usage_error(certify: Run, options: tuple[str, str], message: str) -> None:
    result = certify(ROWS, *options)
    assert result.exit_code == 2
    assert message in result.stderr


def test_nothing_is_cut_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    trees = ("dynamic:10,16,128", "static:a_name_that_fits_no_column_of_a_terminal")
    divergence = Divergence("1", 0, 3, 5, 6, 1.0, 0.1)
    cells = [Cell(0.7, tree, 16, 128, 123456, 2.34, [divergence]) for tree in trees]
    screen = Terminal()
    with monkeypatch.context() as patched:
        patched.setenv("COLUMNS", "80")
        patched.setattr("sys.stdout", screen)
        _print(Certificate("target", "drafter", torch.float32, cells))
    shown = re.sub(r"\x1b\[[\d;]*m", "", screen.getvalue())  # colors take no columns
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown
    assert "dynamic:10,16,128" in shown.partition("T=")[0]
    assert "DIFFERENT" in shown.partition("T=")[0]
