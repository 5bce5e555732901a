"""A round's tree for those who asked: invalid nodes left out, indices closed up."""

from __future__ import annotations

import torch

from eyas.engine import Engine, Speculation
from eyas.engine.round import VerifiedDraft
from eyas.engine.runner import draft_rounds
from eyas.tree import DraftTree, parse_tree
from eyas.types import Request, SamplingParams

from .. import tiny


def test_the_valid_nodes_and_the_walked_path() -> None:
    tree = DraftTree(
        tokens=torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33]]),
        parents=torch.tensor([[-1, 0, 0, 2], [-1, -1, 1, 2], [-1, 0, 1, 2]]),
        logprob=torch.tensor([[-0.5, -1.0, -1.5, -2.0], [-0.25, -0.5, -0.75, -1.0], [-1.0, -2.0, -3.0, -4.0]]),
        valid=torch.tensor([[True, False, True, True], [True, True, True, True], [False] * 4]),
        max_depth=3,
    )
    draft = VerifiedDraft(tree, [[0, 1, 3, 4], [0, 2], [0]])
    found = draft_rounds(draft, [1, 2, 3], [0, 2])
    assert found.keys() == {0}  # row 1 didn't ask, row 2 was offered nothing
    assert found[0].root == 1
    assert found[0].tokens == (10, 12, 13)
    assert found[0].parents == (-1, 0, 1)
    assert found[0].logprob == (-0.5, -1.5, -2.0)
    assert found[0].path == (0, 1, 2)
    assert draft_rounds(draft, [1, 2, 3], [1])[1].path == (1,)


def test_a_plain_round_has_no_tree() -> None:
    assert draft_rounds(None, [1, 2], [0, 1]) == {}
    empty = DraftTree.empty(2, torch.device("cpu"))
    assert draft_rounds(VerifiedDraft(empty, [[0], [0]]), [1, 2], [0, 1]) == {}


def test_chunks_of_traced_requests_carry_the_trees_they_came_from() -> None:
    prompts = tiny.prompts(9, 13, 5)
    expected = [tiny.continuation(tiny.target().model, prompt, 24) for prompt in prompts]
    drafter = tiny.OracleDrafter([p + e for p, e in zip(prompts, expected, strict=True)], (1, 2, 4), 0.3)
    engine = Engine(tiny.target(), None, Speculation(drafter, parse_tree("dynamic:4,3,8")), batch_size=3)
    params = SamplingParams(max_tokens=24)
    requests = [
        Request(tuple(prompts[0]), params, trace=True),
        Request(tuple(prompts[1]), params),
        Request(tuple(prompts[2]), params, trace=True, speculate=False),
    ]
    answers = [list(prompt) for prompt in prompts]
    accepted = 0
    for chunk in engine.stream(requests):
        draft = chunk.draft
        first = answers[chunk.index] == prompts[chunk.index]  # it comes out of prefill
        assert (draft is not None) == (chunk.index == 0 and not first)
        if draft is not None:
            assert draft.root == answers[0][-1]
            assert all(parent < node for node, parent in enumerate(draft.parents))
            assert [draft.parents[node] for node in draft.path] == [-1, *draft.path][: len(draft.path)]
            assert (
                tuple(draft.tokens[node] for node in draft.path)[: chunk.accepted] == chunk.token_ids[: chunk.accepted]
            )
            assert len(draft.path) == chunk.accepted or chunk.completion is not None
            assert all(value <= 0 for value in draft.logprob)
            accepted += chunk.accepted
        answers[chunk.index] += chunk.token_ids
    assert answers == [prompt + tokens for prompt, tokens in zip(prompts, expected, strict=True)]
    assert accepted > 4
