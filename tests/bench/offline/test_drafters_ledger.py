"""What is known is not measured again, and nothing else is believed."""

from __future__ import annotations

from pathlib import Path

import pytest

from eyas.bench.offline.drafters import Ledger
from eyas.errors import DataError

from .candidates import task


def ledger(folder: Path, **tasks: str) -> Ledger:
    made = Ledger(folder, {"dtype": "float32"}, tasks)
    made.open("step-1", "weights")
    return made


def test_scores_are_kept_by_settings_weights_and_prompts(tmp_path: Path) -> None:
    one = task((10, 5, 5, 1.0))
    other = task((20, 5, 5, 1.0))
    first = ledger(tmp_path, math="p", code="q")
    first.put("step-1", "math", one)
    assert ledger(tmp_path, math="p", code="q").scores("step-1") == {"math": one}
    ledger(tmp_path, code="q").put("step-1", "code", other)  # another session must not forget math
    assert ledger(tmp_path, math="p", code="q").scores("step-1") == {"math": one, "code": other}
    assert ledger(tmp_path, math="changed", code="q").scores("step-1") == {"code": other}
    again = ledger(tmp_path, math="p")
    again.open("step-1", "other weights")
    assert again.scores("step-1") == {}
    another = Ledger(tmp_path, {"dtype": "bfloat16"}, {"math": "p"})
    another.open("step-1", "weights")
    assert another.scores("step-1") == {}
    assert not list(tmp_path.rglob(".*"))


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    made = ledger(tmp_path, math="p")
    made.put("step-1", "math", task((10, 5, 5, 1.0)))
    (made.folder / "step-1.json").write_text("{}")
    with pytest.raises(DataError, match=r"step-1.json has no readable scores: delete it"):
        ledger(tmp_path, math="p")
