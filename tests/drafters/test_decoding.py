"""Cached tree drafting against recomputing every path from scratch with the bare network."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from eyas.drafters.decoding import NetworkDrafter
from eyas.tree import DraftTree, parse_tree
from eyas.types import SamplingParams
from eyas.verify import Coupling, Sampler, gumbel

from .. import tiny
from .cacheless import from_scratch

CPU = torch.device("cpu")
TAPS = 3
TREES = ("chain:4", "static:eagle1", "dynamic:4,4,14")


def coupling(rows: int, temperature: float = 0.0, enabled: bool = True, length: int = 8) -> Coupling:
    sampler = Sampler(rows, tiny.VOCAB, CPU)
    for slot in range(rows):
        params = SamplingParams(temperature=temperature, seed=slot)
        sampler.admit(slot, params, [3] * length, ())
    return sampler.coupling(range(rows), enabled)


def history(*lengths: int, seed: int = 0, width: int = tiny.HIDDEN) -> list[tuple[Tensor, Tensor]]:
    """Per row: tokens [n + 1] and taps [n, A, Ht] of n pairs."""
    draw = torch.Generator().manual_seed(seed)
    return [
        (torch.randint(tiny.VOCAB, (n + 1,), generator=draw), 3 * torch.randn(n, TAPS, width, generator=draw))
        for n in lengths
    ]


def observe(drafter: NetworkDrafter, rows: range, pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Show each row its pairs, padded with rubbish."""
    counts = [taps.shape[0] for _, taps in pairs]
    tokens = torch.full((len(pairs), max(counts)), 7)
    states = torch.full((len(pairs), max(counts), TAPS, pairs[0][1].shape[2]), 50.0)
    for row, ((ids, taps), count) in enumerate(zip(pairs, counts, strict=True)):
        tokens[row, :count] = ids[1:]
        states[row, :count] = taps
    drafter.observe(rows, tokens, states, counts)


def paths_of(tree: DraftTree, row: int) -> list[list[int]]:
    """Tokens from the root to each node."""
    paths: list[list[int]] = []
    for node in range(tree.size):
        parent = int(tree.parents[row, node])
        paths.append([*(paths[parent] if parent >= 0 else []), int(tree.tokens[row, node])])
    return paths


def check(drafter: NetworkDrafter, tree: DraftTree, row: int, pair: tuple[Tensor, Tensor]) -> None:
    """Every node's value is the sum of from-scratch log-probabilities, and siblings are the best tokens."""
    ids = drafter.network.target_ids.tolist()
    paths = paths_of(tree, row)
    after = {tuple(p[:-1]): from_scratch(drafter.network, *pair, p[:-1]) for p in paths}
    for node, path in enumerate(paths):
        expected = sum(float(after[tuple(path[:i])][ids.index(path[i])]) for i in range(len(path)))
        assert float(tree.logprob[row, node]) == pytest.approx(expected, rel=1e-3, abs=1e-3)
    for parent, logprob in after.items():
        children = [p[-1] for p in paths if tuple(p[:-1]) == parent]
        best = [ids[i] for i in logprob.topk(len(children)).indices.tolist()]
        assert sorted(children) == sorted(best)


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "two layers": {"num_hidden_layers": 2},
    "3.1": {"fc_norm": True, "norm_output": True},
    "norms before": {"norm_before_fc": True, "norm_before_residual": True, "num_hidden_layers": 2},
    "wider target": {"target_hidden_size": 48},
    "full vocabulary": {"draft_vocab_size": tiny.VOCAB},
}


@pytest.mark.every(3)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("tree", TREES)
def test_a_tree_drafted_with_the_cache_is_every_path_recomputed(name: str, tree: str) -> None:
    drafter = tiny.eagle3_drafter(**SETTINGS[name])
    pairs = history(7, 12, 1, width=drafter.network.config.target_hidden_size)
    drafter.pairs.resize(3)
    observe(drafter, range(3), pairs)
    drafted = drafter.draft(range(3), parse_tree(tree), coupling(3))
    for row in range(3):
        check(drafter, drafted, row, pairs[row])
    assert len({tuple(drafted.tokens[row].tolist()) for row in range(3)}) == 3


