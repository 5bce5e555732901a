"""The table of architectures: it covers every type, the page shows it, and running it again gives the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from benchmarks import architectures
from benchmarks.architectures import BROKEN, EQUAL, MARKS, PLAIN, REFUSED, REGISTERED, Row

ROOT = Path(__file__).parents[2]
FILE = ROOT / "benchmarks/results/2026-11-25/architectures.json"
PAGE = ROOT / "docs/models.md"
ROWS = architectures.read_report(FILE)


def tried(kind: str, folder: Path) -> Row:
    return architectures.try_type(kind, folder)


def test_the_page_shows_the_file() -> None:
    version = architectures.version_of(FILE)
    shown = PAGE.read_text(encoding="utf-8").split(MARKS[0])[1].split(MARKS[1])[0].strip()
    assert shown == architectures.page_section(sorted(ROWS.values(), key=lambda row: row.kind), version)
    assert not any(row.result == BROKEN for row in ROWS.values())
    if version == transformers.__version__:
        assert ROWS.keys() == set(REGISTERED)


def test_types_are_listed_by_result_and_reason() -> None:
    """Types of one reason share a line, whatever their names are; the advice is left to the message."""
    rows = [
        Row("good", "G", EQUAL),
        *(Row(kind, "S", REFUSED, f"{kind} keeps a state; use another") for kind in ("a", "b")),
    ]
    made = architectures.page_section([*rows, Row("new", "N", EQUAL, version="6")], "5")
    assert made.startswith(
        "4 model types of transformers 5, 1 of them tried with 6.\n\n**equal**, 2: plain decoding equals"
    )
    assert made.endswith("\n\n- keeps a state: `a`, `b`")
    assert "**broken**" not in made


def test_accepted_drafts_disagree_at_times() -> None:
    """With drafts that are always or never right an equality means little."""
    found = [row.accept_length for row in ROWS.values() if row.result == EQUAL]
    assert len(found) > 80
    assert all(1.3 < accepted < 4.5 for accepted in found)


@pytest.mark.every(3)
@pytest.mark.parametrize(("kind", "result"), [("llama", EQUAL), ("xlstm", REFUSED), ("opt", EQUAL)])
def test_a_type_is_tried(kind: str, result: str, tmp_path: Path) -> None:
    row = tried(kind, tmp_path)
    assert (row.result, ROWS[kind].result) == (result, result)
    assert (row.tokens > 100) == (result == EQUAL)
    assert bool(row.reason) == (result == REFUSED)


def test_what_differs_is_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speculated = architectures._speculated

    def wrong(*arguments: object) -> object:
        done = speculated(*arguments)  # type: ignore[arg-type]
        done[2].token_ids[4] = 2
        return done

    monkeypatch.setattr(architectures, "_speculated", wrong)
    row = tried("llama", tmp_path)
    assert (row.result, row.reason) == (BROKEN, "chain:3 differs from plain decoding")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind, row in ROWS.items() if row.result in (EQUAL, PLAIN, REFUSED)])
def test_the_table_is_true(kind: str, tmp_path: Path) -> None:
    version = ROWS[kind].version or architectures.version_of(FILE)
    if version != transformers.__version__:
        pytest.skip(f"it was tried with transformers {version}")
    row = tried(kind, tmp_path)
    assert row.result == ROWS[kind].result
