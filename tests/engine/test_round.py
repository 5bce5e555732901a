"""One round: what it reports, rounds without drafting in between, rows that don't speculate, ragged trees."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle

import pytest
import torch

from eyas.engine import Engine, RoundOutput, Speculation, run_round
from eyas.engine.round import Slots
from eyas.targets import Target
from eyas.tree import TreeSpec, parse_tree
from eyas.types import Request, SamplingParams
from eyas.verify import Sampler

from .. import tiny

LENGTHS = (13, 1, 20, 5)
TOKENS = 16
RAGGED = "dynamic:4,3,8,0.05"


def rows() -> range:
    return range(len(LENGTHS))


def begin(target: Target, speculation: Speculation, params: SamplingParams, late: bool = False) -> Slots:
    """Admit the prompts; `late`: their pairs are deferred."""
    cache = target.allocate(len(LENGTHS))
    speculation.drafter.pairs.resize(len(LENGTHS))
    sampler = Sampler(len(LENGTHS), target.vocab_size, target.device)
    prompts = tiny.prompts(*LENGTHS)
    for slot, prompt in enumerate(prompts):
        sampler.admit(slot, params.model_copy(update={"seed": slot}), prompt, ())
    tell = speculation.drafter.defer if late else speculation.drafter.observe
    for piece in target.prefill(cache, rows(), prompts, speculation.drafter.taps, 8):
        tell(rows(), piece.next_tokens, piece.taps, piece.counts)
    return Slots(target, cache, sampler)


def decode(
    name: str,
    plan: list[TreeSpec | None],
    params: SamplingParams,
    late: bool = False,
    drafting: list[bool] | None = None,
) -> tuple[list[list[int]], list[RoundOutput]]:
    """At least TOKENS tokens of every row, the rounds' trees taken from `plan` in turn."""
    target = tiny.target(name)
    speculation = Speculation(tiny.eagle3_drafter(), None)
    slots = begin(target, speculation, params, late)
    texts = tiny.prompts(*LENGTHS)
    outcomes = []
    for tree in cycle(plan):
        roots = torch.tensor([text[-1] for text in texts], device=target.device)
        outcome = run_round(slots, replace(speculation, tree=tree), rows(), roots, drafting)
        outcomes.append(outcome)
        for text, tokens in zip(texts, outcome.tokens, strict=True):
            text += tokens
        done = [len(text) - length for text, length in zip(texts, LENGTHS, strict=True)]
        assert [speculation.drafter.pairs.length(slot) for slot in rows()] == [len(text) - 1 for text in texts]
        if min(done) >= TOKENS:
            return [text[length:][:TOKENS] for text, length in zip(texts, LENGTHS, strict=True)], outcomes
    raise AssertionError


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.9)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("late", [False, True])
def test_plain_and_drafting_rounds_mix(params: SamplingParams, late: bool) -> None:
    """Whatever is drafted when, the tokens are plain decoding's, and a late drafter's trees are a prompt one's."""
    plain, _ = decode("qwen3", [None], params)
    tree = parse_tree("chain:3")
    ragged = parse_tree(RAGGED)
    mixed, outcomes = decode("qwen3", [None, tree, None, None, ragged, tree], params, late)
    assert mixed == plain
    assert [o.draft is None for o in outcomes[:6]] == [True, False, True, True, False, False]


def test_a_round_reports_what_it_did() -> None:
    params = SamplingParams()
    _, outcomes = decode("llama", [parse_tree(RAGGED)], params)
    ragged = 0
    for outcome in outcomes:
        assert outcome.draft is not None
        tree, paths = outcome.draft.tree, outcome.draft.paths
        assert outcome.nodes == tree.valid.sum(1).tolist()
        assert outcome.pass_tokens == len(LENGTHS) + sum(outcome.nodes)
        assert [len(path) - 1 for path in paths] == outcome.accepted
        for row, (path, tokens) in enumerate(zip(paths, outcome.tokens, strict=True)):
            assert path[0] == 0
            assert [int(tree.tokens[row, place - 1]) for place in path[1:]] == tokens[:-1]
        assert outcome.draft_seconds > 0
        assert outcome.pass_seconds > 0
        assert outcome.observe_seconds > 0
        ragged += len(set(outcome.nodes)) > 1
    assert ragged > 0
    _, plain = decode("llama", [None], params)
    assert {(o.pass_tokens, o.draft, *o.nodes) for o in plain} == {(4, None, 0, 0, 0, 0)}


@pytest.mark.parametrize("tree", ["chain:3", RAGGED])
def test_rows_that_do_not_speculate_get_no_nodes(tree: str) -> None:
    params = SamplingParams()
    drafting = [True, False, False, True]
    texts, outcomes = decode("llama", [parse_tree(tree)], params, drafting=drafting)
    assert texts == decode("llama", [None], params)[0]
    for outcome in outcomes:
        assert [n for n, alive in zip(outcome.nodes, drafting, strict=True) if not alive] == [0, 0]
    assert all(sum(o.nodes[row] for o in outcomes) > 0 for row in (0, 3))
    _, nobody = decode("llama", [parse_tree(tree)], params, drafting=[False] * 4)
    assert [o.draft for o in nobody] == [None] * len(nobody) != []


def test_requests_say_whether_they_speculate() -> None:
    params = SamplingParams(max_tokens=TOKENS)
    prompts = tiny.prompts(*LENGTHS)
    wanted = [Request(tuple(p), params, speculate=i % 2 == 0) for i, p in enumerate(prompts)]
    references = [tiny.continuation(tiny.target().model, p, TOKENS) for p in prompts]
    oracle = tiny.OracleDrafter([p + r for p, r in zip(prompts, references, strict=True)], (0, 2))
    done = Engine(tiny.target(), None, Speculation(oracle, parse_tree("chain:4")), batch_size=4).generate(wanted)
    assert [c.token_ids for c in done] == references
    assert [c.stats.walked > 0 for c in done] == [True, False, True, False]
    assert [c.stats.drafted_depth > 0 for c in done] == [True, False, True, False]
