"""Prompts taken from held-out chats."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.data.chats.folder import prompt_of, spread, write_prompts
from eyas.data.tokens.tokenize import TokenRow
from eyas.errors import DataError
from eyas.text.prompts import PromptRow, read_prompts


def row(prompt: int, answer: int, name: str = "r") -> TokenRow:
    mask = np.array([False] * prompt + [True] * answer + [False] * 2)
    return TokenRow(np.arange(len(mask), dtype=np.int64), mask, name)


def test_a_prompt_is_what_comes_before_the_first_answer() -> None:
    assert prompt_of(row(3, 2)) == (0, 1, 2)
    assert prompt_of(row(3, 0)) == ()
    assert prompt_of(row(0, 2)) == ()


@given(st.lists(st.integers(), unique=True), st.integers(1, 30))
def test_spread_keeps_order_and_reaches_over_all(items: list[int], count: int) -> None:
    chosen = spread(items, count)
    assert len(chosen) == min(count, len(items))
    assert [item for item in items if item in set(chosen)] == chosen
    if items:
        assert chosen[0] == items[0]


def test_the_file_is_a_prompt_file(tmp_path: Path) -> None:
    rows = [row(n, n % 3, f"c{n}") for n in range(1, 9)]
    assert write_prompts(tmp_path / "new" / "p.jsonl", rows, 3) == 3
    read = read_prompts(tmp_path / "new" / "p.jsonl")
    assert [(r.id, r.token_ids) for r in read if isinstance(r, PromptRow)] == [
        (f"c{n}", tuple(range(n))) for n in (1, 4, 7)
    ]
    with pytest.raises(DataError, match="no held-out chat has a prompt"):
        write_prompts(tmp_path / "p.jsonl", [row(0, 2)], 3)