def test_drafting_leaves_nothing_behind() -> None:
    drafter = tiny.eagle3_drafter()
    pairs = history(7, 12)
    drafter.pairs.resize(2)
    observe(drafter, range(2), pairs)
    first = drafter.draft(range(2), parse_tree("dynamic:4,4,14"), coupling(2))
    drafter.draft(range(2), parse_tree("static:eagle1"), coupling(2))
    again = drafter.draft(range(2), parse_tree("dynamic:4,4,14"), coupling(2))
    assert torch.equal(first.tokens, again.tokens)
    assert torch.equal(first.logprob, again.logprob)


@pytest.mark.parametrize("sizes", [(7,), (1, 1, 1, 4), (3, 4), (6, 1)])
def test_observing_in_pieces_is_observing_at_once(sizes: tuple[int, ...]) -> None:
    pairs = history(7, 7)
    whole = tiny.eagle3_drafter()
    pieces = tiny.eagle3_drafter()
    for each in (whole, pieces):
        each.pairs.resize(2)
    observe(whole, range(2), pairs)
    for begin, end in itertools.pairwise((0, *itertools.accumulate(sizes))):
        observe(pieces, range(2), [(ids[begin : end + 1], taps[begin:end]) for ids, taps in pairs])
    a, b = (d.draft(range(2), parse_tree("dynamic:4,4,14"), coupling(2)) for d in (whole, pieces))
    assert torch.equal(a.tokens, b.tokens)
    torch.testing.assert_close(a.logprob, b.logprob, rtol=1e-3, atol=1e-3)


def test_rounds_of_ragged_commits() -> None:
    """Draft, learn a different number of pairs in every row, draft again: guesses never linger in the cache."""
    drafter = tiny.eagle3_drafter(num_hidden_layers=2)
    full = history(16, 15, 14)
    drafter.pairs.resize(3)
    done = [0, 0, 0]
    for counts in ((5, 1, 3), (1, 4, 2), (4, 1, 5)):
        part = []
        for row, count in enumerate(counts):
            ids, taps = full[row]
            part.append((ids[done[row] : done[row] + count + 1], taps[done[row] : done[row] + count]))
            done[row] += count
        observe(drafter, range(3), part)
        drafted = drafter.draft(range(3), parse_tree("static:eagle1"), coupling(3))
        for row, (ids, taps) in enumerate(full):
            check(drafter, drafted, row, (ids[: done[row] + 1], taps[: done[row]]))


def test_a_row_drafts_like_it_does_alone() -> None:
    drafter = tiny.eagle3_drafter()
    pairs = history(7, 12, 3)
    drafter.pairs.resize(3)
    observe(drafter, range(3), pairs)
    together = drafter.draft(range(3), parse_tree("dynamic:4,4,14"), coupling(3))
    for row in range(3):
        drafter.pairs.resize(1)
        observe(drafter, range(1), [pairs[row]])
        alone = drafter.draft(range(1), parse_tree("dynamic:4,4,14"), coupling(1))
        assert torch.equal(alone.tokens[0], together.tokens[row])
        assert torch.equal(alone.parents[0], together.parents[row])


def test_moved_and_truncated_slots_draft_from_what_they_hold() -> None:
    drafter = tiny.eagle3_drafter()
    pairs = history(7, 12, 3)
    drafter.pairs.resize(3)
    observe(drafter, range(3), pairs)
    drafter.pairs.move(2, 0)
    drafted = drafter.draft(range(2), parse_tree("static:eagle1"), coupling(2))
    check(drafter, drafted, 0, pairs[2])
    check(drafter, drafted, 1, pairs[1])
    ids, taps = pairs[1]
    drafter.pairs.truncate(1, 5)
    observe(drafter, range(1, 2), [(ids[5:8], taps[5:7])])
    again = drafter.draft(range(2), parse_tree("static:eagle1"), coupling(2))
    check(drafter, again, 1, (ids[:8], taps[:7]))


