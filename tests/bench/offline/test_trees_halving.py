"""The plan of passes."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from eyas.bench.offline.trees import HALVING_FACTOR, Rung, rungs

some = st.integers(1, 300)


@given(some, some, some, some)
def test_fewer_settings_on_more_prompts_until_all_prompts(
    settings: int, groups: int, coarse: int, finalists: int
) -> None:
    plan = rungs(settings, groups, coarse=coarse, finalists=finalists)
    assert plan[0].settings == settings
    assert plan[-1] == Rung(min(settings, finalists), groups)
    for before, after in pairwise(plan):
        assert before.settings > after.settings >= min(finalists, settings)
        assert after.settings * HALVING_FACTOR >= before.settings
        assert after.groups >= before.groups


def test_an_example() -> None:
    assert rungs(30, 40, coarse=2, finalists=4) == [Rung(30, 2), Rung(10, 6), Rung(4, 40)]
    assert rungs(3, 40, coarse=2, finalists=4) == [Rung(3, 40)]
