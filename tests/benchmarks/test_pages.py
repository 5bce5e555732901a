"""Pages with a part that a script makes."""

from __future__ import annotations

import pytest

from benchmarks.pages import insert
from eyas.errors import DataError


def test_only_the_generated_part_of_a_page_is_replaced() -> None:
    marks = ("<!-- begin -->", "<!-- end -->")
    page = "before\n<!-- begin -->\n\nold\n\n<!-- end -->\nafter\n"
    assert insert(page, marks, "new") == "before\n<!-- begin -->\n\nnew\n\n<!-- end -->\nafter\n"
    assert insert(insert(page, marks, "new"), marks, "new") == insert(page, marks, "new")
    with pytest.raises(DataError, match="no part between"):
        insert("before\n", marks, "new")
