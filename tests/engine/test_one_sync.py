"""A round asks an accelerator one question.

Tensors on the `meta` device have no values: whoever wants to know one (`item`, `bool`, `nonzero`, a boolean index)
fails. So the whole round runs there, and the one copy to the host that is allowed is answered by hand.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from eyas.drafters.decoding import NetworkDrafter
from eyas.drafters.loading import drafter_of
from eyas.engine import Speculation, run_round
from eyas.engine.round import Slots
from eyas.targets import Target
from eyas.tree import TreeSpec, parse_tree
from eyas.tree.shared import SharedTree
from eyas.types import SamplingParams
from eyas.verify import Sampler

from .. import tiny

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
    asked: list[Tensor] = []

    def answer(tensor: Tensor) -> Tensor:
        """Each row accepted its first node, if there was any."""
        asked.append(tensor)
        if not temperature:  # what is fetched is walked on the host: tokens, parents, validity, then target's tokens
            size = (tensor.numel() // ROWS - 1) // 4
            return torch.tensor([[*range(10, 10 + size), *range(-1, size - 1), *[1] * size, *[10] * (size + 1)]] * ROWS)
        steps = (tensor.numel() // ROWS - 3) // 2
        accepted = min(1, steps - 1)
        row = [accepted, steps - 1, 1, *range(10, 10 + steps), *range(steps)]
        return torch.tensor([*row, *[0] * (tensor.numel() // ROWS - len(row))] * ROWS)

    monkeypatch.setattr(Tensor, "cpu", answer)
    outcome = run_round(
        Slots(target, cache, sampler),
        Speculation(drafter, tree),
        range(ROWS),
        torch.empty(ROWS, dtype=torch.int64, device=META),
        drafting,
    )
    assert len(asked) == 1
    assert outcome.pass_tokens == tokens
    assert cache.lengths == [len(p) + outcome.accepted[0] for p in prompts]
