"""Forced continuations: counted as decoding counts them, along any text, with contexts that grow."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest
import torch

from benchmarks.long_contexts import ForcedWalk, Piece, chat_pieces, figures, file_pieces, run, with_context
from eyas.drafters.base import Drafter
from eyas.drafters.history import HistoryDrafter
from eyas.drafters.weightless.ngram import NgramDrafter
from eyas.drafters.weightless.suffix import SuffixDrafter
from eyas.engine import Engine, Speculation
from eyas.targets import load_tokenizer
from eyas.tree import DraftTree, TreeSpec, parse_tree
from eyas.types import Limits, Stats
from eyas.verify import Coupling

from .. import tiny
from ..toy.pair import TOY_TARGET

CPU = torch.device("cpu")
NO_COUPLING = cast(Coupling, None)  # drafters of copies don't ask what will be sampled


def replay(
    drafter: HistoryDrafter, spec: TreeSpec, prompt: Sequence[int], answer: Sequence[int], owner: str
) -> tuple[Stats, int]:
    """Draft along an answer, whose first token comes with the prompt: what was accepted, and the nodes drafted."""
    stats, nodes = Stats(), 0
    drafter.begin(0, prompt, owner)
    observe(drafter, [*prompt[1:], answer[0]])
    done = 1
    while done < len(answer):
        tree = drafter.draft(range(1), spec, NO_COUPLING)
        accepted = walk(tree, answer[done:])
        stats.record(accepted, int(tree.depth.max()), len(prompt) + done)
        nodes += int(tree.valid.sum())
        taken = answer[done : done + accepted + 1]
        observe(drafter, taken)
        done += len(taken)
    drafter.finish(0)
    drafter.truncate(0, 0)
    return stats, nodes


def observe(drafter: HistoryDrafter, tokens: Sequence[int]) -> None:
    """Let the drafter's first slot know some more tokens."""
    drafter.observe(range(1), torch.tensor([list(tokens)]), torch.empty(1, len(tokens), 0, 1), [len(tokens)])


def walk(tree: DraftTree, following: Sequence[int]) -> int:
    """How many draft tokens are those that follow."""
    nodes = list(zip(tree.tokens[0].tolist(), tree.parents[0].tolist(), tree.valid[0].tolist(), strict=True))
    at, accepted = -1, 0
    for token in following:
        found = next(
            (node for node, (t, parent, valid) in enumerate(nodes) if valid and (t, parent) == (token, at)), None
        )
        if found is None:
            break
        at, accepted = found, accepted + 1
    return accepted


def engine(rule: ForcedWalk, drafter: Drafter, tree: str) -> Engine:
    speculation = Speculation(drafter, parse_tree(tree))
    return Engine(tiny.target(), None, speculation, rule=rule, limits=Limits(prefix_tokens=400))


def test_rounds_are_those_of_a_replay() -> None:
    """A replay of copied drafts runs no model, and walks by itself."""
    (words,) = tiny.prompts(18)
    prompt, text = [*words, *words[:7]], [*words[7:], *words[:9], 77, *words[2:14], 78, 79, 80, *words]
    rule, spec = ForcedWalk(), "chain:4"
    stats = run(engine(rule, SuffixDrafter(CPU), spec), rule, [Piece(tuple(prompt), tuple(text))])
    expected, _ = replay(slots(SuffixDrafter(CPU)), parse_tree(spec), prompt, text, "")
    assert stats.walked > 20
    assert stats.accepted_histogram == expected.accepted_histogram
    assert (stats.rounds_by_context, stats.walked_by_context) == (
        expected.rounds_by_context, expected.walked_by_context,
    )  # fmt: skip


def test_a_replay_counts_as_the_engine_does() -> None:
    drafter = NgramDrafter(CPU)
    drafter.resize(1)
    # after 1: 2 is copied, 9 isn't; after 9 nothing is known; after 3: 4 5 are copied
    stats, nodes = replay(drafter, parse_tree("chain:2"), [1, 2, 3, 4, 5], [1, 2, 9, 3, 4, 5, 3], "")
    assert stats.accepted_histogram == [1, 1, 1]
    assert (stats.target_passes, nodes) == (3, 4)


def slots(drafter: SuffixDrafter) -> SuffixDrafter:
    drafter.resize(1)
    return drafter


def test_any_text_is_followed_and_what_was_read_is_reused() -> None:
    rule, text = ForcedWalk(), tiny.prompts(150)[0]
    pieces = [Piece(tuple(text[:start]), tuple(text[start : start + 30])) for start in (20, 60, 110)]
    found = engine(rule, tiny.eagle3_drafter(), "dynamic:4,3,8")
    assert run(found, rule, pieces).tokens == 90
    assert found.state().prefix_hit_tokens_total > 60


def test_pieces_of_files_and_chats_grow() -> None:
    tokenizer = load_tokenizer(str(TOY_TARGET))
    tokens = list(range(3, 1200))
    made = list(file_pieces(tokens, 1000))
    assert [len(piece.prompt) for piece in made] == [200, 600]
    assert all(list(piece.prompt + piece.text) == tokens[: len(piece.prompt) + 96] for piece in made)
    source = "def add(a, b):\n    total = a + b\n    print(total)\n    return total\n"
    turns = list(chat_pieces(tokenizer, [source] * 9, 200))
    assert 2 < len(turns) < 9
    for before, after in pairwise(turns):
        assert after.prompt[: len(before.prompt + before.text)] == before.prompt + before.text


def test_a_short_context_becomes_a_long_one_in_a_copy(tmp_path: Path) -> None:
    assert with_context(TOY_TARGET, 2048, tmp_path / "same") == (str(TOY_TARGET), None)
    model, rope = with_context(TOY_TARGET, 9000, tmp_path / "long")
    config = json.loads((Path(model) / "config.json").read_text())
    assert config["max_position_embeddings"] == 10_240
    assert rope == config["rope_parameters"]
    assert (rope["rope_type"], rope["factor"]) == ("yarn", 5.0)


def test_the_ratio_is_of_pooled_rounds() -> None:
    stats = Stats()
    for accepted, context in ((2, 100), (1, 1500), (1, 9000), (0, 9000), (5, 20_000)):
        stats.record(accepted, 5, context)
    assert figures(stats)["8-16k over 0-2k"] == pytest.approx(1.5 / 2.5)
