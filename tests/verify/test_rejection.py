"""The p/q rule: distributed as plain sampling, not equal to it; and what it accepts beside the seeded walk."""

from __future__ import annotations

import pytest
import torch

from eyas.drafters.weightless.ngram import NgramDrafter
from eyas.engine import Engine, Speculation
from eyas.errors import UsageError
from eyas.tree import DraftTree, NodeLogits, parse_tree
from eyas.types import Request, SamplingParams
from eyas.verify import RejectionWalk, SeededWalk

from .. import tiny
from .emulation import TableModel, admit_all, exact_distribution, generate, p_value, restart

VOCAB = 8
LENGTH = 3
BATCH = 20_000
TARGET = TableModel.random(VOCAB, seed=1)
DRAFTER = TARGET.disagreeing(seed=2)
SETTINGS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.5, top_p=0.9),
    SamplingParams(temperature=1.3, top_k=5, min_p=0.02),
]
CHAIN = parse_tree("chain:2")


@pytest.mark.parametrize("params", tiny.sample(SETTINGS), ids=["plain", "top-p", "top-k"])
def test_answers_have_the_exact_distribution(params: SamplingParams) -> None:
    """200,000 draws of three tokens out of eight."""
    sampler = admit_all([params] * BATCH, VOCAB)
    answers = []
    lengths = []
    for batch in range(10):
        restart(sampler, torch.arange(BATCH) + batch * BATCH)
        found, accept_length = generate(sampler, RejectionWalk(), TARGET, LENGTH, DRAFTER, CHAIN)
        answers.append(found)
        lengths.append(accept_length)
    assert p_value(torch.cat(answers), exact_distribution(TARGET, params, LENGTH), VOCAB) > 1e-3
    assert 1.2 < sum(lengths) / len(lengths) < 2.9  # drafts were accepted, and rejected


def test_its_draws_are_its_own() -> None:
    sampler = admit_all([SETTINGS[0]] * 100, VOCAB)
    found = []
    for rule in (RejectionWalk(), SeededWalk()):
        restart(sampler, torch.arange(100))
        found.append(generate(sampler, rule, TARGET, LENGTH, DRAFTER, CHAIN)[0])
    assert not torch.equal(*found)


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0])
def test_acceptance_beside_the_seeded_walk(temperature: float) -> None:
    """Of one draft token p/q accepts sum(min(p, q)), which no rule exceeds that draws from q: the coupled walk comes
    within 1 / (1 + d) of it, d being their distance. With a second child it accepts more."""
    rows = 4000
    sampler = admit_all([SamplingParams(temperature=temperature)] * rows, VOCAB)
    state = torch.arange(rows) % 50
    p, q = (model.table[:50].div(temperature).softmax(-1) for model in (TARGET, DRAFTER))
    best = torch.minimum(p, q).sum(-1).mean()
    least = (torch.minimum(p, q).sum(-1) / (2 - torch.minimum(p, q).sum(-1))).mean()
    accepted = []
    for rule, tree in ((RejectionWalk(), "chain:1"), (SeededWalk(), "chain:1"), (SeededWalk(), "dynamic:1,2,2")):
        count = 0
        for seed in range(4):
            restart(sampler, torch.arange(rows) + seed * rows)
            count += _accepted(rule, tree, sampler, state)
        accepted.append(count / (4 * rows))
    by_ratio, coupled, with_two = accepted
    assert by_ratio == pytest.approx(float(best), abs=0.01)
    assert float(least) - 0.01 <= coupled <= float(best) + 0.01
    assert with_two > by_ratio


def _accepted(rule: RejectionWalk | SeededWalk, tree: str, sampler, state) -> int:  # type: ignore[no-untyped-def]
    from eyas.verify import IndependentDraws

    from .emulation import draft, node_states

    rows = range(len(state))
    draws = None if rule.seeded else IndependentDraws(sampler, rows)
    made = draft(DRAFTER, state, parse_tree(tree), draws or sampler.coupling(rows, True))
    made = made if draws is None else draws.attached_to(made)
    logits = NodeLogits.of(TARGET.table[node_states(made, state)])
    return int(rule(logits, made, sampler, rows).accepted.sum())


@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "mlp"])
def test_drafters_of_every_kind_draw(kind: str) -> None:
    """Greedy rows beside sampled ones: these are plain decoding's, those run to their ends and say what they are."""
    requests = [
        Request(tuple(prompt), SamplingParams(max_tokens=16, temperature=heat, seed=3, ignore_eos=True))
        for prompt, heat in zip(tiny.prompts(5, 9, 3, 1), (0.0, 1.0, 0.0, 0.8), strict=True)
    ]
    plain = Engine(tiny.target(), batch_size=8).generate(requests)
    speculation = Speculation(tiny.drafter(kind), parse_tree("chain:3"))
    engine = Engine(tiny.target(), None, speculation, batch_size=4, rule=RejectionWalk())
    done = engine.generate(requests)
    engine.check_invariants()
    assert [one.token_ids for one in done[::2]] == [one.token_ids for one in plain[::2]]
    assert [len(one.token_ids) for one in done] == [16] * 4
    assert not any(one.seeded or one.lossy for one in done)
    assert done[0].as_dict()["seeded"] is False


def test_what_it_needs_is_said() -> None:
    target = tiny.target()
    with pytest.raises(UsageError, match="draws from distributions"):
        Engine(target, None, Speculation(NgramDrafter(target.device), parse_tree("chain:4")), rule=RejectionWalk())
    for tree in ("dynamic:4,3,8", "static:slim", "shared:3,1,9"):
        with pytest.raises(UsageError, match="chains of a fixed length"):
            Engine(target, None, Speculation(tiny.eagle3_drafter(), parse_tree(tree)), rule=RejectionWalk())
    tree = DraftTree(*(torch.tensor([[x]]) for x in (1, -1)), torch.zeros(1, 1), torch.tensor([[True]]), 1)
    sampler = admit_all([SETTINGS[0]], VOCAB)
    with pytest.raises(UsageError, match="this tree has none"):
        RejectionWalk()(NodeLogits.of(torch.zeros(1, 2, VOCAB)), tree, sampler, range(1))
