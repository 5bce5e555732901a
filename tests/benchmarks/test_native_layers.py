"""Two turns of the campaign show each type in two scales, both sizes and both dtypes; sixteen are all ways."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import transformers

from benchmarks import native_layers
from benchmarks.native_layers import HIDDEN, SCALES, TYPES, Row, rows, tried_before
from eyas.files import write_json

KINDS = [f"type{number}" for number in range(40)]


@pytest.mark.parametrize("turns", [2, 16])
def test_each_type_is_tried_in_ways_that_differ(turns: int) -> None:
    ways = defaultdict(list)
    for row, dtype in rows(KINDS, turns):
        assert str(dtype) == f"torch.{row.dtype}"
        ways[row.kind].append((row.scale, row.hidden, row.dtype))
    assert set(ways) == set(KINDS)
    for each in ways.values():
        assert len(set(each)) == len(each) == turns
        scales, sizes, dtypes = map(set, zip(*each, strict=True))
        assert (len(scales), len(sizes), len(dtypes)) == (min(turns, len(SCALES)), len(HIDDEN), len(TYPES))


def test_rows_of_another_release_are_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, row = tmp_path / "found.json", Row("llama", 1.0, 64, "float32", "native", tokens=24)
    assert tried_before(file) == tried_before(None) == []
    write_json(file, native_layers.findings([row]))
    assert tried_before(file) == [row]
    monkeypatch.setattr(transformers, "__version__", "0")
    assert tried_before(file) == []
