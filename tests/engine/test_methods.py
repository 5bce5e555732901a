"""Every method of drafting, eight sequences at once: with any of them a seeded answer is plain decoding's."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from eyas.drafters.base import Drafter
from eyas.drafters.hybrid import HybridDrafter
from eyas.drafters.small_lm.drafter import SmallLmDrafter
from eyas.drafters.weightless import METHODS as WEIGHTLESS
from eyas.drafters.weightless.lookahead import LookaheadDrafter
from eyas.drafters.weightless.suffix import SuffixDrafter
from eyas.engine import Engine, Speculation
from eyas.engine.default_tree import tree_for
from eyas.types import Limits, Request, SamplingParams

from .. import tiny

BATCH = 8
TEMPERATURES = (0.0, 0.7, 1.0)


def _small_lm() -> Drafter:
    return SmallLmDrafter(tiny.Target(tiny.build_model("llama", num_hidden_layers=2)))


def _hybrid() -> Drafter:
    device = tiny.quick_target().device
    return HybridDrafter(tiny.eagle3_drafter(), SuffixDrafter(device), device)


METHODS: dict[str, Callable[[], Drafter]] = {
    "lookahead": lambda: LookaheadDrafter(tiny.quick_target().device, tiny.VOCAB, 5, 3, 4),
    "ngram": lambda: WEIGHTLESS["ngram"](tiny.quick_target()),
    "suffix": lambda: WEIGHTLESS["suffix"](tiny.quick_target()),
    "draft_model": _small_lm,
    "eagle3+suffix": _hybrid,
    **{kind: lambda kind=kind: tiny.drafter(kind) for kind in tiny.KINDS},  # type: ignore[misc]
}
"""What makes the drafter of each method, for the tiny target."""
BRIEF = ("lookahead", "draft_model", "eagle3+suffix", "medusa", "mtp", "dflash")
"""One method a family: those whose tests always run, each at one temperature. The others are slow."""
ALL = [pytest.param(name, marks=() if name in BRIEF else (pytest.mark.slow,)) for name in METHODS]
AT = [
    pytest.param(name, heat, marks=() if name in BRIEF and BRIEF.index(name) % 3 == at else (pytest.mark.slow,))
    for name in METHODS
    for at, heat in enumerate(TEMPERATURES)
]


def requests(temperatures: tuple[float, ...] = TEMPERATURES) -> list[Request]:
    """More than run at once, of few distinct tokens, at each of these temperatures in turn."""
    return [
        Request(
            tuple(3 + token % 8 for token in prompt),
            SamplingParams(max_tokens=20, temperature=temperatures[i % len(temperatures)], seed=i, ignore_eos=True),
        )
        for i, prompt in enumerate(tiny.prompts(13, 1, 20, 5, 9, 3, 30, 7, 11, 4))
    ]


@cache
def plain(temperatures: tuple[float, ...] = TEMPERATURES) -> list[list[int]]:
    """What plain decoding answers, one request after another."""
    return [done.token_ids for done in Engine(tiny.quick_target()).generate(requests(temperatures))]


def engine_of(method: str, batch: int) -> Engine:
    """An engine that drafts with a method, in its own default trees."""
    drafter = METHODS[method]()
    speculation = Speculation(drafter, tree_for(drafter, None))
    return Engine(tiny.quick_target(), None, speculation, limits=Limits(max_running=batch, prefix_tokens=256))


def test_no_method_is_missing() -> None:
    assert set(METHODS) >= {*WEIGHTLESS, *tiny.KINDS, "draft_model"}


@pytest.mark.every(2)
@pytest.mark.parametrize(("method", "temperature"), AT)
def test_eight_at_once_answer_as_one_does_alone(method: str, temperature: float) -> None:
    engine = engine_of(method, BATCH)
    for _ in range(2):  # the second time with prefixes from the cache, and with finished answers to copy from
        done = engine.generate(requests((temperature,)))
        assert [one.token_ids for one in done] == plain((temperature,))
        engine.check_invariants()
    assert sum(one.stats.drafted_depth for one in done) > 0
    if temperature == 0.0:
        assert sum(one.stats.walked for one in done) > 0
