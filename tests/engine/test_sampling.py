"""At any temperature a seeded run with speculation is the seeded run without it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest

from eyas.engine import Engine, Speculation
from eyas.tree import DraftTree, TreeSpec, parse_tree
from eyas.types import Request, SamplingParams
from eyas.verify import Coupling

from .. import tiny

PARAMS: dict[str, dict[str, Any]] = {
    "pure": {"temperature": 1.0},
    "hot": {"temperature": 3.0, "top_p": 0.95},
    "cut": {"temperature": 0.7, "top_k": 12, "min_p": 0.01},
    "penalties": {"temperature": 1.0, "presence_penalty": 0.8, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    "greedy penalties": {"repetition_penalty": 1.5, "logit_bias": {7: 2.0}, "min_tokens": 4},
}


@cache
def requests(name: str) -> list[Request]:
    made = []
    for i, prompt in enumerate(tiny.prompts(13, 1, 20, 5, 9)):
        made.append(Request(tuple(prompt), SamplingParams(max_tokens=14, seed=i, **PARAMS[name])))
    return made


@cache
def plain(name: str) -> list[list[int]]:
    return [c.token_ids for c in Engine(tiny.target("qwen3"), batch_size=2).generate(requests(name))]


SHAPES = [("chain:4", 1), ("static:eagle1", 4), ("dynamic:4,4,12", 3)]


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("name", "shape", "drafter"), tiny.every_other([*PARAMS], SHAPES, ["coupled", "uncoupled", "oracle"])
)
def test_speculation_changes_nothing(name: str, shape: tuple[str, int], drafter: str) -> None:
    tree, batch = shape
    if drafter == "oracle":
        sequences = [[*r.prompt, *tokens] for r, tokens in zip(requests(name), plain(name), strict=True)]
        spec = Speculation(tiny.OracleDrafter(sequences, (1,)), parse_tree(tree))
    else:
        spec = Speculation(tiny.eagle3_drafter(), parse_tree(tree), coupled=drafter == "coupled")
    done = Engine(tiny.target("qwen3"), None, spec, batch_size=batch).generate(requests(name))
    assert [c.token_ids for c in done] == plain(name)
    if drafter == "oracle":
        assert sum(c.stats.walked for c in done) > 10


@pytest.mark.parametrize("kind", ["eagle1", "mla", "mlp"])
def test_no_kind_of_drafter_changes_anything(kind: str) -> None:
    spec = Speculation(tiny.drafter(kind), parse_tree("dynamic:4,4,12"))
    done = Engine(tiny.target("qwen3"), None, spec, batch_size=3).generate(requests("hot"))
    assert [c.token_ids for c in done] == plain("hot")


def test_mixed_requests_share_a_batch() -> None:
    mixed = [requests(name)[i] for i, name in enumerate(PARAMS)]
    spec = Speculation(tiny.eagle3_drafter(), parse_tree("dynamic:4,4,12"))
    done = Engine(tiny.target("qwen3"), None, spec, batch_size=5).generate(mixed)
    assert [c.token_ids for c in done] == [plain(name)[i] for i, name in enumerate(PARAMS)]


def test_seeds_and_parameters_matter() -> None:
    assert len({str(plain(name)) for name in PARAMS}) == len(PARAMS)
    prompt = tuple(tiny.prompts(9)[0])
    seeded = [Request(prompt, SamplingParams(max_tokens=14, temperature=1.0, seed=s)) for s in (1, 2, 1)]
    one, two, same = (c.token_ids for c in Engine(tiny.target("qwen3"), batch_size=3).generate(seeded))
    assert one == same != two


class MindReader(tiny.OracleDrafter):
    """Drafts chains from the target's own distribution; one row only."""

    def __init__(self, first: int) -> None:
        super().__init__([], (1,))
        self._first = first

    def draft(
        self, rows: range, spec: TreeSpec, coupling: Coupling, drafting: Sequence[bool] | None = None
    ) -> DraftTree:
        assert drafting is None or all(drafting)
        growth = spec.start(1, tiny.DEVICE)
        tokens = [self._first, *self._tokens[rows.start]]
        for level in range(spec.depth):
            logits = tiny.full_forward(tiny.target("qwen3").model, tokens).logits[:, -1:]
            score, best = coupling.rank(logits, level, None).topk(1, dim=2)
            growth.expand(score, best)
            tokens.append(int(best))
        return growth.tree()


def test_a_coupled_drafter_that_knows_the_distribution_is_always_right() -> None:
    """It sees the very noise the sampler will use, at every depth; without it it can only guess."""
    prompt = tiny.prompts(9)[0]
    rates = []
    for coupled in (True, False):
        spec = Speculation(MindReader(prompt[0]), parse_tree("chain:4"), coupled)
        params = SamplingParams(max_tokens=24, temperature=3.0, seed=3)
        done = Engine(tiny.target("qwen3"), None, spec).generate([Request(tuple(prompt), params)])[0]
        rates.append(done.stats.acceptance_rate)
    assert rates[0] == 1.0
    assert rates[1] < 0.9
