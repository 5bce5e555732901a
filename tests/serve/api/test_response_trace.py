"""Trace fields: pieces that make up the answer, trees with their paths."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from eyas.serve.api.response import RoundTrace, draft_fields
from eyas.types import Chunk, Completion, DraftRound, Stats

from ...pairs import tokenizer


def test_pieces_are_one_per_token_and_join_to_the_text() -> None:
    ids = tokenizer().encode("héllo wörld — añd 🦅 more", add_special_tokens=False)
    done = Completion("", ids, "", "length", Stats())
    cuts = [0, 3, 4, 9, len(ids)]
    tracer = RoundTrace(tokenizer())
    pieces = []
    for begin, end in pairwise(cuts):
        fields = tracer.fields(Chunk(0, tuple(ids[begin:end]), 1, done if end == len(ids) else None))
        assert fields["accepted"] == 1
        assert len(fields["pieces"]) == len(fields["token_ids"]) == end - begin
        assert "draft" not in fields
        pieces += fields["pieces"]
    assert "".join(pieces) == tokenizer().decode(ids, skip_special_tokens=True)


def test_an_answer_cut_within_a_character_ends_like_its_text() -> None:
    ids = tokenizer().encode("eagle 🦅", add_special_tokens=False)[:-1]
    fields = RoundTrace(tokenizer()).fields(Chunk(0, tuple(ids), 0, Completion("", ids, "", "length", Stats())))
    assert "".join(fields["pieces"]) == tokenizer().decode(ids)


def test_a_tree_is_told_node_by_node() -> None:
    root, first, second = tokenizer().encode("return a + b", add_special_tokens=False)[:3]
    draft = DraftRound(root, (first, second, first), (-1, 0, -1), (-0.5, -1.23456, -math.inf), (0, 1))
    fields = draft_fields(draft, tokenizer())
    assert fields["logprob"] == [-0.5, -1.2346, -100.0]
    assert fields["parents"] == [-1, 0, -1]
    assert fields["path"] == [0, 1]
    assert tokenizer().decode([root]) + fields["pieces"][0] + fields["pieces"][1] == tokenizer().decode(
        [root, first, second]
    )


@pytest.mark.parametrize("name", ["eos_token"])
def test_special_tokens_of_a_tree_are_named(name: str) -> None:
    special = getattr(tokenizer(), name)
    draft = DraftRound(5, (tokenizer().convert_tokens_to_ids(special),), (-1,), (0.0,), ())
    assert draft_fields(draft, tokenizer())["pieces"] == [special]
