"""A round asks an accelerator one question.

Tensors on the `meta` device have no values: whoever wants to know one (`item`, `bool`, `nonzero`, a boolean index)
fails. So the whole round runs there, and the one copy to the host that is allowed is answered by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from eyas.drafters.base import Drafter
from eyas.drafters.decoding import NetworkDrafter
from eyas.drafters.hybrid import HybridDrafter
from eyas.drafters.loading import drafter_of
from eyas.drafters.weightless import ngram
from eyas.engine import Engine, Speculation, run_round
from eyas.engine.round import Slots
from eyas.targets import Target
from eyas.tree import DraftTree, TreeSpec, parse_tree, shared
from eyas.tree.shared import PlannedTree, SharedTree
from eyas.types import Request, SamplingParams
from eyas.verify import Sampler

from .. import tiny
from .test_auto import Restless

ROWS = 3
META = torch.device("meta")


@pytest.fixture
def target() -> Target:
    made = Target(tiny.build_model("llama"))
    made.model.to(META)
    made.device = META
    return made


@pytest.fixture
def drafter() -> NetworkDrafter:
    made = tiny.eagle3_drafter()
    return drafter_of(made.network.to(META), made.taps)


class Answers:
    """What the host fetches: chains of tokens from 10 on, and each row accepted its first node, if it has one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked = 0
        self._tree: DraftTree | None = None
        monkeypatch.setattr(Tensor, "cpu", lambda tensor: self._answer(tensor) if tensor.is_meta else tensor)
        own = DraftTree.packed

        def packed(tree: DraftTree) -> Tensor:
            self._tree = tree
            return own(tree)

        monkeypatch.setattr(DraftTree, "packed", packed)

    def _answer(self, fetched: Tensor) -> Tensor:
        self.asked += 1
        tree = self._tree
        assert tree is not None
        size, rows = tree.size, len(tree.tokens)
        parts = (4 if tree.sources is None else 5) * size
        nodes = [*range(10, 10 + size), *range(-1, size - 1), *[1] * size, *[0] * (parts - 3 * size)]
        if fetched.dim() == 2:  # what is fetched is walked on the host: trees, then the target's tokens
            assert fetched.shape[1] == parts + size + 1
            return torch.tensor([[*nodes, *[10] * (size + 1)]] * rows)
        steps = tree.max_depth + 1
        walk = [min(1, size), steps - 1, size, *range(10, 10 + steps), *range(steps)]
        given = torch.tensor([*walk * rows, *nodes * rows])
        return torch.nn.functional.pad(given, (0, len(fetched) - len(given)))


@pytest.mark.every(3)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(
    ("tree", "drafting", "tokens"),
    [
        (None, None, 3),
        (parse_tree("chain:3"), None, 12),
        (parse_tree("chain:3"), [True, False, True], 9),
        (parse_tree("dynamic:3,3,6"), None, 21),
        (SharedTree(3, 3, 7), None, 10),
        (SharedTree(3, 3, 7), [False, True, True], 10),
    ],
)
def test_one_question_a_round(
    target: Target,
    drafter: NetworkDrafter,
    tree: TreeSpec | None,
    drafting: list[bool] | None,
    tokens: int,
    temperature: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter.pairs.resize(ROWS)
    cache = target.allocate(ROWS)
    sampler = Sampler(ROWS, target.vocab_size, META)
    prompts = tiny.prompts(9, 4, 7)
    params = SamplingParams(temperature=temperature, bad_words_ids=((3,), (4, 5)) if temperature else ())
    for slot, prompt in enumerate(prompts):
        sampler.admit(slot, params, prompt, ())
    for piece in target.prefill(cache, range(ROWS), prompts, drafter.taps):
        drafter.defer(range(ROWS), piece.next_tokens, piece.taps, piece.counts)
    answers = Answers(monkeypatch)
    outcome = run_round(
        Slots(target, cache, sampler),
        Speculation(drafter, tree),
        range(ROWS),
        torch.empty(ROWS, dtype=torch.int64, device=META),
        drafting,
    )
    assert answers.asked == 1
    assert outcome.pass_tokens == tokens
    assert cache.lengths == [len(p) + outcome.accepted[0] for p in prompts]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_log_probabilities_come_with_the_outcome(
    target: Target, drafter: NetworkDrafter, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device walks, so that nothing depends on what the host would have to fetch first."""
    drafter.pairs.resize(1)
    cache = target.allocate(1)
    sampler = Sampler(1, target.vocab_size, META)
    prompt = tiny.prompts(5)[0]
    sampler.admit(0, SamplingParams(temperature=temperature, logprobs=2), prompt, ())
    for piece in target.prefill(cache, range(1), [prompt], drafter.taps):
        drafter.defer(range(1), piece.next_tokens, piece.taps, piece.counts)
    answers = Answers(monkeypatch)
    root = torch.empty(1, dtype=torch.int64, device=META)
    outcome = run_round(Slots(target, cache, sampler), Speculation(drafter, parse_tree("chain:3")), range(1), root)
    assert answers.asked == 1
    assert len(outcome.logprobs[0]) == 2


class Drafting(Restless):
    """Plans as always, and then drafts a tree of its kind in every other round."""

    def plan(self, texts: Sequence[int], *args: Any) -> TreeSpec | None:
        super().plan(texts, *args)
        self.tree = None
        if len(self.planned) % 2:
            shape = SharedTree(3, 2, 3 * len(texts))
            values = self.arm.gain.values
            self.tree = PlannedTree(shape, values=values, groups=(0,) * len(texts), keeps_candidates=True)
        return self.tree


@pytest.mark.every(3)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("copies", [False, True])
def test_a_round_of_auto_asks_once(
    target: Target, drafter: NetworkDrafter, copies: bool, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what the controller learns of each draft, and with copies that are united with the network's guesses."""
    # copied by the time of the round's question, without one of its own
    monkeypatch.setattr(shared, "_on_host", lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype))
    used: Drafter = HybridDrafter(drafter, ngram.make(target), META) if copies else drafter
    controller = Drafting(0.001, counts_freely=False, looks_up=copies)
    engine = Engine(target, None, Speculation(used, None), batch_size=2, controller=controller)
    params = SamplingParams(max_tokens=14, temperature=temperature, ignore_eos=True)
    for prompt in ([10, 11, 12, 13, 10, 11], [7, 8, 9]):
        engine.submit(Request(tuple(prompt), params))
    answers = Answers(monkeypatch)
    drafts: list[DraftTree] = []
    while not engine.idle:
        answers.asked = 0
        engine.step()
        outcome = engine.outcome
        if outcome is not None and outcome.contexts:
            assert answers.asked == 1
            drafts += [] if outcome.draft is None else [outcome.draft.tree]
    assert len(drafts) >= 3
    assert all(draft.size and not draft.tokens.is_meta for draft in drafts)
    assert any(draft.sources is not None for draft in drafts) is copies