def test_a_row_that_knows_nothing_offers_nothing() -> None:
    drafter = tiny.eagle3_drafter()
    drafter.pairs.resize(2)
    pairs = history(4)
    observe(drafter, range(1), pairs)
    tree = drafter.draft(range(2), parse_tree("chain:3"), coupling(2))
    assert tree.valid.tolist() == [[True] * 3, [False] * 3]
    check(drafter, tree, 0, pairs[0])


def test_learning_of_nothing_changes_nothing() -> None:
    drafter = tiny.eagle3_drafter()
    drafter.pairs.resize(2)
    pairs = history(4, 6)
    observe(drafter, range(2), pairs)
    before = drafter.draft(range(2), parse_tree("chain:3"), coupling(2))
    drafter.observe(range(2), torch.full((2, 2), 5), torch.ones(2, 2, TAPS, tiny.HIDDEN), [0, 0])
    drafter.observe(range(2), torch.full((2, 1), 5), torch.ones(2, 1, TAPS, tiny.HIDDEN), [0, 0])
    after = drafter.draft(range(2), parse_tree("chain:3"), coupling(2))
    assert torch.equal(before.logprob, after.logprob)


def test_a_prompt_longer_than_the_drafter_was_made_for() -> None:
    """More positions than max_position_embeddings, and more than the cache's first size."""
    drafter = tiny.eagle3_drafter(max_position_embeddings=16)
    pairs = history(300)
    drafter.pairs.resize(1)
    observe(drafter, range(1), pairs)
    check(drafter, drafter.draft(range(1), parse_tree("chain:3"), coupling(1)), 0, pairs[0])


def test_the_nodes_of_a_level_share_a_position(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = tiny.eagle3_drafter()
    drafter.pairs.resize(2)
    seen: list[list[list[int]]] = []
    step = drafter.network.step

    def watched(tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Any) -> Any:
        seen.append(positions.expand_as(tokens).tolist())
        return step(tokens, hidden, positions, attend)

    monkeypatch.setattr(drafter.network, "step", watched)
    observe(drafter, range(2), history(3, 5))
    drafter.draft(range(2), parse_tree("dynamic:3,2,6"), coupling(2))
    assert seen[0] == [[0, 1, 2, 0, 1, 2, 3, 4]]  # the rows end to end
    assert seen[1:] == [[[3, 3], [5, 5]], [[4, 4], [6, 6]]]


def test_coupling_ranks_by_the_noise_of_the_token_s_own_position() -> None:
    """With coupling a chain follows argmax(logits / T + noise): the very noise the sampler will use."""
    drafter = tiny.eagle3_drafter()
    drafter.pairs.resize(1)
    pairs = history(7)
    observe(drafter, range(1), pairs)
    asked: list[int] = []
    coupled = coupling(1, temperature=1.0)
    rank = coupled.rank
    coupled.rank = lambda logits, ahead, ids: asked.append(ahead) or rank(logits, ahead, ids)  # type: ignore
    tree = drafter.draft(range(1), parse_tree("chain:4"), coupled)
    assert asked == [0, 1, 2, 3]
    plain = drafter.draft(range(1), parse_tree("chain:4"), coupling(1, temperature=1.0, enabled=False))
    assert tree.tokens.tolist() != plain.tokens.tolist()
    ids = drafter.network.target_ids
    path = tree.tokens[0].tolist()
    for ahead in range(4):
        noise = gumbel(torch.tensor([0]), torch.tensor([[8 + ahead]]), ids)  # the seed and place of the token
        ranked = from_scratch(drafter.network, *pairs[0], path[:ahead]) + noise.flatten()
        assert int(ids[ranked.argmax()]) == path[ahead]


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_modules_draft_where_there_are_no_native_kernels(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiler, another processor, or EYAS_NATIVE=0."""
    monkeypatch.setattr("eyas.targets.native.decoder.kernels", lambda: None)
    assert tiny.drafter(kind).proposer.decoder is None
